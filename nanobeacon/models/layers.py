"""The pieces of a decoder layer: linear maps, RMSNorm, and a parameter that a loader fills.

Knows nothing of attention, caches or checkpoints."""

import math
import mmap

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 8 << 20  # weights that are turned into float32 at a time when a matrix is packed
# The operator without its wrapper, which looks through the arguments again at every call
MULTIPLY = torch.ops.quantized.linear_dynamic_fp16.default._op
PADDING = 512  # packed weights are padded to a multiple of this many inputs


def weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without content: the loader fills it or says what is missing."""
    if device.type == "cpu":  # memory of its own, which goes back to the system when the matrix is packed
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
        return nn.Parameter(torch.frombuffer(memory, dtype=dtype).view(shape), requires_grad=False)
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def packing_pays(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products with such weights crawl as they are: bf16 on a CPU that has no instructions for it."""
    crawls = device.type == "cpu" and dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported()
    return crawls and "fbgemm" in torch.backends.quantized.supported_engines


class Linear(nn.Module):
    """x [T, in] times weight [out, in] plus bias: [T, out]. The weight may be an embedding's as well."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias, self.blocks, self.rest = weight, bias, [], None

    def pack(self) -> None:
        """From now on multiply float32 by float16, which AVX2 converts in registers; the bf16 is given up.
        Weights above 6e-5 keep every bit, smaller ones move by 3e-8 at most. Needs a CPU; final."""
        matrix, make = self.weight, {"dtype": torch.float32, "device": self.weight.device}
        (outputs, inputs), packed = matrix.shape, matrix.shape[1]
        if self.bias is not None:
            self.bias.data = self.bias.float()
        parts = matrix.split(max(1, BLOCK // inputs))
        if not all(part.abs().max() <= torch.finfo(torch.float16).max for part in parts):
            self.weight = weight(outputs, inputs, **make).copy_(matrix)  # beyond float16, or not finite
            return
        if len(parts) > 1 and inputs > PADDING and 0 < inputs % PADDING <= PADDING // 2:
            packed -= inputs % PADDING  # what is past takes less as float32 than padded
            self.rest = weight(inputs - packed, outputs, **make).copy_(matrix[:, packed:].T)
        for part in parts:
            wide = weight(len(part), packed, **make).copy_(part[:, :packed])
            self.blocks.append(torch.ops.quantized.linear_prepack_fp16(wide, None))
        self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.blocks:
            return F.linear(x, self.weight, self.bias)
        if self.rest is not None:
            x, tail = x.split((x.shape[1] - len(self.rest), len(self.rest)), dim=1)
        out = MULTIPLY(x, self.blocks[0])
        if len(self.blocks) > 1:
            out = torch.cat([out, *(MULTIPLY(x, block) for block in self.blocks[1:])], dim=1)
        if self.rest is not None:
            out.addmm_(tail, self.rest)
        return out if self.bias is None else out.add_(self.bias)


def rms_norm(x: Tensor, scale: Tensor, eps: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32, then in the scale's dtype; eps is [1]."""
    x = x.float()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # two launches fewer than mean of squares
    return (x * torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()).to(scale.dtype) * scale
