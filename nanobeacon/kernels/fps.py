"""Farthest point sampling in Triton, in place: `reduce` for query buffer rows, `reduce_chunks` for
the prompt chunks that come to them; the twins in `reference`. METHOD.md has the algorithm.

Knows vectors only: nothing of tokens, RoPE or schedules.

* A buffer of up to 64 rows fits a tile: one product gives all cosines, and the picks need that
  small matrix only.
* A prompt chunk does not fit: every pick is one more pass over its vectors, which stay in the L2
  cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanobeacon.kernels import reference

LARGEST_TILE = 64  # slots of a query buffer up to which `reduce` keeps all cosines in registers


@triton.jit
def lowest(values, index, TIE: tl.constexpr):
    """The lowest index among the values within TIE of the minimum: of equals the first counts."""
    equals = values <= tl.min(values, 0) + TIE
    return tl.min(tl.where(equals, index, 2147483647), 0)


@triton.jit
def reduce_kernel(
    buffer, positions, rows, counts, C, m,
    D: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
    PICKS: tl.constexpr, STEP: tl.constexpr, TIE: tl.constexpr,
):  # fmt: skip
    """Program (layer and head, request): FPS on the queries of one head, then their compaction.

    m of the first `counts` stay; a head has C vectors in a buffer row. DIMS and PICKS are D and m
    rounded up to powers of two, ROWS a power of two that no count is above; STEP: values of a
    vector that one product takes. Nothing happens where no more than m are used."""
    # 1. The buffer row of this request, layer and head.
    count = tl.load(counts + tl.program_id(1))
    if count <= m:
        return
    # Axis 0 counts layers times heads, as the buffer's second and third dimension do.
    row_of_heads = tl.load(rows + tl.program_id(1)).to(tl.int64) * tl.num_programs(0)
    base = (row_of_heads + tl.program_id(0)) * C
    buffer += base * D
    positions += base
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    valid = row < count

    # 2. All cosines [ROWS, ROWS]. Products of two bf16 are exact in float32, so the norms can wait:
    #    they stand on the diagonal.
    products = tl.zeros([ROWS, ROWS], tl.float32)
    for first in tl.static_range(0, DIMS, STEP):
        part = first + tl.arange(0, STEP)
        mask = valid[:, None] & (part < D)[None, :]
        vectors = tl.load(buffer + row[:, None] * D + part[None, :], mask=mask, other=0.0)
        products = tl.dot(vectors, tl.trans(vectors), products, input_precision="ieee")
    diagonal = tl.where(row[:, None] == row[None, :], products, 0.0)
    column_scale = 1.0 / tl.maximum(tl.sqrt_rn(tl.sum(diagonal, 0)), 1e-12)
    row_scale = 1.0 / tl.maximum(tl.sqrt_rn(tl.sum(diagonal, 1)), 1e-12)
    # A zero query has cosine 0 to everything (METHOD.md).
    cosines = products * column_scale[None, :] * row_scale[:, None]

    # 3. The first pick: the query whose mean cosine to all is smallest. The sum needs no mask:
    #    rows that are not used are zero.
    column = tl.arange(0, ROWS)
    place = tl.arange(0, PICKS)
    in_use = column < count
    pick = lowest(tl.where(in_use, tl.sum(cosines, 0) / count, float("inf")), column, TIE)
    picks = tl.where(place == 0, pick, 0)

    # 4. The others: `nearest` is each query's cosine to the nearest pick, and the query for which
    #    it is smallest is the one that the picks represent worst.
    nearest = tl.where(in_use, float("-inf"), float("inf"))
    for i in range(1, m):
        to_pick = tl.sum(tl.where(row[:, None] == pick, cosines, 0.0), 0)
        nearest = tl.maximum(nearest, to_pick)
        nearest = tl.where(column == pick, float("inf"), nearest)  # picked once, never again
        pick = lowest(nearest, column, TIE)
        picks = tl.where(place == i, pick, picks)

    # 5. The picks take the first rows. Pick order is no ascending order: every picked row is read
    #    before any is written, by all threads.
    picked = place < m
    mask = picked[:, None] & (dim < D)[None, :]
    kept = tl.load(buffer + picks[:, None] * D + dim[None, :], mask=mask, other=0.0)
    kept_positions = tl.load(positions + picks, mask=picked, other=0)
    tl.debug_barrier()
    tl.store(buffer + place[:, None] * D + dim[None, :], kept, mask=mask)
    tl.store(positions + place, kept_positions, mask=picked)


@triton.jit
def addresses(buffer, new, held, index, D: tl.constexpr):
    """Where query `index` of those that compete begins: those that the row holds come first, then
    the chunk's."""
    return tl.where(index < held, buffer + index * D, new + (index - held) * D)


