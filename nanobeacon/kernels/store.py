"""Rotation and storage of one layer's q, k and v in a single Triton launch; the twin of `reference.store`.

Knows nothing of requests, layers or schedules: a token has a flat slot, and perhaps a place in the query
buffer. Tokens that share a slot (padded rows, on the scratch page) race, and nobody reads what they leave."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def store_kernel(
    qkv, cos, sin, slots, q, keys, values, buffer, buffer_rows, buffer_slots, row_stride, head_stride,
    num_slots, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    OBSERVE: tl.constexpr,
):  # fmt: skip
    """Program (token, block of HEADS heads); PAIRS is D / 2 rounded up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = pair < D // 2
    source = qkv + (token * (H + 2 * K) + head) * D + pair
    first = tl.load(source, mask=inside & (head < H + 2 * K), other=0.0)
    second = tl.load(source + D // 2, mask=inside & (head < H + 2 * K), other=0.0)
    c = tl.load(cos + token * (D // 2) + pair, mask=inside, other=0.0)
    s = tl.load(sin + token * (D // 2) + pair, mask=inside, other=0.0)
    turned_first = (first * c - second * s).to(first.dtype)  # cos and sin are float32, so the arithmetic is
    turned_second = (second * c + first * s).to(first.dtype)

    target = q + (token * H + head) * D + pair
    tl.store(target, turned_first, mask=inside & (head < H))
    tl.store(target + D // 2, turned_second, mask=inside & (head < H))
    slot = tl.load(slots + token)
    is_key = inside & (head >= H) & (head < H + K)
    target = keys + ((head - H).to(tl.int64) * num_slots + slot) * D + pair
    tl.store(target, turned_first, mask=is_key)
    tl.store(target + D // 2, turned_second, mask=is_key)
    is_value = inside & (head >= H + K) & (head < H + 2 * K)
    target = values + ((head - H - K).to(tl.int64) * num_slots + slot) * D + pair
    tl.store(target, first, mask=is_value)
    tl.store(target + D // 2, second, mask=is_value)
    if OBSERVE:
        row, place = tl.load(buffer_rows + token), tl.load(buffer_slots + token)
        target = buffer + row * row_stride + head.to(tl.int64) * head_stride + place * D + pair
        tl.store(target, first, mask=inside & (head < H))
        tl.store(target + D // 2, second, mask=inside & (head < H))


def store(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor,
    buffer: Tensor | None = None, buffer_rows: Tensor | None = None, buffer_slots: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `reference.store`; the last two dimensions of `buffer` must lie together, not the others."""
    tokens, rows, head_dim = qkv.shape
    num_heads = rows - 2 * len(keys)
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    strides = (0, 0) if buffer is None else buffer.stride()[:2]
    heads, pairs = min(8, triton.next_power_of_2(rows)), triton.next_power_of_2(head_dim // 2)
    store_kernel[(tokens, triton.cdiv(rows, heads))](
        qkv, cos, sin, slots, q, keys, values, buffer, buffer_rows, buffer_slots, *strides,
        keys[0, ..., 0].numel(), H=num_heads, K=len(keys), D=head_dim, HEADS=heads, PAIRS=pairs,
        OBSERVE=buffer is not None, num_warps=2,
    )  # fmt: skip
    return q
