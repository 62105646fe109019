"""Scores of the cached keys in Triton; the twin of `reference.scores`.

Knows nothing of budgets or of what is kept. The weights W are never stored: one pass over the pages takes the
log-sum-exp of every query, a second computes the logits again and pools them. A tile holds whole heads, COUNT
rows each (N rounded up to a power of two), against TILE keys; heads beyond a tile form blocks, which torch
joins. The reference takes what is larger (over 128 queries a head; with group "logits" in the whole group).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanobeacon.kernels import reference

MAX_ROWS, MAX_BYTES = 128, 32768  # of queries in a tile
PROGRAMS = 768  # a launch has about so many at least: with few requests, layers and heads the keys are split
STAGES = 5  # a page is looked up two steps before its keys are used, these are fetched one step before
LN_2 = tl.constexpr(0.6931471805599453)  # in a kernel logits count in powers of two: exp2 is an instruction


@triton.jit
def prepare(
    queries, query_positions, page_table, cached_lengths, domains, table_stride, heads,
    G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, COUNT: tl.constexpr,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """What program ((request, layer, KV head, block of its heads), split) works on: queries, their positions
    (-1: absent), the request's page table, the slots [first, last): whole tiles, in the last splits none."""
    group = tl.program_id(0).to(tl.int64) // BLOCKS
    row, dim = tl.arange(0, HEADS * COUNT), tl.arange(0, DIMS)
    head, n = tl.program_id(0) % BLOCKS * HEADS + row // COUNT, row % COUNT
    valid = (head < G) & (n < N)
    at = (group * G + head) * N + n
    mask = valid[:, None] & (dim < D)[None, :]
    q = tl.load(queries + at[:, None] * D + dim[None, :], mask=mask, other=0.0)
    q_at = tl.load(query_positions + at, mask=valid, other=-1)

    request = group // heads
    first = tl.load(domains + request * 2)
    last = tl.minimum(tl.load(domains + request * 2 + 1), tl.load(cached_lengths + request))
    share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), SPLITS), TILE) * TILE
    first += tl.program_id(1) * share
    return q, q_at, page_table + request * table_stride, first, tl.minimum(first + share, last)


