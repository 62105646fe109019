"""Scores of the cached keys in Triton; the twin of `reference.scores`.

Knows nothing of budgets or of what is kept.

* The weights are never stored: one pass over the pages takes the log-sum-exp of every query, a
  second computes the logits again and pools them.
* Both rotate the queries as they read them from the query buffer, which is less to move than a
  rotated copy.
* A tile holds whole heads, COUNT rows each (N rounded up to a power of two), against TILE keys.
  Heads beyond a tile form blocks, which torch joins.
* The reference takes what is larger (over 128 queries a head; with group "logits" in the whole
  group).

Names that all functions here share: G query heads of a group, N queries of a head, D head dim and
DIMS that rounded up to a power of two, P page size; HEADS heads of COUNT rows in a tile of queries,
BLOCKS of them in a group; SPLITS programs that share the slots of one block. METHOD.md, "Eviction",
says what a score is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanobeacon.kernels import reference

MAX_ROWS = 128  # queries in a tile, padded ones included
MAX_BYTES = 32768  # of queries in a tile; keys have half as many
# A launch has about so many at least: with few requests, layers and heads the keys are split.
PROGRAMS = 768
MOST_SPLITS = 16
# A page is looked up two steps before its keys are used, these are fetched one step before.
STAGES = 5
REACH = 2**31  # values that offsets of 32 bits reach
# In a kernel logits count in powers of two: exp2 is an instruction.
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def rotated_queries(
    vectors, angle_cos, angle_sin, mask, D: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Queries [ROWS, DIMS] turned by their angles, rounded once to their dtype: the rotate-half
    convention. `vectors`, `angle_cos` and `angle_sin` [ROWS, 1] point to where each begins."""
    HALF: tl.constexpr = D // 2
    dim = tl.arange(0, DIMS)[None, :]
    # 1. Each value, and the one half a head away that it is turned against.
    partner_dim = tl.where(dim < HALF, dim + HALF, dim - HALF)
    value = tl.load(vectors + dim, mask=mask, other=0.0)
    partner = tl.load(vectors + partner_dim, mask=mask, other=0.0).to(tl.float32)
    # 2. Both halves have the same angles; cos and sin are float32, so the arithmetic is.
    c = tl.load(angle_cos + dim % HALF, mask=mask, other=0.0)
    s = tl.load(angle_sin + dim % HALF, mask=mask, other=0.0)
    # 3. The first half gives to the second, which takes from it.
    turned = value.to(tl.float32) * c + tl.where(dim < HALF, -partner, partner) * s
    return turned.to(value.dtype)


