"""The element-wise work between two matrix products in one launch each; the twins in `reference`.

Knows rows of a hidden size, nothing of attention or layers. A row fits the registers of one
program, so it is read once: between two products a decode step then moves a few kilobytes a token
and pays for one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanobeacon.kernels import reference

# values of a row that a program holds in registers; beyond that the reference is used
LARGEST_ROW = 32768
TILE = 1024  # outputs of one program of `silu_mul`


@triton.jit
def add_rms_norm_kernel(hidden, update, scale, eps, out, N, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """Program (token): hidden float32 [T, N] takes `update` [T, N] where ADD; out [T, N]
    gets its norm.

    WIDTH is N rounded up to a power of two; `eps` is float32 [1], on the device."""
    column = tl.arange(0, WIDTH)
    inside = column < N
    row = tl.program_id(0).to(tl.int64) * N + column

    # 1. The residual stream takes what the last product adds to it; it stays in float32.
    x = tl.load(hidden + row, mask=inside, other=0.0)
    if ADD:
        x += tl.load(update + row, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + row, x, mask=inside)

    # 2. Its norm in float32, rounded to the dtype of the scale.
    mean_square = tl.sum(x * x, 0) / N
    dtype = out.dtype.element_ty
    normed = (x * tl.rsqrt(mean_square + tl.load(eps))).to(dtype)
    factor = tl.load(scale + column, mask=inside, other=0.0)
    tl.store(out + row, (normed.to(tl.float32) * factor.to(tl.float32)).to(dtype), mask=inside)


def add_rms_norm(hidden: Tensor, update: Tensor | None, scale: Tensor, eps: Tensor) -> Tensor:
    """As `reference.add_rms_norm`. A row of more than LARGEST_ROW values goes to the reference."""
    tokens, size = hidden.shape
    if size > LARGEST_ROW:
        return reference.add_rms_norm(hidden, update, scale, eps)
    out = torch.empty(tokens, size, dtype=scale.dtype, device=hidden.device)
    width = triton.next_power_of_2(size)
    add_rms_norm_kernel[(tokens,)](
        hidden, update, scale, eps, out, size, WIDTH=width, ADD=update is not None,
        num_warps=min(16, max(4, width // 512)),
    )  # fmt: skip
    return out


@triton.jit
def silu_mul_kernel(gate_up, out, M, TILE: tl.constexpr):
    """Program (token, tile of the M outputs): gate_up [T, 2M], the gates first; out [T, M]. The
    arithmetic is float32, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < M
    gate = tl.load(gate_up + token * 2 * M + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * M + M + column, mask=inside, other=0.0).to(tl.float32)
    active = gate / (1.0 + tl.exp(-gate))
    tl.store(out + token * M + column, (active * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `reference.silu_mul`."""
    tokens = len(gate_up)
    size = gate_up.shape[1] // 2
    out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    grid = (tokens, triton.cdiv(size, TILE))
    silu_mul_kernel[grid](gate_up, out, size, TILE=TILE, num_warps=4)
    return out
