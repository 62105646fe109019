"""Farthest point sampling in Triton: `fps` for a prompt chunk, `reduce` for the query buffer, in place.

Knows vectors only: nothing of tokens, RoPE or schedules. A buffer of up to 64 rows fits a tile: one product
gives all cosines, and the picks need that small matrix only. A prompt chunk does not fit: every pick is one
more pass over its vectors, which stay in the L2 cache."""

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
    base = (tl.load(rows + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * C
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


@triton.jit(do_not_specialize=["N"])
def fps_kernel(
    queries, counts, scales, nearest, picks, N, m,
    D: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, ALL: tl.constexpr, TIE: tl.constexpr,
):  # fmt: skip
    """Program b: the m picks of queries[b]. `scales` (1 / norm) and `nearest` (cosine to the nearest pick)
    are scratch [B, N]; ALL is N rounded up. Barriers part what one thread writes from another's read."""
    b = tl.program_id(0).to(tl.int64)
    queries += b * N * D
    scales += b * N
    nearest += b * N
    count = tl.load(counts + b)
    dim, tile, every = tl.arange(0, DIMS), tl.arange(0, TILE), tl.arange(0, ALL)
    if count <= m:
        for i in range(m):
            tl.store(picks + b * m + i, i)
        return

    towards = tl.zeros([DIMS], tl.float32)  # the mean direction first, then the direction of the newest pick
    for first in range(0, count, TILE):
        row = first + tile
        mask = (row < count)[:, None] & (dim < D)[None, :]
        vectors = tl.load(queries + row[:, None] * D + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = 1.0 / tl.maximum(tl.sqrt_rn(tl.sum(vectors * vectors, 1)), 1e-12)
        towards += tl.sum(vectors * scale[:, None], 0)
        tl.store(scales + row, scale, mask=row < count)
    towards = towards / count
    tl.debug_barrier()

    pick = -1
    for i in range(m):
        for first in range(0, count, TILE):
            row = first + tile
            inside = row < count
            mask = inside[:, None] & (dim < D)[None, :]
            vectors = tl.load(queries + row[:, None] * D + dim[None, :], mask=mask, other=0.0)
            scale = tl.load(scales + row, mask=inside, other=0.0)
            cosine = tl.sum(vectors.to(tl.float32) * towards[None, :], 1) * scale
            # The similarity to the mean chose the first pick, and is done; a picked row stays at infinity.
            before = tl.load(nearest + row, mask=inside & (i > 1), other=float("-inf"))
            cosine = tl.where(row == pick, float("inf"), tl.maximum(cosine, before))
            tl.store(nearest + row, cosine, mask=inside)
        tl.debug_barrier()
        pick = lowest(tl.load(nearest + every, mask=every < count, other=float("inf")), every, TIE)
        tl.store(picks + b * m + i, pick)
        towards = tl.load(queries + pick * D + dim, mask=dim < D, other=0.0).to(tl.float32)
        towards *= tl.load(scales + pick)
        tl.debug_barrier()


def fps(queries: Tensor, counts: Tensor, m: int) -> Tensor:
    """As `reference.fps`."""
    batch, n, head_dim = queries.shape
    if n <= m or m == 0:
        return torch.arange(m, device=queries.device).repeat(batch, 1)
    picks = torch.empty(batch, m, dtype=torch.int64, device=queries.device)
    scales, nearest = torch.empty(2, batch, n, dtype=torch.float32, device=queries.device)
    fps_kernel[(batch,)](
        queries, counts, scales, nearest, picks, n, m, D=head_dim, DIMS=triton.next_power_of_2(head_dim),
        TILE=64, ALL=triton.next_power_of_2(n), TIE=reference.TIE, num_warps=8,
    )  # fmt: skip
    return picks


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
