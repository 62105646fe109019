"""The pieces of a decoder layer: linear maps, RMSNorm, and a parameter that a loader fills.

Knows nothing of attention, caches or checkpoints.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.reference import upcast_pays

BLOCK = 4 << 20  # weights that are turned into float32 at a time


def weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without content: the loader fills it or says what is missing."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times matrix [out, in] plus bias: [T, out]. In float32, block by block, where a CPU's bf16 is
    slow."""
    if not upcast_pays(x, len(x)):
        return F.linear(x, matrix, bias)
    x, rows = x.float(), max(1, BLOCK // matrix.shape[1])
    out = torch.cat([F.linear(x, block.float()) for block in matrix.split(rows)], dim=-1)
    return (out if bias is None else out + bias).to(matrix.dtype)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32; the result has the scale's dtype."""
    return F.rms_norm(x.float(), scale.shape[-1:], eps=eps).to(scale.dtype) * scale
