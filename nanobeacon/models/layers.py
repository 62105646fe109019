"""The pieces of a decoder layer: linear maps, RMSNorm, and a parameter that a loader fills.

Knows nothing of attention, caches or checkpoints."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.reference import upcast_pays

BLOCK = 4 << 20  # weights that are turned into float32 at a time


def weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without content: the loader fills it or says what is missing."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times matrix [out, in] plus bias: [T, out]; in float32 blocks where a CPU's bf16 is slow."""
    if not upcast_pays(x, len(x)):
        return F.linear(x, matrix, bias)
    x, rows = x.float(), max(1, BLOCK // matrix.shape[1])
    out = torch.cat([F.linear(x, block.float()) for block in matrix.split(rows)], dim=-1)
    return (out if bias is None else out + bias).to(matrix.dtype)


def rms_norm(x: Tensor, scale: Tensor, eps: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32, then in the scale's dtype; eps is [1]."""
    x = x.float()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # two launches fewer than mean of squares
    return (x * torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()).to(scale.dtype) * scale
