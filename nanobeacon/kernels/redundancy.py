"""R-KV's redundancy of the cached keys in Triton; the twin of `reference.redundancy` (METHOD.md,
"Policies").

Knows keys and domains only. No S x S matrix is held. Three kernels, each over all groups (request,
layer, KV head):

1. `directions_kernel`: the sum of all keys, each at length 1. The sum of a key's cosines to all
   others is its cosine to that sum.
2. `neighbours_kernel`: the newest similar neighbour of each key, whose cosine does not count. The
   search goes from the newest key back and ends where all keys of a tile have found one.
3. `mean_cosines_kernel`: the first, less what the second found.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SIMILAR = 0.5  # cosine above which a neighbour is one
REACH = 2**31  # values that offsets of 32 bits reach
# What a program loads at a time; tiles of its own keys are as large.
TILE_BYTES = 16384  # of keys


@triton.jit
def domain_of(page_table, domains, table_stride, heads):
    """Of the program's group (axis 0): the request's page table, and the slots [first, end) that
    its softmax runs over. `heads` is layers times KV heads."""
    request = tl.program_id(0) // heads
    first = tl.load(domains + request * 2)
    end = tl.load(domains + request * 2 + 1)
    return page_table + request.to(tl.int64) * table_stride, first, end


@triton.jit
def load_keys(
    keys, table, slot, end, D: tl.constexpr, DIMS: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Keys [slots, DIMS] at these slots of one layer and KV head, in their dtype; zero from `end`
    on. Offsets have 32 bits unless WIDE."""
    # The page table has the page of a slot; a page's slots lie together.
    inside = slot < end
    dim = tl.arange(0, DIMS)[None, :]
    page = tl.load(table + slot // P, mask=inside, other=0)
    if WIDE:
        page = page.to(tl.int64)
    at = page * P + slot % P
    return tl.load(keys + at[:, None] * D + dim, mask=inside[:, None] & (dim < D), other=0.0)


@triton.jit(do_not_specialize=["table_stride", "width"])
def directions_kernel(
    keys, page_table, domains, scales, towards, table_stride, num_slots, heads, width,
    D: tl.constexpr, DIMS: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (group): 1 / length of every key, to scales [groups, width], and the sum of the keys
    at length 1, to towards [groups, D]; both float32. Columns of `scales` are slots."""
    group = tl.program_id(0).to(tl.int64)
    table, first, end = domain_of(page_table, domains, table_stride, heads)
    keys += group % heads * num_slots * D
    total = tl.zeros([DIMS], tl.float32)
    for tile in range(first, end, TILE):
        slot = tile + tl.arange(0, TILE)
        key = load_keys(keys, table, slot, end, D, DIMS, P, WIDE).to(tl.float32)
        # a zero key has cosine 0 to everything
        scale = 1.0 / tl.maximum(tl.sqrt_rn(tl.sum(key * key, 1)), 1e-12)
        tl.store(scales + group * width + slot, scale, mask=slot < end)
        total += tl.sum(key * scale[:, None], 0)
    dim = tl.arange(0, DIMS)
    tl.store(towards + group * D + dim, total, mask=dim < D)


@triton.jit(do_not_specialize=["table_stride", "width"])
def neighbours_kernel(
    keys, page_table, domains, scales, newest, cosines, table_stride, num_slots, heads, width,
    D: tl.constexpr, DIMS: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    SIMILAR: tl.constexpr,
):  # fmt: skip
    """Program (group, tile of keys): the slot of each key's newest similar neighbour, -1 where it
    has none, to newest int32 [groups, width], and their cosine, to cosines float32 [groups, width].

    Similar: a cosine above SIMILAR. A key is no neighbour of its own."""
    group = tl.program_id(0).to(tl.int64)
    table, first, end = domain_of(page_table, domains, table_stride, heads)
    own = first + tl.program_id(1) * TILE + tl.arange(0, TILE)
    if first + tl.program_id(1) * TILE >= end:
        return
    keys += group % heads * num_slots * D
    scales += group * width

    # 1. The tile's own keys, none of which has a neighbour yet.
    key = load_keys(keys, table, own, end, D, DIMS, P, WIDE)
    scale = tl.load(scales + own, mask=own < end, other=0.0)
    found = tl.full([TILE], -1, tl.int32)
    cosine_found = tl.zeros([TILE], tl.float32)

    # 2. From the newest tile back, until each of them has a neighbour or there is none left.
    tile = first + (end - first - 1) // TILE * TILE
    searching = 1
    while searching > 0:
        other = tile + tl.arange(0, TILE)
        other_key = load_keys(keys, table, other, end, D, DIMS, P, WIDE)
        other_scale = tl.load(scales + other, mask=other < end, other=0.0)
        # Products of the keys as they are stored; their lengths come in afterwards.
        cosine = tl.dot(key, tl.trans(other_key), input_precision="ieee")
        cosine *= scale[:, None] * other_scale[None, :]
        similar = (cosine > SIMILAR) & (own[:, None] != other[None, :])
        # 3. The newest in this tile counts for those that found none in a newer one. Slots stand
        #    in the order of the text, so it is the one in the highest slot.
        candidate = tl.max(tl.where(similar, other[None, :], -1), 1)
        is_it = other[None, :] == candidate[:, None]
        its_cosine = tl.sum(tl.where(is_it, cosine, 0.0), 1)
        takes = (found < 0) & (candidate >= 0)
        found = tl.where(takes, candidate, found)
        cosine_found = tl.where(takes, its_cosine, cosine_found)
        # 4. Whether anybody is left, and anything to look through.
        tile -= TILE
        left = tl.sum(((found < 0) & (own < end)).to(tl.int32), 0)
        searching = tl.where(tile >= first, left, 0)
    tl.store(newest + group * width + own, found, mask=own < end)
    tl.store(cosines + group * width + own, cosine_found, mask=own < end)


@triton.jit(do_not_specialize=["table_stride", "width"])
def mean_cosines_kernel(
    keys, page_table, domains, scales, towards, newest, cosines, out,
    table_stride, num_slots, heads, width,
    D: tl.constexpr, DIMS: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (group, tile of keys): the mean of each key's cosines to the others, to out, float32
    [groups, width]. The others are divided by the size of the domain, as the reference does."""
    group = tl.program_id(0).to(tl.int64)
    table, first, end = domain_of(page_table, domains, table_stride, heads)
    own = first + tl.program_id(1) * TILE + tl.arange(0, TILE)
    if first + tl.program_id(1) * TILE >= end:
        return
    keys += group % heads * num_slots * D
    row = group * width

    # 1. The cosines to all, less the one to itself. `total` is [TILE].
    dim = tl.arange(0, DIMS)
    key = load_keys(keys, table, own, end, D, DIMS, P, WIDE).to(tl.float32)
    key *= tl.load(scales + row + own, mask=own < end, other=0.0)[:, None]
    all_keys = tl.load(towards + group * D + dim, mask=dim < D, other=0.0)
    total = tl.sum(key * all_keys[None, :], 1) - tl.sum(key * key, 1)

    # 2. Less those of the keys whose newest similar neighbour this one is: a row of the matrix that
    #    is not held leaves out one cosine, and a key's own numbers stand in a column of it.
    for tile in range(first, end, TILE):
        other = tile + tl.arange(0, TILE)
        neighbour = tl.load(newest + row + other, mask=other < end, other=-1)
        cosine = tl.load(cosines + row + other, mask=other < end, other=0.0)
        points_here = neighbour[:, None] == own[None, :]
        total -= tl.sum(tl.where(points_here, cosine[:, None], 0.0), 0)
    tl.store(out + row + own, total / (end - first), mask=own < end)


def redundancy(keys: Tensor, page_table: Tensor, domains: Tensor, max_cached_length: int) -> Tensor:
    """As `reference.redundancy`."""
    # 1. Shapes: a tile of keys takes TILE_BYTES; a program walks a group or a tile of it.
    layers, num_kv_heads, pages, page_size, dim = keys.shape
    num_slots = pages * page_size
    heads = layers * num_kv_heads
    groups = len(domains) * heads
    shape = (len(domains), layers, num_kv_heads, max_cached_length)
    dims = triton.next_power_of_2(dim)
    tile = max(16, min(64, TILE_BYTES // (dims * keys.element_size())))
    grid = (groups, triton.cdiv(max_cached_length, tile))
    sizes = (page_table.stride(0), num_slots, heads, max_cached_length)
    wide = num_slots * dim >= REACH
    how = dict(D=dim, DIMS=dims, P=page_size, TILE=tile, WIDE=wide, num_warps=4)

    # 2. What one kernel leaves for the next. Slots outside the domains are written by nobody; -inf
    #    makes them nothing in the softmax.
    scales = torch.empty(shape, dtype=torch.float32, device=keys.device)
    cosines = torch.empty_like(scales)
    newest = torch.empty(shape, dtype=torch.int32, device=keys.device)
    towards = torch.empty(groups, dim, dtype=torch.float32, device=keys.device)
    mean = torch.full(shape, -torch.inf, dtype=torch.float32, device=keys.device)

    # 3. The three kernels.
    inputs = (keys, page_table, domains, scales)
    directions_kernel[(groups,)](*inputs, towards, *sizes, **how)
    neighbours_kernel[grid](*inputs, newest, cosines, *sizes, **how, SIMILAR=SIMILAR)
    mean_cosines_kernel[grid](*inputs, towards, newest, cosines, mean, *sizes, **how)

    # 4. The softmax over the tokens; where a domain is empty there is nothing to divide among.
    return mean.softmax(-1).nan_to_num_(0.0)