@triton.jit(do_not_specialize=["tokens", "longest"])
def reduce_chunks_kernel(
    buffer, positions, new, new_positions, chunks, scales, nearest,
    row_slots, tokens, longest, C, m,
    D: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, ALL: tl.constexpr,
    PICKS: tl.constexpr, TIE: tl.constexpr,
):  # fmt: skip
    """Program (head, chunk): FPS on what the row holds and the chunk brings, then the
    recents behind it.

    `chunks` int32 [chunks, 6], its columns as `reference.reduce_chunks` has them. `scales` (1 / norm)
    and `nearest` (cosine to the nearest pick) are scratch, float32 [chunks, H, longest]; ALL is
    `longest` rounded up to a power of two. Barriers part what one thread writes from what another
    reads."""
    head = tl.program_id(0).to(tl.int64)
    heads = tl.num_programs(0)
    chunk = tl.program_id(1).to(tl.int64)

    # 1. The chunk's numbers (`observation.Chunk`), and where its row, its queries and its scratch
    #    lie. `new` is [H, tokens, D] of the whole step, whose token `first` is this chunk's first.
    chunks += chunk * 6
    row = tl.load(chunks).to(tl.int64)
    first = tl.load(chunks + 1)
    held = tl.load(chunks + 2)
    candidates = tl.load(chunks + 3)
    kept = tl.load(chunks + 4)
    recents = tl.load(chunks + 5)
    slots = row * row_slots + head * C
    buffer += slots * D
    positions += slots
    new += (head * tokens + first) * D
    new_positions += first
    scales += (chunk * heads + head) * longest
    nearest += (chunk * heads + head) * longest

    # 2. Which queries compete: `held` ones of the row, then `candidates` of the chunk. Where there
    #    are not more than m, all of them stay, in order.
    dim = tl.arange(0, DIMS)
    tile = tl.arange(0, TILE)
    every = tl.arange(0, ALL)
    place = tl.arange(0, PICKS)
    in_head = dim < D
    count = held + candidates
    picks = place
    if (candidates > 0) & (count > m):
        # 3. The lengths of all queries, and their mean direction: the mean of a query's cosines to
        #    all is its cosine to that, so no matrix of them is needed.
        towards = tl.zeros([DIMS], tl.float32)
        for start in range(0, count, TILE):
            index = start + tile
            inside = index < count
            source = addresses(buffer, new, held, index, D)
            mask = inside[:, None] & in_head[None, :]
            vectors = tl.load(source[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
            scale = 1.0 / tl.maximum(tl.sqrt_rn(tl.sum(vectors * vectors, 1)), 1e-12)
            towards += tl.sum(vectors * scale[:, None], 0)
            tl.store(scales + index, scale, mask=inside)
        towards = towards / count
        # Step 4 loads these scales in other threads.
        tl.debug_barrier()

        # 4. One pass a pick: cosines towards the mean direction choose the first, those towards the
        #    newest pick update `nearest`, and the query whose nearest pick is farthest is the next.
        pick = -1
        for i in range(m):
            for start in range(0, count, TILE):
                index = start + tile
                inside = index < count
                source = addresses(buffer, new, held, index, D)
                mask = inside[:, None] & in_head[None, :]
                vectors = tl.load(source[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
                scale = tl.load(scales + index, mask=inside, other=0.0)
                cosine = tl.sum(vectors * towards[None, :], 1) * scale
                # The similarity to the mean has had its say with the first pick: it is not among
                # those that `nearest` remembers.
                before = tl.load(nearest + index, mask=inside & (i > 1), other=float("-inf"))
                cosine = tl.maximum(cosine, before)
                cosine = tl.where(index == pick, float("inf"), cosine)  # picked once, never again
                tl.store(nearest + index, cosine, mask=inside)
            tl.debug_barrier()
            # The next pick: its place among `picks`, and its direction, by which the next
            # pass measures.
            to_nearest = tl.load(nearest + every, mask=every < count, other=float("inf"))
            pick = lowest(to_nearest, every, TIE)
            picks = tl.where(place == i, pick, picks)
            source = addresses(buffer, new, held, pick, D)
            picked_vector = tl.load(source + dim, mask=in_head, other=0.0).to(tl.float32)
            towards = picked_vector * tl.load(scales + pick)
            tl.debug_barrier()

    # 5. The picks take the first slots. One may lie where another goes: all are read before any is
    #    written.
    if candidates > 0:
        picked = place < kept
        mask = picked[:, None] & in_head[None, :]
        source = addresses(buffer, new, held, picks, D)
        rows = tl.load(source[:, None] + dim[None, :], mask=mask, other=0.0)
        held_at = tl.load(positions + picks, mask=picked & (picks < held), other=0)
        new_at = tl.load(new_positions + picks - held, mask=picked & (picks >= held), other=0)
        tl.debug_barrier()
        tl.store(buffer + place[:, None] * D + dim[None, :], rows, mask=mask)
        target = positions + place
        picked_at = tl.where(picks < held, held_at, new_at.to(tl.int32))
        tl.store(target, picked_at, mask=picked)

    # 6. What came after the freeze is a recent: it stands behind the picks, in order.
    #    Every head has the same positions.
    for start in range(0, recents, TILE):
        index = start + tile
        inside = index < recents
        mask = inside[:, None] & in_head[None, :]
        source = candidates + index
        rows = tl.load(new + source[:, None] * D + dim[None, :], mask=mask, other=0.0)
        new_at = tl.load(new_positions + source, mask=inside, other=0)
        slot = kept + index
        tl.store(buffer + slot[:, None] * D + dim[None, :], rows, mask=mask)
        tl.store(positions + slot, new_at.to(tl.int32), mask=inside)


def reduce_chunks(
    buffer: Tensor, positions: Tensor, new: Tensor, new_positions: Tensor,
    chunks: Tensor, m: int, longest: int,
) -> None:  # fmt: skip
    """As `reference.reduce_chunks`; `buffer` and `positions` may be one layer of all, but the
    heads, slots and values of a row must lie together."""
    heads, tokens, head_dim = new.shape
    capacity = buffer.shape[2]
    row_slots = positions.stride(0)
    assert buffer.stride(0) == row_slots * head_dim, "rows of vectors and of positions lie alike"
    assert buffer.stride(1) == capacity * head_dim, "the slots of a head lie together"
    # Scratch that only the programs themselves write and read.
    scales = torch.empty(len(chunks), heads, longest, dtype=torch.float32, device=new.device)
    nearest = torch.empty_like(scales)
    reduce_chunks_kernel[(heads, len(chunks))](
        buffer, positions, new, new_positions, chunks, scales, nearest,
        row_slots, tokens, longest, capacity, m,
        D=head_dim, DIMS=triton.next_power_of_2(head_dim), TILE=64,
        ALL=triton.next_power_of_2(longest), PICKS=triton.next_power_of_2(m), TIE=reference.TIE,
        num_warps=8,
    )  # fmt: skip


def reduce(buffer: Tensor, positions: Tensor, rows: Tensor, counts: Tensor, m: int) -> None:
    """As `reference.reduce`, on the first slots of each head of a contiguous buffer, or all of them.
    More than LARGEST_TILE slots a head go to the reference."""
    _, layers, heads, slots, head_dim = buffer.shape
    capacity = positions.stride(2)
    assert buffer.stride(2) == capacity * head_dim, "vectors and positions lie alike"
    assert positions.stride(1) == heads * capacity, "the heads of a layer lie together"
    # 1. Where nothing can be reduced, or no tile is large enough.
    if slots <= m or m == 0:
        return
    if slots > LARGEST_TILE:
        reference.reduce(buffer, positions, rows, counts, m)
        return

    # 2. A tile of all rows of a head. Float32 products use no tensor cores and want more registers,
    #    so they take fewer values at a time, by more threads; so does a large tile.
    dims = triton.next_power_of_2(head_dim)
    tile_rows = max(16, triton.next_power_of_2(slots))
    is_float32 = buffer.element_size() > 2
    step = min(dims, 32 if is_float32 else 64)
    warps = 4 if is_float32 or tile_rows > 32 else 1

    # 3. One program for each request, layer and head.
    reduce_kernel[(layers * heads, len(rows))](
        buffer, positions, rows, counts, capacity, m,
        D=head_dim, DIMS=dims, ROWS=tile_rows,
        PICKS=triton.next_power_of_2(m), STEP=step, TIE=reference.TIE,
        num_warps=warps,
    )  # fmt: skip
