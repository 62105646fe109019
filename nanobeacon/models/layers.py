"""The pieces of a decoder layer that hold parameters: linear maps, and a parameter that a
loader fills.

Knows nothing of attention, caches or checkpoints. What makes linear maps fast on a CPU is in
`packing.py`."""

import math
import mmap

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..parallel import Group


def weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without content: the loader fills it or says what is missing."""
    # memory of its own, which goes back to the system when the matrix is packed
    if device.type == "cpu":
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
        return nn.Parameter(torch.frombuffer(memory, dtype=dtype).view(shape), requires_grad=False)
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """x [T, in] times weight [out, in] plus bias: [T, out]. The weight may be an
    embedding's as well."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs]."""
        return F.linear(x, self.weight, self.bias)


class SummedLinear(nn.Module):
    """A linear map whose inputs are split over a group: x [T, this member's inputs] -> [T, out].

    The members' products are summed, so that each has the result; the bias is added behind
    that, so once."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group) -> None:
        super().__init__()
        self.product = Linear(weight)
        self.bias = bias
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """x [T, this member's inputs] -> [T, outputs], summed over the members; the bias is
        added once."""
        out = self.group.all_reduce(self.product(x))
        return out if self.bias is None else out.add_(self.bias)
