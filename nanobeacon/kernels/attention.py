"""Paged attention in Triton, decode and prefill; the twin of `reference.paged_attention`.

Knows nothing of requests or budgets: it sees rows of pages, cached lengths, and the borders
of the queries.

* The query heads of a group are rows of one tile, so that keys and values are read once
  for the group.
* A program walks the slots tile by tile and holds three things: the largest logit so far, the sum
  of the weights, and the weighted sum of the values. No logit is ever stored.
* Decode has one query a request, which alone would keep few processors busy. So it splits a
  request's slots over programs (flash-decoding), whose results a second kernel joins.
* How many splits there are follows from host numbers, so that a CUDA graph may keep it. What each
  of them reads, and whether it reads anything, follows from the true length on the device.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

PROCESSORS = 132  # of a GPU, where there is none to ask
# decode programs that a processor runs at once: more of them would wait for a second wave
PROGRAMS_EACH = 5
MOST_SPLITS = 64  # whose results a program of `join_kernel` holds at once
SHORTEST_SPLIT = 128  # slots; below that a split costs more than it saves
TILE_BYTES = 8192  # of keys, and as many of values, in one step of a program
# A page is looked up two steps before its keys are used, these are fetched one step before.
STAGES = 5
FEW_STAGES = 3  # where even the smallest tile has more bytes: shared memory has no room for five
REACH = 2**31  # values that offsets of 32 bits reach
LOG2_E = 1.4426950408889634  # makes logits count in powers of two: exp2 is one instruction


@triton.jit
def split_bounds(end, split, splits, TILE: tl.constexpr, SHORTEST: tl.constexpr):
    """The slots [first, last) of one split, out of [0, end).

    Every split has the same number of whole tiles; the last ones may have none. However many splits
    there are, those of a short cache are no shorter than SHORTEST."""
    share = tl.maximum(tl.cdiv(end, splits), SHORTEST)
    share = tl.cdiv(share, TILE) * TILE
    return split * share, tl.minimum(split * share + share, end)


@triton.jit
def flat_slots(table, tile, end, P: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Where the slots of one tile lie in the pool, [TILE]: page * P + place in the page.

    `tile` is its first slot, a multiple of TILE. TILE and P are powers of two, so a tile lies in
    one page or covers whole ones; each page is looked up once. Offsets have 32 bits unless WIDE."""
    # 1. The tile lies in one page.
    if P >= TILE:
        page = tl.load(table + tile // P)
        if WIDE:
            page = page.to(tl.int64)
        return page * P + tile % P + tl.arange(0, TILE)
    # 2. The tile covers TILE // P pages, of which the last ones may lie past the end.
    in_tile = tl.arange(0, TILE // P)
    page = tl.load(table + tile // P + in_tile, mask=tile + in_tile * P < end, other=0)
    if WIDE:
        page = page.to(tl.int64)
    return tl.reshape(page[:, None] * P + tl.arange(0, P)[None, :], [TILE])


@triton.jit
def attend(
    queries, sees, keys, values, table, begin, end, scale, D: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attention of queries [ROWS, DIMS] over the slots [begin, end) of one request and KV head.

    sees: [ROWS], each row's query sees the slots below it. keys, values: of this KV head. scale:
    makes the logits count in powers of two. Returns for each row the largest logit, the sum of the
    weights relative to it, and the weighted sums of the values, not yet divided."""
    dim = tl.arange(0, DIMS)
    in_head = dim < D
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    for tile in range(begin, end, TILE):
        slot = tile + tl.arange(0, TILE)
        inside = slot < end
        at = flat_slots(table, tile, end, P, TILE, WIDE)

        # 1. The logits. Slots past the end may hold anything, NaN too, and are not loaded:
        #    0 * NaN is NaN.
        mask = inside[None, :] & in_head[:, None]
        key = tl.load(keys + at[None, :] * D + dim[:, None], mask=mask, other=0.0)
        logits = tl.dot(queries, key, input_precision="ieee") * scale
        logits = tl.where(slot[None, :] < sees[:, None], logits, float("-inf"))

        # 2. Their weights; those of the tiles before shrink to the new largest logit.
        #    The largest is finite: every row sees a slot of the first tile.
        new_top = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        top = new_top

        # 3. The weighted sums, in float32; weights are rounded to the dtype of the values.
        mask = inside[:, None] & in_head[None, :]
        value = tl.load(values + at[:, None] * D + dim[None, :], mask=mask, other=0.0)
        weights = weights.to(value.dtype)
        sums = tl.dot(weights, value, sums * shrink[:, None], input_precision="ieee")
    return top, total, sums


@triton.jit(do_not_specialize=["table_stride"])
def attention_kernel(
    q, keys, values, page_table, cached_lengths, cu_seqlens, out, partial, partial_lse,
    table_stride, num_slots, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, SHORTEST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, or split where SPLIT; KV head; request).

    A row of the tile is a pair (query, head of the group): ROWS // G queries, G rows each; ROWS
    need not be a multiple of G. Writes out [T, H, D]; where SPLIT, instead, partial [T, H, splits,
    D] and partial_lse [T, H, splits], both float32."""
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    token = tl.load(cu_seqlens + request)
    count = tl.load(cu_seqlens + request + 1) - token
    length = tl.load(cached_lengths + request)

    # 1. The slots that this program reads: those that its last query sees, or a split of them.
    QUERIES: tl.constexpr = ROWS // G
    first_query = 0 if SPLIT else tl.program_id(0) * QUERIES
    if first_query >= count:
        return
    begin = 0
    end = length - count + tl.minimum(first_query + QUERIES, count)
    if SPLIT:
        begin, end = split_bounds(end, tl.program_id(0), tl.num_programs(0), TILE, SHORTEST)
        if begin >= end:
            return

    # 2. Its queries. Query i of the request sees itself and everything before it.
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    query = first_query + row // G
    head = kv_head * G + row % G
    valid = (row < QUERIES * G) & (query < count)
    mask = valid[:, None] & (dim < D)[None, :]
    at_row = (token + query).to(tl.int64) * H + head
    queries = tl.load(q + at_row[:, None] * D + dim[None, :], mask=mask, other=0.0)
    sees = tl.minimum(length - count + query + 1, end)

    # 3. Their attention. Whoever sees no slot at all gets zeros, not 0 / 0.
    first_value = kv_head.to(tl.int64) * num_slots * D
    keys += first_value
    values += first_value
    table = page_table + request * table_stride
    top, total, sums = attend(
        queries, sees, keys, values, table, begin, end, scale, D, P, ROWS, DIMS, TILE, WIDE
    )
    result = sums / tl.where(total > 0, total, 1.0)[:, None]

    # 4. It is the answer, or a part that is joined with others.
    if SPLIT:
        at_row = at_row * tl.num_programs(0) + tl.program_id(0)
        tl.store(partial + at_row[:, None] * D + dim[None, :], result, mask=mask)
        tl.store(partial_lse + at_row, top + tl.log2(total), mask=valid)
    else:
        tl.store(out + at_row[:, None] * D + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits"])
def join_kernel(
    partial, partial_lse, cached_lengths, cu_seqlens, out, splits,
    H: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, SHORTEST: tl.constexpr,
):  # fmt: skip
    """Program (head, request): joins what the splits found, each by its share of the softmax.

    Only splits that had slots wrote anything; which these are follows from the cached length, as in
    `attention_kernel`. PARTS is `splits` rounded up to a power of two."""
    head = tl.program_id(0)
    request = tl.program_id(1)
    token = tl.load(cu_seqlens + request)
    if tl.load(cu_seqlens + request + 1) == token:
        return

    # 1. The splits that wrote, and the weight of each: exp(lse), as a share of the largest.
    split = tl.arange(0, PARTS)
    length = tl.load(cached_lengths + request)
    first, last = split_bounds(length, split, splits, TILE, SHORTEST)
    wrote = (first < last) & (split < splits)
    at_row = token.to(tl.int64) * H + head
    lse = tl.load(partial_lse + at_row * splits + split, mask=wrote, other=float("-inf"))
    weights = tl.where(wrote, tl.exp2(lse - tl.max(lse, 0)), 0.0)

    # 2. Their sum.
    dim = tl.arange(0, DIMS)
    at = (at_row * splits + split)[:, None] * D + dim[None, :]
    parts = tl.load(partial + at, mask=wrote[:, None] & (dim < D)[None, :], other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + at_row * D + dim, result.to(out.dtype.element_ty), mask=dim < D)


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; where there is none, what a large one has."""
    if device.type != "cuda":
        return PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def number_of_splits(
    requests: int,
    num_kv_heads: int,
    max_cached_length: int,
    processors: int,
) -> int:
    """Over how many programs the slots of a decoding request and KV head are split.

    As many as run at once, at least one, and none that is shorter than SHORTEST_SPLIT in the
    longest cache."""
    at_once = PROGRAMS_EACH * processors // (requests * num_kv_heads)
    useful = triton.cdiv(max_cached_length, SHORTEST_SPLIT)
    return max(1, min(at_once, useful, MOST_SPLITS))


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor,
    page_table: Tensor, cached_lengths: Tensor, cu_seqlens: Tensor,
    max_query_length: int, max_cached_length: int, scale: float,
    runs: list[int | None] | None = None,
) -> Tensor:  # fmt: skip
    """As `reference.paged_attention`; `runs` is not needed here. A request that sees nothing gets
    zeros."""
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, pages, page_size, _ = keys.shape
    num_slots = pages * page_size
    requests = len(cached_lengths)
    group = num_heads // num_kv_heads
    decode = max_query_length == 1

    # 1. Tiles of queries and keys. Where a vector has 1,024 bytes only the smallest fit.
    dims = max(16, triton.next_power_of_2(head_dim))
    vector = dims * q.element_size()  # bytes
    tile = max(16, min(128, TILE_BYTES // vector))
    stages = STAGES if tile * vector <= TILE_BYTES else FEW_STAGES
    if decode or stages == FEW_STAGES:
        rows = 16  # the fewest that `tl.dot` takes
    elif dims > 128 or q.element_size() > 2:
        rows = 32  # more would not fit the registers
    else:
        rows = 64
    rows = max(rows, triton.next_power_of_2(group))

    # 2. Programs: blocks of queries, or splits of a decoding request's slots.
    if decode:
        splits = number_of_splits(requests, num_kv_heads, max_cached_length, processors(q.device))
        blocks = splits
    else:
        splits = 1
        blocks = triton.cdiv(max_query_length, rows // group)

    # 3. What they write: the answer, or what each split found.
    out = torch.empty_like(q)
    partial = None
    lse = None
    if splits > 1:
        lse = torch.empty(tokens, num_heads, splits, dtype=torch.float32, device=q.device)
        partial = lse.new_empty(tokens, num_heads, splits, head_dim)
    attention_kernel[(blocks, num_kv_heads, requests)](
        q, keys, values, page_table, cached_lengths, cu_seqlens, out, partial, lse,
        page_table.stride(0), num_slots, scale * LOG2_E,
        H=num_heads, G=group, D=head_dim, P=page_size,
        ROWS=rows, DIMS=dims, TILE=tile,
        SPLIT=splits > 1, SHORTEST=SHORTEST_SPLIT, WIDE=num_slots * head_dim >= REACH,
        num_warps=4, num_stages=stages,
    )  # fmt: skip

    # 4. What the splits found is joined.
    if splits > 1:
        join_kernel[(num_heads, requests)](
            partial, lse, cached_lengths, cu_seqlens, out, splits,
            H=num_heads, D=head_dim, DIMS=dims,
            TILE=tile, PARTS=triton.next_power_of_2(splits), SHORTEST=SHORTEST_SPLIT,
            num_warps=2,
        )  # fmt: skip
    return out