@triton.jit
def prepare(
    buffer, rows, query_positions, cos, sin, page_table, cached_lengths, domains,
    table_stride, heads,
    G: tl.constexpr, N: tl.constexpr, CAPACITY: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """What program ((request, layer, KV head, block of its heads), split) works on.

    Returns its queries, rotated, [HEADS * COUNT, DIMS]; their positions, -1 for absent ones; the
    request's page table; its slots [first, last): whole tiles, in the last splits none. `heads` is
    layers times KV heads; a head has CAPACITY vectors in a buffer row, of which N are asked."""
    group = tl.program_id(0).to(tl.int64) // BLOCKS
    request = group // heads

    # 1. A row of the tile is a query n of a head of the group, padded to COUNT queries a head.
    tile_row = tl.arange(0, HEADS * COUNT)
    head = tl.program_id(0) % BLOCKS * HEADS + tile_row // COUNT
    n = tile_row % COUNT
    valid = (head < G) & (n < N)
    mask = valid[:, None] & (tl.arange(0, DIMS) < D)[None, :]

    # 2. The queries of the request's buffer row; all heads share the positions they are rotated to.
    buffer_row = tl.load(rows + request).to(tl.int64)
    first_vector = ((buffer_row * heads + group % heads) * G + head) * CAPACITY + n
    first_angle = (request * N + n) * (D // 2)
    q = rotated_queries(
        buffer + first_vector[:, None] * D,
        cos + first_angle[:, None], sin + first_angle[:, None],
        mask, D, DIMS,
    )  # fmt: skip
    q_at = tl.load(query_positions + request * N + n, mask=valid, other=-1)

    # 3. The slots of this split: the domain, as far as it is cached, in shares of whole tiles.
    first = tl.load(domains + request * 2)
    end = tl.load(domains + request * 2 + 1)
    end = tl.minimum(end, tl.load(cached_lengths + request))
    share = tl.cdiv(tl.cdiv(tl.maximum(end - first, 0), SPLITS), TILE) * TILE
    first += tl.program_id(1) * share
    return q, q_at, page_table + request * table_stride, first, tl.minimum(first + share, end)


@triton.jit
def visible_logits(
    q, q_at, keys, positions, table, slot, inside, scale,
    D: tl.constexpr, DIMS: tl.constexpr, P: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    LOGITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Logits [HEADS * COUNT, TILE], -inf where a query does not see the key; [COUNT, TILE] where
    LOGITS pools the heads before the softmax. `keys` and `positions` are those of one layer and KV
    head, which 32-bit offsets reach unless WIDE."""
    # 1. Where the keys lie.
    dim = tl.arange(0, DIMS)[:, None]
    page = tl.load(table + slot // P, mask=inside, other=0)
    if WIDE:
        page = page.to(tl.int64)
    at = page * P + slot % P
    # 2. The keys and their positions; a slot that is not inside lies behind every query.
    key = tl.load(keys + at[None, :] * D + dim, mask=inside[None, :] & (dim < D), other=0.0)
    key_at = tl.load(positions + at, mask=inside, other=2147483647)
    # 3. A query sees the keys up to its own position. An absent one, at -1, sees none.
    logits = tl.dot(q, key, input_precision="ieee") * scale
    logits = tl.where(key_at[None, :] <= q_at[:, None], logits, float("-inf"))
    return tl.max(tl.reshape(logits, [HEADS, COUNT, TILE]), 0) if LOGITS else logits


@triton.jit(do_not_specialize=["table_stride"])
def log_sum_exp_kernel(
    buffer, rows, query_positions, cos, sin, keys, positions,
    page_table, cached_lengths, domains, lse,
    table_stride, num_slots, heads, scale,
    G: tl.constexpr, N: tl.constexpr, CAPACITY: tl.constexpr,
    D: tl.constexpr, DIMS: tl.constexpr, P: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, LOGITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp (base 2) of every query over each split, to lse float32 [programs of axis 0,
    SPLITS, rows]; -inf for a query that sees nothing in it. Programs as in `prepare`."""
    # 1. Queries and slots of this program; keys and positions of its layer and KV head.
    q, q_at, table, first, last = prepare(
        buffer, rows, query_positions, cos, sin, page_table, cached_lengths, domains,
        table_stride, heads,
        G, N, CAPACITY, D, DIMS, COUNT, HEADS, BLOCKS, TILE, SPLITS,
    )  # fmt: skip
    first_slot = tl.program_id(0).to(tl.int64) // BLOCKS % heads * num_slots
    keys += first_slot * D
    positions += first_slot

    # 2. Tile by tile: the largest logit so far, and the sum of the weights relative to it.
    ROWS: tl.constexpr = COUNT if LOGITS else HEADS * COUNT
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for tile in range(first, last, TILE):
        slot = tile + tl.arange(0, TILE)
        logits = visible_logits(
            q, q_at, keys, positions, table, slot, slot < last, scale,
            D, DIMS, P, COUNT, HEADS, TILE, LOGITS, WIDE,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(logits, 1))
        # Where nothing was seen yet, -inf less -inf would be NaN.
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - finite)
        total += tl.sum(tl.exp2(logits - finite[:, None]), 1)
        top = new_top

    # 3. Every program writes, so that the second kernel reads nothing that was left over.
    at = (tl.program_id(0).to(tl.int64) * SPLITS + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    tl.store(lse + at, tl.where(total > 0, top + tl.log2(total), float("-inf")))


@triton.jit
def pooled(
    logits, q_at, COUNT: tl.constexpr, HEADS: tl.constexpr, SHOWN: tl.constexpr, TILE: tl.constexpr,
    G: tl.constexpr, BLOCKS: tl.constexpr, POOL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Normalised logits [SHOWN * COUNT, TILE] -> what they say of each slot, [TILE].

    SHOWN: heads in the tile, 1 where they were pooled before the softmax. POOL: "max" of the logits
    (in base e, as the reference gives them), or "sum" or "mean" of the weights, over the queries of
    a head. Then the heads: their sum where ADD (torch divides), else their maximum."""
    # 1. The maximum of all is one step: most policies ask for that.
    if POOL == "max" and not ADD:
        return tl.max(logits, 0) * LN_2
    # 2. The queries of each head, [SHOWN, COUNT, TILE] -> [SHOWN, TILE].
    by_query = tl.reshape(logits, [SHOWN, COUNT, TILE])
    by_head = tl.max(by_query, 1) * LN_2 if POOL == "max" else tl.sum(tl.exp2(by_query), 1)
    # 3. A mean is one over the queries that are there.
    if POOL == "mean":
        present = tl.reshape((q_at >= 0).to(tl.int32), [HEADS, COUNT])
        present = tl.sum(tl.max(present, 0)[None, :] if SHOWN < HEADS else present, 1)
        by_head /= tl.maximum(present, 1)[:, None]
    # 4. The heads; those that only fill up the tile must not add anything.
    if ADD:
        real = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, SHOWN) < G
        return tl.sum(tl.where(real[:, None], by_head, 0.0), 0)
    return tl.max(by_head, 0)


@triton.jit(do_not_specialize=["table_stride", "width"])
def pool_kernel(
    buffer, rows, query_positions, cos, sin, keys, positions,
    page_table, cached_lengths, domains, lse, out,
    width, table_stride, num_slots, heads, scale,
    G: tl.constexpr, N: tl.constexpr, CAPACITY: tl.constexpr,
    D: tl.constexpr, DIMS: tl.constexpr, P: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, LOGITS: tl.constexpr, WIDE: tl.constexpr,
    POOL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Scores of the slots of each split, to out float32 [programs of axis 0, width]; the slots
    outside the domain are left as they are. Programs as in `prepare`."""
    # 1. Queries and slots of this program; keys and positions of its layer and KV head.
    q, q_at, table, first, last = prepare(
        buffer, rows, query_positions, cos, sin, page_table, cached_lengths, domains,
        table_stride, heads,
        G, N, CAPACITY, D, DIMS, COUNT, HEADS, BLOCKS, TILE, SPLITS,
    )  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    first_slot = program // BLOCKS % heads * num_slots
    keys += first_slot * D
    positions += first_slot

    # 2. The log-sum-exp of every query over all splits.
    SHOWN: tl.constexpr = 1 if LOGITS else HEADS
    ROWS: tl.constexpr = SHOWN * COUNT
    # Every split joins the parts of all for itself, which saves a launch between the two.
    at = (program * SPLITS + tl.arange(0, SPLITS))[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    parts = tl.load(lse + at)
    top = tl.max(parts, 0)
    # Of what sees nothing the logits are -inf, and stay so.
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(parts - top[None, :]), 0)
    norm = tl.where(total > 0, top + tl.log2(total), 0.0)

    # 3. The logits again, normalised by it, and pooled.
    for tile in range(first, last, TILE):
        slot = tile + tl.arange(0, TILE)
        logits = visible_logits(
            q, q_at, keys, positions, table, slot, slot < last, scale,
            D, DIMS, P, COUNT, HEADS, TILE, LOGITS, WIDE,
        )  # fmt: skip
        normed = logits - norm[:, None]
        result = pooled(normed, q_at, COUNT, HEADS, SHOWN, TILE, G, BLOCKS, POOL, ADD)
        tl.store(out + program * width + slot, result, mask=slot < last)


def scores(
    buffer: Tensor, rows: Tensor, query_positions: Tensor, cos: Tensor, sin: Tensor, keys: Tensor,
    positions: Tensor, page_table: Tensor, cached_lengths: Tensor, domains: Tensor, scale: float,
    max_cached_length: int, group: str = "max", pool: str = "max",
) -> Tensor:  # fmt: skip
    """As `reference.scores`; `buffer` is contiguous, or so many of its slots."""
    _, layers, num_heads, n, dim = buffer.shape
    capacity = buffer.stride(2) // dim
    lies_packed = buffer.stride()[1:] == (num_heads * capacity * dim, capacity * dim, dim, 1)
    assert lies_packed, "a query buffer has its rows, layers, heads and slots behind each other"
    _, num_kv_heads, pages, page_size, _ = keys.shape
    batch = len(rows)
    num_slots = pages * page_size
    inputs = (
        buffer, rows, query_positions, cos, sin, keys, positions,
        page_table, cached_lengths, domains,
    )  # fmt: skip

    # 1. A tile of queries: whole heads, as many of a group as fit; more of them are blocks.
    members = num_heads // num_kv_heads
    count = triton.next_power_of_2(n)
    dims = triton.next_power_of_2(dim)
    vector = dims * keys.element_size()  # bytes
    limit = min(MAX_ROWS, MAX_BYTES // vector)
    tile_rows = triton.next_power_of_2(members) * count
    if count > limit or (group == "logits" and tile_rows > limit):
        return reference.scores(*inputs, scale, max_cached_length, group, pool)
    tile_rows = max(16, min(tile_rows, limit))
    heads_in_tile = tile_rows // count
    blocks = triton.cdiv(members, heads_in_tile)

    # 2. Tiles of keys, and over how many programs the keys of a request, layer and KV head are
    #    split: as many as fill the device, of about two tiles at least, a power of two.
    tile = max(16, min(64, MAX_BYTES // 2 // vector))
    programs = batch * layers * num_kv_heads * blocks
    wanted = triton.next_power_of_2(triton.cdiv(PROGRAMS, programs))
    useful = triton.next_power_of_2(triton.cdiv(max_cached_length, 2 * tile))
    splits = min(wanted, useful, MOST_SPLITS)

    # 3. The log-sum-exp of every query in each split, then the pooled weights.
    shape = dict(
        G=members, N=n, CAPACITY=capacity, D=dim, DIMS=dims, P=page_size,
        COUNT=count, HEADS=heads_in_tile, BLOCKS=blocks,
        TILE=tile, SPLITS=splits, LOGITS=group == "logits", WIDE=num_slots * dim >= REACH,
        num_warps=max(4, tile_rows // 16), num_stages=STAGES,
    )  # fmt: skip
    # Logits in powers of two are those in powers of e, divided by ln 2.
    sizes = (page_table.stride(0), num_slots, layers * num_kv_heads, scale / LN_2.value)
    lse = torch.empty(programs, splits, tile_rows, dtype=torch.float32, device=keys.device)
    shown = (batch, layers, num_kv_heads, blocks, max_cached_length)
    out = torch.full(shown, -torch.inf, dtype=torch.float32, device=keys.device)
    log_sum_exp_kernel[(programs, splits)](*inputs, lse, *sizes, **shape)
    pool_kernel[(programs, splits)](
        *inputs, lse, out, max_cached_length, *sizes, **shape,
        POOL=pool, ADD=group in ("layer", "mean"),
    )  # fmt: skip

    # 4. Blocks of heads are joined here: sums are divided, by the heads of the layer or of
    #    the group.
    if group == "layer":
        mean = out.sum((2, 3)) / num_heads
        return mean[:, :, None].expand(-1, -1, num_kv_heads, -1)
    if group == "mean":
        return out.sum(3) / members
    return out.amax(3) if blocks > 1 else out.squeeze(3)
