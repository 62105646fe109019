"""Scores of the cached keys in Triton; the twin of `reference.scores`.

Knows nothing of budgets or of what is kept. The weights W are never stored: a first pass over the pages takes the
log-sum-exp of every query, a second one computes the logits again and pools them. A tile holds whole heads, N
queries each (padded to a power of two), against a tile of keys; heads that do not fit one tile form blocks, whose results torch
joins. Every `group` and `pool` runs here, except more than MAX_ROWS queries a head, and group "logits" with
more than MAX_ROWS rows in all, which go to the reference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanobeacon.kernels import reference

MAX_ROWS = 128  # queries times heads in a tile
PROGRAMS = 768  # programs a launch should have at least: where requests, layers and heads are few, keys are split
LN_2 = tl.constexpr(0.6931471805599453)  # inside, logits count in powers of two: exp2 is what hardware has


@triton.jit
def query_tile(
    queries, query_positions, pair, block,
    G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, COUNT: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Queries and positions (-1: absent) of block `block` of the group `pair`: HEADS heads, COUNT rows each."""
    row, dim = tl.arange(0, HEADS * COUNT), tl.arange(0, DIMS)
    head, n = block * HEADS + row // COUNT, row % COUNT
    valid = (head < G) & (n < N)
    at = pair * (G * N) + head * N + n
    q = tl.load(queries + at[:, None] * D + dim[None, :], mask=valid[:, None] & (dim < D)[None, :], other=0.0)
    return q, tl.load(query_positions + at, mask=valid, other=-1)


@triton.jit
def visible_logits(
    q, q_at, keys, positions, page_table, slot, inside, base, scale,
    D: tl.constexpr, DIMS: tl.constexpr, P: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """Logits in powers of two of a tile of queries against a tile of slots, -inf where a query does not see the key;
    [HEADS * COUNT, TILE], or [COUNT, TILE] where the heads are pooled before the softmax."""
    dim = tl.arange(0, DIMS)
    page = tl.load(page_table + slot // P, mask=inside, other=0).to(tl.int64)
    at = base + page * P + slot % P
    key = tl.load(keys + at[None, :] * D + dim[:, None], mask=inside[None, :] & (dim < D)[:, None], other=0.0)
    k_at = tl.load(positions + at, mask=inside, other=2147483647)
    logits = tl.dot(q, key, input_precision="ieee") * scale
    logits = tl.where(k_at[None, :] <= q_at[:, None], logits, float("-inf"))
    if LOGITS:
        logits = tl.max(tl.reshape(logits, [HEADS, COUNT, TILE]), 0)
    return logits


@triton.jit
def slot_range(domains, cached_lengths, request, split, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """The slots [first, last) of one split of a request's domain: whole tiles, the last splits perhaps empty."""
    first = tl.load(domains + request * 2)
    last = tl.minimum(tl.load(domains + request * 2 + 1), tl.load(cached_lengths + request))
    share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), SPLITS), TILE) * TILE
    return first + split * share, tl.minimum(first + split * share + share, last)


