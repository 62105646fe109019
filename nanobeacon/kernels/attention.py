"""Paged attention in Triton, decode and prefill; the twin of `reference.paged_attention`.

Knows nothing of requests or budgets: it sees rows of pages, cached lengths, and the borders of the queries.
The query heads of a group are rows of one tile, so that keys and values are read once for the group. Decode
splits a request's slots over programs (flash-decoding), whose results a second kernel joins. How many splits
there are follows from host numbers, so that a CUDA graph may keep it; what each reads, from the true length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 768  # a decode launch has about so many at least: some waves on the largest GPUs
SHORTEST_SPLIT = 128  # slots; below that a split costs more than it saves
TILE_BYTES = 8192  # of keys, and as many of values, in one step of a program
STAGES = 5  # a page is looked up two steps before its keys are used, these are fetched one step before
LOG2_E = 1.4426950408889634


@triton.jit
def split_bounds(end, split, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """The slots [first, last) of one split: whole tiles, the same number for all, in the last ones none."""
    share = tl.cdiv(tl.cdiv(end, SPLITS), TILE) * TILE
    return split * share, tl.minimum(split * share + share, end)


@triton.jit
def attend(
    queries, sees, keys, values, table, begin, end, scale,
    D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attention over the slots [begin, end), in each row those below `sees`: largest logit, sum of the
    weights, the weighted sums, not yet divided. `scale` makes the logits count in powers of two."""
    dim = tl.arange(0, DIMS)
    in_head = dim < D
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    for tile in range(begin, end, TILE):
        slot = tile + tl.arange(0, TILE)
        inside = slot < end
        at = tl.load(table + slot // P, mask=inside, other=0).to(tl.int64) * P + slot % P
        # Slots past the end may hold anything, NaN too, so they are not loaded: 0 * NaN would be NaN.
        mask = inside[None, :] & in_head[:, None]
        key = tl.load(keys + at[None, :] * D + dim[:, None], mask=mask, other=0.0)
        logits = tl.dot(queries, key, input_precision="ieee") * scale
        logits = tl.where(slot[None, :] < sees[:, None], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))  # finite: every row sees a slot of the first tile
        weights = tl.exp2(logits - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        mask = inside[:, None] & in_head[None, :]
        value = tl.load(values + at[:, None] * D + dim[None, :], mask=mask, other=0.0)
        sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, total, sums


@triton.jit(do_not_specialize=["table_stride"])
def attention_kernel(
    q, keys, values, page_table, cached_lengths, cu_seqlens, out, partial, partial_lse,
    table_stride, num_slots, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, or split; KV head; request). A row is a (query, head of the group)."""
    kv_head, request = tl.program_id(1), tl.program_id(2)
    token = tl.load(cu_seqlens + request)
    count = tl.load(cu_seqlens + request + 1) - token
    length = tl.load(cached_lengths + request)
    QUERIES: tl.constexpr = ROWS // G
    first_query = tl.program_id(0) * QUERIES if SPLITS == 1 else 0
    if first_query >= count:
        return
    begin, end = 0, length - count + tl.minimum(first_query + QUERIES, count)  # the last query sees the most
    if SPLITS > 1:
        begin, end = split_bounds(end, tl.program_id(0), SPLITS, TILE)
        if begin >= end:
            return

    row, dim = tl.arange(0, ROWS), tl.arange(0, DIMS)
    query, head = first_query + row // G, kv_head * G + row % G
    valid = (row < QUERIES * G) & (query < count)
    mask = valid[:, None] & (dim < D)[None, :]
    at_row = (token + query).to(tl.int64) * H + head
    queries = tl.load(q + at_row[:, None] * D + dim[None, :], mask=mask, other=0.0)
    sees = tl.minimum(length - count + query + 1, end)
    base = kv_head.to(tl.int64) * num_slots * D
    table = page_table + request * table_stride
    keys, values = keys + base, values + base
    top, total, sums = attend(queries, sees, keys, values, table, begin, end, scale, D, P, ROWS, DIMS, TILE)
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(out + at_row[:, None] * D + dim[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        at_row = at_row * SPLITS + tl.program_id(0)
        tl.store(partial + at_row[:, None] * D + dim[None, :], result, mask=mask)
        tl.store(partial_lse + at_row, top + tl.log2(total), mask=valid)


@triton.jit
def join_kernel(
    partial, partial_lse, cached_lengths, cu_seqlens, out,
    H: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (head, request): joins the splits that had slots, by their softmax share; no other wrote."""
    head, request = tl.program_id(0), tl.program_id(1)
    token = tl.load(cu_seqlens + request)
    if tl.load(cu_seqlens + request + 1) == token:
        return
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    first, last = split_bounds(tl.load(cached_lengths + request), split, SPLITS, TILE)
    wrote = first < last
    at_row = token.to(tl.int64) * H + head
    lse = tl.load(partial_lse + at_row * SPLITS + split, mask=wrote, other=float("-inf"))
    weights = tl.where(wrote, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    at = (at_row * SPLITS + split)[:, None] * D + dim[None, :]
    parts = tl.load(partial + at, mask=wrote[:, None] & (dim < D)[None, :], other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + at_row * D + dim, result.to(out.dtype.element_ty), mask=dim < D)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, cached_lengths: Tensor, cu_seqlens: Tensor,
    max_query_length: int, max_cached_length: int, scale: float, runs: list[int | None] | None = None,
) -> Tensor:  # fmt: skip
    """As `reference.paged_attention`; `runs` is not needed here. A request that sees nothing gets zeros."""
    _, num_heads, head_dim = q.shape
    num_kv_heads, pages, page_size, _ = keys.shape
    requests, group = len(cached_lengths), num_heads // num_kv_heads
    decode, splits = max_query_length == 1, 1
    if decode:  # a power of two, so that few variants are compiled
        programs = triton.cdiv(PROGRAMS, requests * num_kv_heads)
        useful = triton.cdiv(max_cached_length, SHORTEST_SPLIT)
        splits = min(triton.next_power_of_2(min(programs, useful)), 64)
    dims = max(16, triton.next_power_of_2(head_dim))
    wide = dims > 128 or q.element_size() > 2  # then 64 rows would not fit the registers
    rows = max(16 if decode else 32 if wide else 64, triton.next_power_of_2(group))
    tile = max(16, min(128, TILE_BYTES // (dims * q.element_size())))
    blocks = splits if decode else triton.cdiv(max_query_length, rows // group)
    out, partial, lse = torch.empty_like(q), None, None
    if splits > 1:
        partial = torch.empty(*q.shape[:2], splits, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    attention_kernel[(blocks, num_kv_heads, requests)](
        q, keys, values, page_table, cached_lengths, cu_seqlens, out, partial, lse, page_table.stride(0),
        pages * page_size, scale * LOG2_E, H=num_heads, G=group, D=head_dim, DIMS=dims, P=page_size,
        ROWS=rows, TILE=tile, SPLITS=splits, num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    if splits > 1:
        join_kernel[(num_heads, requests)](
            partial, lse, cached_lengths, cu_seqlens, out, H=num_heads, D=head_dim, DIMS=dims, TILE=tile,
            SPLITS=splits, num_warps=2,
        )  # fmt: skip
    return out