@triton.jit
def visible_logits(
    q, q_at, keys, positions, table, slot, inside, base, scale, D: tl.constexpr, DIMS: tl.constexpr,
    P: tl.constexpr, COUNT: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """Logits [HEADS * COUNT, TILE], -inf where a query does not see the key; [COUNT, TILE] where LOGITS pools
    the heads before the softmax. `base` is the first slot of a layer and KV head."""
    dim = tl.arange(0, DIMS)[:, None]
    at = base + tl.load(table + slot // P, mask=inside, other=0).to(tl.int64) * P + slot % P
    key = tl.load(keys + at[None, :] * D + dim, mask=inside[None, :] & (dim < D), other=0.0)
    key_at = tl.load(positions + at, mask=inside, other=2147483647)
    logits = tl.dot(q, key, input_precision="ieee") * scale
    logits = tl.where(key_at[None, :] <= q_at[:, None], logits, float("-inf"))
    return tl.max(tl.reshape(logits, [HEADS, COUNT, TILE]), 0) if LOGITS else logits


@triton.jit(do_not_specialize=["table_stride"])
def log_sum_exp_kernel(
    queries, query_positions, keys, positions, page_table, cached_lengths, domains, lse,
    table_stride, num_slots, heads, scale, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    DIMS: tl.constexpr, P: tl.constexpr, COUNT: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """Of each split, to lse [programs of axis 0, SPLITS, rows]; -inf for a query that sees nothing in it."""
    q, q_at, table, first, last = prepare(
        queries, query_positions, page_table, cached_lengths, domains, table_stride, heads,
        G, N, D, DIMS, COUNT, HEADS, BLOCKS, TILE, SPLITS,
    )  # fmt: skip
    base = tl.program_id(0).to(tl.int64) // BLOCKS % heads * num_slots
    ROWS: tl.constexpr = COUNT if LOGITS else HEADS * COUNT
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for tile in range(first, last, TILE):
        slot = tile + tl.arange(0, TILE)
        logits = visible_logits(
            q, q_at, keys, positions, table, slot, slot < last, base, scale,
            D, DIMS, P, COUNT, HEADS, TILE, LOGITS,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(logits, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - finite) + tl.sum(tl.exp2(logits - finite[:, None]), 1)
        top = new_top
    at = (tl.program_id(0).to(tl.int64) * SPLITS + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    tl.store(lse + at, tl.where(total > 0, top + tl.log2(total), float("-inf")))


@triton.jit
def pooled(
    logits, q_at, COUNT: tl.constexpr, HEADS: tl.constexpr, SHOWN: tl.constexpr, TILE: tl.constexpr,
    G: tl.constexpr, BLOCKS: tl.constexpr, POOL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """[SHOWN * COUNT, TILE] normalised logits -> [TILE]: queries inside each head first, then the heads."""
    if POOL == "max" and not ADD:
        return tl.max(logits, 0) * LN_2
    by_query = tl.reshape(logits, [SHOWN, COUNT, TILE])
    by_head = tl.max(by_query, 1) * LN_2 if POOL == "max" else tl.sum(tl.exp2(by_query), 1)
    if POOL == "mean":
        present = tl.reshape((q_at >= 0).to(tl.int32), [HEADS, COUNT])
        present = tl.sum(tl.max(present, 0)[None, :] if SHOWN < HEADS else present, 1)
        by_head /= tl.maximum(present, 1)[:, None]
    if ADD:
        real = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, SHOWN) < G
        return tl.sum(tl.where(real[:, None], by_head, 0.0), 0)
    return tl.max(by_head, 0)


@triton.jit(do_not_specialize=["table_stride", "width"])
def pool_kernel(
    queries, query_positions, keys, positions, page_table, cached_lengths, domains, lse, out, width,
    table_stride, num_slots, heads, scale, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    DIMS: tl.constexpr, P: tl.constexpr, COUNT: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, LOGITS: tl.constexpr, POOL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """To out [programs of axis 0, width]; the slots outside the domain are left as they are."""
    q, q_at, table, first, last = prepare(
        queries, query_positions, page_table, cached_lengths, domains, table_stride, heads,
        G, N, D, DIMS, COUNT, HEADS, BLOCKS, TILE, SPLITS,
    )  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    base = program // BLOCKS % heads * num_slots
    SHOWN: tl.constexpr = 1 if LOGITS else HEADS
    ROWS: tl.constexpr = SHOWN * COUNT
    at = (program * SPLITS + tl.arange(0, SPLITS))[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    parts = tl.load(lse + at)
    top = tl.max(parts, 0)
    top = tl.where(top == float("-inf"), 0.0, top)  # of what sees nothing the logits are -inf, and stay so
    total = tl.sum(tl.exp2(parts - top[None, :]), 0)
    norm = tl.where(total > 0, top + tl.log2(total), 0.0)
    for tile in range(first, last, TILE):
        slot = tile + tl.arange(0, TILE)
        logits = visible_logits(
            q, q_at, keys, positions, table, slot, slot < last, base, scale,
            D, DIMS, P, COUNT, HEADS, TILE, LOGITS,
        )  # fmt: skip
        result = pooled(logits - norm[:, None], q_at, COUNT, HEADS, SHOWN, TILE, G, BLOCKS, POOL, ADD)
        tl.store(out + program * width + slot, result, mask=slot < last)


def scores(
    queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor, page_table: Tensor,
    cached_lengths: Tensor, domains: Tensor, scale: float, max_cached_length: int,
    group: str = "max", pool: str = "max",
) -> Tensor:  # fmt: skip
    """As `reference.scores`."""
    batch, layers, num_heads, n, dim = queries.shape
    _, num_kv_heads, pages, page_size, _ = keys.shape
    members, count, dims = num_heads // num_kv_heads, triton.next_power_of_2(n), triton.next_power_of_2(dim)
    rows, vector = triton.next_power_of_2(members) * count, dims * keys.element_size()
    limit = min(MAX_ROWS, MAX_BYTES // vector)
    inputs = (queries, query_positions, keys, positions, page_table, cached_lengths, domains)
    if count > limit or (group == "logits" and rows > limit):
        return reference.scores(*inputs, scale, max_cached_length, group, pool)
    rows, tile = max(16, min(rows, limit)), max(16, min(64, MAX_BYTES // 2 // vector))
    blocks = triton.cdiv(members, rows // count)
    programs = batch * layers * num_kv_heads * blocks
    splits = triton.next_power_of_2(triton.cdiv(PROGRAMS, programs))
    splits = min(splits, triton.next_power_of_2(triton.cdiv(max_cached_length, 2 * tile)), 16)
    shape = dict(
        G=members, N=n, D=dim, DIMS=dims, P=page_size, COUNT=count, HEADS=rows // count, BLOCKS=blocks,
        TILE=tile, SPLITS=splits, LOGITS=group == "logits", num_warps=max(4, rows // 16), num_stages=STAGES,
    )  # fmt: skip
    lse = torch.empty(programs, splits, rows, dtype=torch.float32, device=keys.device)
    shown = (batch, layers, num_kv_heads, blocks, max_cached_length)
    out = torch.full(shown, -torch.inf, dtype=torch.float32, device=keys.device)
    sizes = (page_table.stride(0), pages * page_size, layers * num_kv_heads, scale / LN_2.value)
    log_sum_exp_kernel[(programs, splits)](*inputs, lse, *sizes, **shape)
    shape |= dict(POOL=pool, ADD=group == "layer")
    pool_kernel[(programs, splits)](*inputs, lse, out, max_cached_length, *sizes, **shape)
    if group == "layer":
        return (out.sum((2, 3)) / num_heads)[:, :, None].expand(-1, -1, num_kv_heads, -1)
    return out.amax(3) if blocks > 1 else out.squeeze(3)