@triton.jit(do_not_specialize=["table_stride"])
def log_sum_exp_kernel(
    queries, query_positions, keys, positions, page_table, cached_lengths, domains, lse, table_stride, num_slots, heads,
    scale, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, P: tl.constexpr, COUNT: tl.constexpr,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """Program (pair of request-layer-KV head and block of its heads, split) -> lse [pairs, BLOCKS, SPLITS, rows]."""
    program, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair, block = program // BLOCKS, program % BLOCKS
    request, base = pair // heads, pair % heads * num_slots
    page_table += request * table_stride
    q, q_at = query_tile(queries, query_positions, pair, block, G, N, D, DIMS, COUNT, HEADS)
    ROWS: tl.constexpr = COUNT if LOGITS else HEADS * COUNT
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first, last = slot_range(domains, cached_lengths, request, split, SPLITS, TILE)
    for tile in range(first, last, TILE):
        slot = tile + tl.arange(0, TILE)
        logits = visible_logits(
            q, q_at, keys, positions, page_table, slot, slot < last, base, scale, D, DIMS, P, COUNT, HEADS, TILE, LOGITS
        )
        new_top = tl.maximum(top, tl.max(logits, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - finite) + tl.sum(tl.exp2(logits - finite[:, None]), 1)
        top = new_top
    result = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    tl.store(lse + (program * SPLITS + split) * ROWS + tl.arange(0, ROWS), result)


@triton.jit(do_not_specialize=["table_stride", "width"])
def pool_kernel(
    queries, query_positions, keys, positions, page_table, cached_lengths, domains, lse, out, table_stride, num_slots,
    heads, width, scale,
    G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, P: tl.constexpr, COUNT: tl.constexpr,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, LOGITS: tl.constexpr,
    POOL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Same programs -> out [pairs, BLOCKS, width], queries pooled inside each head, then the heads: their maximum, or
    their sum (ADD). Slots outside the domain are left as they are."""
    program, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair, block = program // BLOCKS, program % BLOCKS
    request, base = pair // heads, pair % heads * num_slots
    page_table += request * table_stride
    q, q_at = query_tile(queries, query_positions, pair, block, G, N, D, DIMS, COUNT, HEADS)
    SHOWN: tl.constexpr = 1 if LOGITS else HEADS
    ROWS: tl.constexpr = SHOWN * COUNT
    at = tl.arange(0, SPLITS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    parts = tl.load(lse + program * SPLITS * ROWS + at)
    top = tl.max(parts, 0)
    top = tl.where(top == float("-inf"), 0.0, top)  # a query that sees nothing: its logits are -inf, and stay so
    total = tl.sum(tl.exp2(parts - top[None, :]), 0)
    norm = tl.where(total > 0, top + tl.log2(total), 0.0)
    present = tl.reshape((q_at >= 0).to(tl.int32), [HEADS, COUNT])
    present = tl.max(present, 0)[None, :] if LOGITS else present
    present = tl.maximum(tl.sum(present, 1), 1).to(tl.float32)
    real = block * HEADS + tl.arange(0, SHOWN) < G
    first, last = slot_range(domains, cached_lengths, request, split, SPLITS, TILE)
    for tile in range(first, last, TILE):
        slot = tile + tl.arange(0, TILE)
        inside = slot < last
        logits = visible_logits(
            q, q_at, keys, positions, page_table, slot, inside, base, scale, D, DIMS, P, COUNT, HEADS, TILE, LOGITS
        )
        logits -= norm[:, None]
        if POOL == "max" and not ADD:
            pooled = tl.max(logits, 0) * LN_2
        else:
            if POOL == "max":
                by_head = tl.max(tl.reshape(logits, [SHOWN, COUNT, TILE]), 1) * LN_2
            else:
                by_head = tl.sum(tl.reshape(tl.exp2(logits), [SHOWN, COUNT, TILE]), 1)
                if POOL == "mean":
                    by_head = by_head / present[:, None]
            if ADD:
                pooled = tl.sum(tl.where(real[:, None], by_head, 0.0), 0)
            else:
                pooled = tl.max(by_head, 0)
        tl.store(out + program * width + slot, pooled, mask=inside)


def scores(
    queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor, page_table: Tensor,
    cached_lengths: Tensor, domains: Tensor, scale: float, max_cached_length: int, group: str = "max", pool: str = "max",
) -> Tensor:  # fmt: skip
    """As `reference.scores`."""
    batch, layers, num_heads, n, head_dim = queries.shape
    _, num_kv_heads, pages, page_size, _ = keys.shape
    in_group, count = num_heads // num_kv_heads, triton.next_power_of_2(n)
    rows = triton.next_power_of_2(in_group) * count
    if count > MAX_ROWS or (group == "logits" and rows > MAX_ROWS):
        return reference.scores(
            queries, query_positions, keys, positions, page_table, cached_lengths, domains, scale,
            max_cached_length, group, pool,
        )  # fmt: skip
    rows = max(16, min(rows, MAX_ROWS))
    tile_heads = rows // count
    blocks = triton.cdiv(in_group, tile_heads)
    pairs, heads = batch * layers * num_kv_heads, layers * num_kv_heads
    dims = max(16, triton.next_power_of_2(head_dim))
    tile = max(16, min(64, 16384 // (dims * keys.element_size())))
    splits = triton.next_power_of_2(triton.cdiv(PROGRAMS, pairs * blocks))
    splits = min(splits, triton.next_power_of_2(triton.cdiv(max_cached_length, 2 * tile)), 16)
    shape = dict(
        G=in_group, N=n, D=head_dim, DIMS=dims, P=page_size, COUNT=count, HEADS=tile_heads, BLOCKS=blocks, TILE=tile,
        SPLITS=splits, LOGITS=group == "logits", num_warps=8 if rows == 128 else 4, num_stages=5,
    )  # fmt: skip
    inputs = (queries, query_positions, keys, positions, page_table, cached_lengths, domains)
    lse = torch.empty(pairs * blocks, splits, rows, dtype=torch.float32, device=keys.device)
    out = torch.full((batch, layers, num_kv_heads, blocks, max_cached_length), -torch.inf, device=keys.device)
    sizes = (page_table.stride(0), pages * page_size, heads)
    log_sum_exp_kernel[(pairs * blocks, splits)](*inputs, lse, *sizes, scale / LN_2.value, **shape)
    pool_kernel[(pairs * blocks, splits)](
        *inputs, lse, out, *sizes, max_cached_length, scale / LN_2.value, POOL=pool, ADD=group == "layer", **shape
    )
    if group == "layer":
        return (out.sum((2, 3)) / num_heads)[:, :, None].expand(-1, -1, num_kv_heads, -1)
    return out.amax(3) if blocks > 1 else out.squeeze(3)
