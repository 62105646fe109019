"""A forward pass that shows its attention weights: plain torch, float32, every query against every key.

Slow and exact, and independent of the engine's hot path: it takes a model's weights by their checkpoint names
and knows no cache, no pages and no kernels. Memory is bounded: of the weights only a chunk of queries exists
at a time.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nanobeacon import LLM

CHUNK_ELEMENTS = 1 << 25  # attention weights that exist at a time: 128 MiB
See = Callable[[int, int, Tensor], None]


def layers(llm: LLM, token_ids: Sequence[int], prompt_length: int, see: See) -> Iterator[Tensor]:
    """Run a text through the model of an LLM with dtype float32, layer by layer.

    see(layer, first, weights) gets the attention weights of a chunk of queries, float32 [H, C, T]; the first
    of them stands at position `first`. After each layer its queries before RoPE (after q-norm, where a model
    has one) are yielded, float32 [T, H, D].
    """
    model = llm.engine.model
    assert model.dtype == torch.float32, "other dtypes may be packed, and are not exact"
    weights = model.weights()
    config = model.config
    ids = torch.tensor(token_ids, device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    cos, sin = model.rope.cos_sin(positions, (positions + 1).clamp(min=prompt_length))
    cos = cos[:, None]
    sin = sin[:, None]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config.rms_norm_eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    with torch.inference_mode():
        hidden = F.embedding(ids, weights["model.embed_tokens.weight"])
        for layer in range(config.num_layers):
            name = f"model.layers.{layer}"

            # 1. Queries, keys and values; the queries are kept as they are before RoPE
            x = norm(hidden, f"{name}.input_layernorm")
            q, k, v = (
                linear(x, f"{name}.self_attn.{kind}_proj").unflatten(-1, (-1, config.head_dim))
                for kind in "qkv"
            )
            if config.qk_norm:
                q = norm(q, f"{name}.self_attn.q_norm")
                k = norm(k, f"{name}.self_attn.k_norm")
            unrotated = q

            # 2. Attention, a chunk of queries at a time, which `see` looks at
            q = model.rope.rotate(q, cos, sin)
            k = model.rope.rotate(k, cos, sin)
            attended = _attend(q, k, v, lambda first, w, layer=layer: see(layer, first, w))
            hidden = hidden + linear(attended.flatten(1), f"{name}.self_attn.o_proj")

            # 3. The MLP
            x = norm(hidden, f"{name}.post_attention_layernorm")
            x = F.silu(linear(x, f"{name}.mlp.gate_proj")) * linear(x, f"{name}.mlp.up_proj")
            hidden = hidden + linear(x, f"{name}.mlp.down_proj")
            yield unrotated


def _attend(q: Tensor, k: Tensor, v: Tensor, see: Callable[[int, Tensor], None]) -> Tensor:
    """Causal attention of q [T, H, D] over k, v [T, K, D]: [T, H, D]. `see` gets each chunk's weights."""
    length, heads, head_dim = q.shape
    group = heads // k.shape[1]
    keys = k.repeat_interleave(group, 1).permute(1, 2, 0)  # [H, D, T]
    values = v.repeat_interleave(group, 1).transpose(0, 1)  # [H, T, D]
    positions = torch.arange(length, device=q.device)
    size = max(1, CHUNK_ELEMENTS // (heads * length))
    chunks = []
    for first in range(0, length, size):
        queries = q[first : first + size].transpose(0, 1)
        scores = queries @ keys * head_dim**-0.5
        ahead = positions > positions[first : first + size, None]
        weights = scores.masked_fill_(ahead, -torch.inf).softmax(-1)
        see(first, weights)
        chunks.append((weights @ values).transpose(0, 1))
    return torch.cat(chunks)
