"""Compaction of the kept slots in Triton, in place; the twin of `reference.compact`.

Knows nothing of scores or budgets: it is told which slots stay. In place means that a source might
be overwritten before it is read. Why that cannot happen here:

* One program walks one (request, layer, KV head), and no two programs share a slot that is written:
  the pages that requests share hold protected tokens, below `start`.
* It goes tile by tile, ascending. `keep` ascends strictly and keep[i] >= start + i, so the sources
  of a tile lie above every target of the tiles before it: what a finished tile has written is never
  a source again.
* Inside a tile a target may be another thread's source. So all threads load the whole tile, and
  only behind a barrier does any of them store. The barrier after the stores keeps all threads
  in one tile."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["table_stride", "kept"])
def compact_kernel(
    keys, values, positions, page_table, keep, start, table_stride, num_slots, kept, heads,
    D: tl.constexpr, DIMS: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (request, layer, KV head), as one number; `heads` is layers times KV heads."""
    program = tl.program_id(0).to(tl.int64)
    page_table += program // heads * table_stride
    base = program % heads * num_slots
    first_target = tl.load(start + program // heads)
    dim = tl.arange(0, DIMS)[None, :]
    for tile in range(0, kept, TILE):
        i = tile + tl.arange(0, TILE)
        inside = i < kept
        mask = inside[:, None] & (dim < D)
        # 1. Where the tile's slots lie, and where they go.
        slot = tl.load(keep + program * kept + i, mask=inside, other=0)
        page = tl.load(page_table + slot // P, mask=inside, other=0).to(tl.int64)
        source = base + page * P + slot % P
        slot = first_target + i
        page = tl.load(page_table + slot // P, mask=inside, other=0).to(tl.int64)
        target = base + page * P + slot % P
        # 2. The whole tile is read …
        key = tl.load(keys + source[:, None] * D + dim, mask=mask)
        value = tl.load(values + source[:, None] * D + dim, mask=mask)
        position = tl.load(positions + source, mask=inside)
        tl.debug_barrier()
        # 3. … before any of it is written.
        tl.store(keys + target[:, None] * D + dim, key, mask=mask)
        tl.store(values + target[:, None] * D + dim, value, mask=mask)
        tl.store(positions + target, position, mask=inside)
        tl.debug_barrier()


def compact(
    keys: Tensor, values: Tensor, positions: Tensor, page_table: Tensor, keep: Tensor, start: Tensor
) -> None:
    """As `reference.compact`."""
    layers, num_kv_heads, pages, page_size, head_dim = keys.shape
    heads = layers * num_kv_heads
    dims = triton.next_power_of_2(head_dim)
    compact_kernel[(len(keep) * heads,)](
        keys, values, positions, page_table, keep, start, page_table.stride(0), pages * page_size,
        keep.shape[-1], heads, D=head_dim, DIMS=dims, P=page_size, TILE=min(64, 4096 // dims), num_warps=4,
    )  # fmt: skip
