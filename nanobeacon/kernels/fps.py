"""Farthest point sampling in Triton, in place: `reduce` for query buffer rows, `reduce_chunks` for the prompt
chunks that come to them; the twins in `reference`.

Knows vectors only: nothing of tokens, RoPE or schedules. A buffer of up to 64 rows fits a tile: one product
gives all cosines, and the picks need that small matrix only. A prompt chunk does not fit: every pick is one
more pass over its vectors, which stay in the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanobeacon.kernels import reference

LARGEST_TILE = 64  # rows of a query buffer up to which `reduce` keeps all cosines in registers


@triton.jit
def lowest(values, index, TIE: tl.constexpr):
    """The lowest index among the values within TIE of the minimum."""
    return tl.min(tl.where(values <= tl.min(values, 0) + TIE, index, 2147483647), 0)


@triton.jit
def reduce_kernel(
    buffer, positions, rows, counts, C, m,
    D: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, PICKS: tl.constexpr, STEP: tl.constexpr,
    TIE: tl.constexpr,
):  # fmt: skip
    """Program (layer and head, request): FPS on the [C, D] rows of one head, then their compaction."""
    count = tl.load(counts + tl.program_id(1))
    if count <= m:
        return
    row_of_heads = tl.load(rows + tl.program_id(1)).to(tl.int64) * tl.num_programs(0)
    base = (row_of_heads + tl.program_id(0)) * C
    buffer += base * D
    positions += base
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIMS)
    valid = row < count

    # Products of two bf16 are exact in float32, so the norms can wait: they stand on the diagonal.
    products = tl.zeros([ROWS, ROWS], tl.float32)
    for first in tl.static_range(0, DIMS, STEP):
        part = first + tl.arange(0, STEP)
        mask = valid[:, None] & (part < D)[None, :]
        vectors = tl.load(buffer + row[:, None] * D + part[None, :], mask=mask, other=0.0)
        products = tl.dot(vectors, tl.trans(vectors), products, input_precision="ieee")
    diagonal = tl.where(row[:, None] == row[None, :], products, 0.0)
    column_scale = 1.0 / tl.maximum(tl.sqrt_rn(tl.sum(diagonal, 0)), 1e-12)
    row_scale = 1.0 / tl.maximum(tl.sqrt_rn(tl.sum(diagonal, 1)), 1e-12)
    cosines = products * column_scale[None, :] * row_scale[:, None]

    column, place = tl.arange(0, ROWS), tl.arange(0, PICKS)
    in_use = column < count
    pick = lowest(tl.where(in_use, tl.sum(cosines, 0) / count, float("inf")), column, TIE)
    picks = tl.where(place == 0, pick, 0)
    nearest = tl.where(in_use, float("-inf"), float("inf"))
    for i in range(1, m):
        nearest = tl.maximum(nearest, tl.sum(tl.where(row[:, None] == pick, cosines, 0.0), 0))
        nearest = tl.where(column == pick, float("inf"), nearest)  # picked once, never again
        pick = lowest(nearest, column, TIE)
        picks = tl.where(place == i, pick, picks)

    # Pick order is no ascending order: every picked row is read before any is written, by all threads.
    picked = place < m
    mask = picked[:, None] & (dim < D)[None, :]
    kept = tl.load(buffer + picks[:, None] * D + dim[None, :], mask=mask, other=0.0)
    kept_positions = tl.load(positions + picks, mask=picked, other=0)
    tl.debug_barrier()
    tl.store(buffer + place[:, None] * D + dim[None, :], kept, mask=mask)
    tl.store(positions + place, kept_positions, mask=picked)


@triton.jit
def addresses(buffer, new, held, index, D: tl.constexpr):
    """Where query `index` of a pool begins: those that the row holds come first, then the chunk's."""
    return tl.where(index < held, buffer + index * D, new + (index - held) * D)


