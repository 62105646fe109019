"""Fast linear maps on a CPU: weights in the order in which its products read them. Everything that is done
for a CPU alone.

* `PackedLinear`: without instructions for it a product with bf16 weights crawls. The weights become
  float16, converted in registers, and activations are float32. A float16 checkpoint is packed on
  every CPU: so its weights keep all their bits.
* `BlockedLinear`: with such instructions bf16 weights stay what they are, and lie in blocks. A product
  of a few rows, which is what a decode step is, then reads them about twice as fast.

Knows linear maps and the decoder that holds them; nothing of attention or caches.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..kernels import reference
from .decoder import Decoder
from .layers import Linear, weight

BLOCK = 8 << 20  # weights that are turned into float32 at a time when a matrix is packed
PADDING = 512  # packed weights are padded to a multiple of this many inputs
# The operator without its wrapper, which looks through the arguments again at every call
MULTIPLY = torch.ops.quantized.linear_dynamic_fp16.default._op
MULTIPLY_BLOCKS = torch.ops.mkldnn._linear_pointwise.default._op


def packing_pays(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this dtype are better packed: float16, and bf16 without
    instructions for it."""
    if device.type != "cpu" or "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    crawls = dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported()
    return crawls or dtype == torch.float16


def blocking_pays(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this dtype are better kept in blocks: bf16, with instructions for it."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    return torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()


class BlockedLinear(nn.Module):
    """x bf16 [T, in] -> bf16 [T, out], by bf16 weights in blocks; made by `blocked`.

    blocks: the matrix, a tensor that only oneDNN's products can read. bias: bf16 [out]."""

    def __init__(self, blocks: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.blocks = blocks
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs]; nothing is done with the product."""
        return MULTIPLY_BLOCKS(x, self.blocks, self.bias, "none", [], None)


def blocked(linear: Linear) -> BlockedLinear:
    """The same map in blocks, every bit of it; the given one is emptied, so that no matrix is held
    twice."""
    matrix = linear.weight
    linear.weight = None
    return BlockedLinear(torch.ops.mkldnn._reorder_linear_weight(matrix.data), linear.bias)


class PackedLinear(nn.Module):
    """x float32 [T, in] -> float32 [T, out], by float16 weights; made by `packed`.

    blocks: packed rows of the matrix, one after another. rest: float32 [in', out], the last inputs,
    where padding them would read more than they are. bias: float32 [out]."""

    def __init__(self, blocks: list, rest: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.blocks = blocks
        self.rest = rest
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x float32 [T, inputs] -> float32 [T, outputs]."""
        # 1. The inputs of the packed blocks, and the last ones, which are multiplied in float32.
        tail = None
        if self.rest is not None:
            in_tail = len(self.rest)
            x, tail = x.split((x.shape[1] - in_tail, in_tail), dim=1)
        # 2. Block by block; one block is the answer without a copy.
        if len(self.blocks) == 1:
            out = MULTIPLY(x, self.blocks[0])
        else:
            out = torch.cat([MULTIPLY(x, block) for block in self.blocks], dim=1)
        if tail is not None:
            out.addmm_(tail, self.rest)
        return out if self.bias is None else out.add_(self.bias)


def packed(linear: Linear) -> PackedLinear | Linear:
    """The same map with packed weights; the given one is emptied, so that no matrix is held twice.

    Weights above 6e-5 keep every bit, smaller ones move by 3e-8 at most. A matrix beyond float16,
    or one that is not finite, becomes float32 instead."""
    matrix = linear.weight
    outputs, inputs = matrix.shape
    linear.weight = None
    bias = None if linear.bias is None else linear.bias.float()
    parts = matrix.split(max(1, BLOCK // inputs))

    def wide(*shape: int) -> nn.Parameter:
        """An empty parameter in float32, where the activations of a packed model live."""
        return weight(*shape, dtype=torch.float32, device=matrix.device)

    # 1. NaN compares with nothing, so a matrix that has one stays unpacked too.
    largest = torch.finfo(torch.float16).max
    if not all(part.abs().max() <= largest for part in parts):
        biases = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return Linear(wide(outputs, inputs).copy_(matrix), biases)

    # 2. How many inputs go into the packed blocks; a few beyond a multiple of PADDING may
    #    stay apart.
    together = inputs
    rest = None
    past = inputs % PADDING
    if len(parts) > 1 and inputs > PADDING and 0 < past <= PADDING // 2:
        # what is past takes less as float32 than padded
        together = inputs - past
        rest = wide(past, outputs).copy_(matrix[:, together:].T)
    # 3. Block by block, so that little of the matrix exists in float32 at a time.
    blocks = []
    for part in parts:
        in_float32 = wide(len(part), together).copy_(part[:, :together])
        blocks.append(torch.ops.quantized.linear_prepack_fp16(in_float32, None))
        del in_float32  # before the next block is made
    return PackedLinear(blocks, rest, bias)


def pack(model: Decoder, rows: Callable[[Tensor], Tensor] | None = None) -> None:
    """Once a model is loaded: pack its matrices, or lay them out in blocks, where that pays.
    `weights()` has no views any more. Of a packed model activations are float32, and the cache is still
    in the model's dtype. `rows`: where a tied embedding's rows, ids -> [T, hidden], can be had, so that
    the matrix need not be in memory twice."""
    if model.kernels is not reference:
        return  # Triton's kernels, interpreted on a CPU, want q and the cache in one dtype
    if packing_pays(model.held, model.device):
        remade = packed
    elif blocking_pays(model.held, model.device):
        remade = blocked
    else:
        return
    # 1. The matrices.
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                setattr(module, name, remade(child))
    # 2. The embedding, which a tied head holds now.
    if model.config.tied and rows is not None:
        model.embedding = None
        model.rows = rows
    # 3. The scales of the norms follow the activations, which packed matrices want in float32.
    if remade is packed:
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data = parameter.data.float()
