"""One layer's q, k and v in one launch: norm of q and k, rotation, storage; the twin of
`reference.store`.

Knows nothing of requests, layers or schedules: a token has a flat slot, and perhaps a place in the
query buffer. Tokens that share a slot (padded rows, on the scratch page) race, and nobody reads
what they leave.

A line of `qkv` has the heads of a token one behind the other: H of the queries, K of the keys, K of
the values. A program loads a block of them, whichever they are, as two halves of a head each:
rotation turns value i of the first half against value i of the second. Masks tell where they go."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def head_scale(q_norm, k_norm, head, at, inside, H: tl.constexpr, K: tl.constexpr):
    """float32 scale of the norm at the places `at` of each head: the queries', the keys', or 1
    for the heads of the values."""
    of_queries = tl.load(q_norm + at, mask=inside & (head < H), other=1.0)
    of_keys = tl.load(k_norm + at, mask=inside & (head >= H) & (head < H + K), other=1.0)
    return tl.where(head < H, of_queries, of_keys).to(tl.float32)


@triton.jit
def store_kernel(
    qkv, cos, sin, slots, q, keys, values, buffer, buffer_rows, buffer_slots, q_norm, k_norm, eps,
    row_stride, head_stride, num_slots,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    OBSERVE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Program (token, block of HEADS of its H + 2K heads).

    PAIRS is D / 2 rounded up to a power of two; all tiles are [HEADS, PAIRS]. OBSERVE: queries go
    to the query buffer too. NORM: queries and keys are normed first (Qwen3)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = pair < D // 2
    is_query = inside & (head < H)
    is_key = inside & (head >= H) & (head < H + K)
    is_value = inside & (head >= H + K) & (head < H + 2 * K)

    # 1. Both halves of each head, which rotation turns against each other. Heads past the last are
    #    neither loaded nor stored.
    source = qkv + (token * (H + 2 * K) + head) * D + pair
    first = tl.load(source, mask=is_query | is_key | is_value, other=0.0)
    second = tl.load(source + D // 2, mask=is_query | is_key | is_value, other=0.0)

    # 2. The norm over a head's values; the heads of `values` have none.
    if NORM:
        dtype = first.dtype
        wide_first = first.to(tl.float32)
        wide_second = second.to(tl.float32)
        mean_square = tl.sum(wide_first * wide_first + wide_second * wide_second, 1) / D
        shrink = tl.rsqrt(mean_square + tl.load(eps))[:, None]
        # Rounded to the dtype before the scale, and after it: so are models trained.
        normed_first = (wide_first * shrink).to(dtype).to(tl.float32)
        normed_second = (wide_second * shrink).to(dtype).to(tl.float32)
        normed_first *= head_scale(q_norm, k_norm, head, pair, inside, H, K)
        normed_second *= head_scale(q_norm, k_norm, head, pair + D // 2, inside, H, K)
        first = tl.where(head < H + K, normed_first.to(dtype), first)
        second = tl.where(head < H + K, normed_second.to(dtype), second)

    # 3. The rotation; cos and sin are float32, so the arithmetic is, and it rounds once. All heads
    #    of a token have the same angles.
    c = tl.load(cos + token * (D // 2) + pair, mask=inside, other=0.0)
    s = tl.load(sin + token * (D // 2) + pair, mask=inside, other=0.0)
    turned_first = (first * c - second * s).to(first.dtype)
    turned_second = (second * c + first * s).to(first.dtype)

    # 4. Rotated queries go to the attention, …
    target = q + (token * H + head) * D + pair
    tl.store(target, turned_first, mask=is_query)
    tl.store(target + D // 2, turned_second, mask=is_query)

    # 5. … rotated keys and plain values to the token's slot. A layer's keys may have more values
    #    than 32 bits count.
    slot = tl.load(slots + token)
    target = keys + ((head - H).to(tl.int64) * num_slots + slot) * D + pair
    tl.store(target, turned_first, mask=is_key)
    tl.store(target + D // 2, turned_second, mask=is_key)
    target = values + ((head - H - K).to(tl.int64) * num_slots + slot) * D + pair
    tl.store(target, first, mask=is_value)
    tl.store(target + D // 2, second, mask=is_value)

    # 6. Queries as they were before the rotation go to the query buffer (METHOD.md): each token's
    #    to its request's row, at the slot that the host has chosen.
    if OBSERVE:
        row = tl.load(buffer_rows + token)
        place = tl.load(buffer_slots + token)
        target = buffer + row * row_stride + head.to(tl.int64) * head_stride + place * D + pair
        tl.store(target, first, mask=is_query)
        tl.store(target + D // 2, second, mask=is_query)


def store(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor,
    buffer: Tensor | None = None,
    buffer_rows: Tensor | None = None,
    buffer_slots: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `reference.store`; the last two dimensions of `buffer` must lie together, not the others:
    it may be one layer of all."""
    tokens, rows, head_dim = qkv.shape
    num_heads = rows - 2 * len(keys)
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    # Without a query buffer nothing is observed, and no stride is used.
    row_stride = 0
    head_stride = 0
    if buffer is not None:
        row_stride = buffer.stride(0)
        head_stride = buffer.stride(1)
    # A slot counts through all pages of a KV head: keys are [K, pages, P, D].
    num_slots = keys.shape[1] * keys.shape[2]
    # Eight heads a program: enough to load for two warps, few enough for many programs a token.
    heads = min(8, triton.next_power_of_2(rows))
    store_kernel[(tokens, triton.cdiv(rows, heads))](
        qkv, cos, sin, slots, q, keys, values,
        buffer, buffer_rows, buffer_slots, q_norm, k_norm, eps,
        row_stride, head_stride, num_slots,
        H=num_heads, K=len(keys), D=head_dim, HEADS=heads,
        PAIRS=triton.next_power_of_2(head_dim // 2),
        OBSERVE=buffer is not None, NORM=q_norm is not None,
        num_warps=2,
    )  # fmt: skip
    return q