@triton.jit(do_not_specialize=["tokens", "longest"])
def reduce_chunks_kernel(
    buffer, positions, new, new_positions, chunks, scales, nearest,
    row_slots, tokens, longest, C, m,
    D: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, ALL: tl.constexpr, PICKS: tl.constexpr,
    TIE: tl.constexpr,
):  # fmt: skip
    """Program (head, chunk): FPS on what the row holds and the chunk brings, then the recents behind it.

    `scales` (1 / norm) and `nearest` (cosine to the nearest pick) are scratch [chunks, H, longest]; ALL is
    `longest` rounded up. Barriers part what one thread writes from what another reads."""
    head = tl.program_id(0).to(tl.int64)
    heads = tl.num_programs(0)
    chunk = tl.program_id(1).to(tl.int64)

    # 1. The chunk's numbers, and where its row, its queries and its scratch lie.
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

    dim = tl.arange(0, DIMS)
    tile = tl.arange(0, TILE)
    every = tl.arange(0, ALL)
    place = tl.arange(0, PICKS)
    in_head = dim < D
    count = held + candidates
    picks = place  # where there are not more than m: all, in order
    if (candidates > 0) & (count > m):
        # 2. The lengths of all queries, and their mean direction.
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
        tl.debug_barrier()

        # 3. One pass a pick: cosines towards the mean direction choose the first, those towards the newest
        #    pick update `nearest`, and the query whose nearest pick is farthest is the next.
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
                # The similarity to the mean has had its say with the first pick.
                before = tl.load(nearest + index, mask=inside & (i > 1), other=float("-inf"))
                cosine = tl.maximum(cosine, before)
                cosine = tl.where(index == pick, float("inf"), cosine)  # picked once, never again
                tl.store(nearest + index, cosine, mask=inside)
            tl.debug_barrier()
            pick = lowest(tl.load(nearest + every, mask=every < count, other=float("inf")), every, TIE)
            picks = tl.where(place == i, pick, picks)
            source = addresses(buffer, new, held, pick, D)
            towards = tl.load(source + dim, mask=in_head, other=0.0).to(tl.float32) * tl.load(scales + pick)
            tl.debug_barrier()

    # 4. The picks take the first slots. One may lie where another goes: all are read before any is written.
    if candidates > 0:
        picked = place < kept
        mask = picked[:, None] & in_head[None, :]
        source = addresses(buffer, new, held, picks, D)
        rows = tl.load(source[:, None] + dim[None, :], mask=mask, other=0.0)
        held_at = tl.load(positions + picks, mask=picked & (picks < held), other=0)
        new_at = tl.load(new_positions + picks - held, mask=picked & (picks >= held), other=0)
        tl.debug_barrier()
        tl.store(buffer + place[:, None] * D + dim[None, :], rows, mask=mask)
        tl.store(positions + place, tl.where(picks < held, held_at, new_at.to(tl.int32)), mask=picked)

    # 5. What came after the freeze is a recent.
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
    buffer: Tensor, positions: Tensor, new: Tensor, new_positions: Tensor, chunks: Tensor, m: int,
    longest: int,
) -> None:  # fmt: skip
    """As `reference.reduce_chunks`; the last two dimensions of `buffer` must lie together."""
    heads, tokens, head_dim = new.shape
    capacity = buffer.shape[2]
    row_slots = positions.stride(0)
    assert buffer.stride(0) == row_slots * head_dim and buffer.stride(1) == capacity * head_dim
    scratch = torch.empty(2, len(chunks), heads, longest, dtype=torch.float32, device=new.device)
    scales, nearest = scratch
    reduce_chunks_kernel[(heads, len(chunks))](
        buffer, positions, new, new_positions, chunks, scales, nearest,
        row_slots, tokens, longest, capacity, m,
        D=head_dim, DIMS=triton.next_power_of_2(head_dim), TILE=64, ALL=triton.next_power_of_2(longest),
        PICKS=triton.next_power_of_2(m), TIE=reference.TIE, num_warps=8,
    )  # fmt: skip


def reduce(buffer: Tensor, positions: Tensor, rows: Tensor, counts: Tensor, m: int) -> None:
    """As `reference.reduce`. A buffer of more than LARGEST_TILE rows goes to the reference."""
    _, layers, heads, capacity, head_dim = buffer.shape
    if capacity <= m or m == 0:
        return
    if capacity > LARGEST_TILE:
        return reference.reduce(buffer, positions, rows, counts, m)
    dims, tile_rows = triton.next_power_of_2(head_dim), max(16, triton.next_power_of_2(capacity))
    exact = buffer.element_size() > 2  # float32 products use no tensor cores and want more registers
    reduce_kernel[(layers * heads, len(rows))](
        buffer, positions, rows, counts, capacity, m, D=head_dim, DIMS=dims, ROWS=tile_rows,
        PICKS=triton.next_power_of_2(m), STEP=min(dims, 32 if exact else 64), TIE=reference.TIE,
        num_warps=4 if exact or tile_rows > 32 else 1,
    )  # fmt: skip
