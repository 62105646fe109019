"""One decoder for every family: a forward pass is a function of a batch, a cache and a query buffer.

Knows no requests, no sampling and no files. What differs between families are flags of `ModelConfig`; where a
checkpoint's tensors go is told by `weights`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batch import Batch
from ..cache import KVCache, QueryBuffer
from ..config import ModelConfig
from ..kernels import choose, reference
from ..rope import Rope
from .layers import Linear, packing_pays, rms_norm, weight


class Layer(nn.Module):
    """Attention and MLP of one layer; q, k, v and gate, up are fused into one matrix each."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config, self.eps = config, torch.tensor([config.rms_norm_eps], device=device)
        hidden, mlp, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, qkv_size = config.num_heads * dim, (config.num_heads + 2 * config.num_kv_heads) * dim

        def make(*shape: int, wanted: bool = True) -> nn.Parameter | None:
            return weight(*shape, dtype=dtype, device=device) if wanted else None

        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear(make(outputs, inputs), make(outputs, wanted=bias))

        self.input_norm, self.post_norm = make(hidden), make(hidden)
        self.qkv, self.o = linear(hidden, qkv_size, config.qkv_bias), linear(q_size, hidden, config.o_bias)
        self.q_norm, self.k_norm = make(dim, wanted=config.qk_norm), make(dim, wanted=config.qk_norm)
        self.gate_up = linear(hidden, 2 * mlp, config.mlp_bias)
        self.down = linear(mlp, hidden, config.mlp_bias)

    def weights(self) -> dict[str, Tensor | None]:
        """Checkpoint name inside the layer -> the part of a parameter that it fills."""
        c = self.config
        heads = [n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
        views = {"input_layernorm.weight": self.input_norm, "post_attention_layernorm.weight": self.post_norm}
        views |= {"self_attn.q_norm.weight": self.q_norm, "self_attn.k_norm.weight": self.k_norm}
        for kind in ("weight", "bias"):
            matrices = (self.qkv, self.o, self.gate_up, self.down)
            qkv, o, gate_up, down = (getattr(matrix, kind) for matrix in matrices)
            q, k, v = qkv.split(heads) if qkv is not None else (None,) * 3
            gate, up = gate_up.chunk(2) if gate_up is not None else (None, None)
            views |= {f"self_attn.{n}_proj.{kind}": x for n, x in zip("qkvo", (q, k, v, o), strict=True)}
            views |= {f"mlp.{n}_proj.{kind}": x for n, x in (("gate", gate), ("up", up), ("down", down))}
        return {name: view for name, view in views.items() if view is not None}

    def forward(self, layer: int, hidden: Tensor, rotation, batch: Batch, cache, queries, kernels) -> Tensor:
        """hidden float32 [T, hidden] -> the same; stores this layer's keys, values and queries on the way."""
        hidden += self._attend(layer, hidden, rotation, batch, cache, queries, kernels)
        hidden += self._mlp(hidden)
        return hidden

    def _attend(self, layer: int, hidden: Tensor, rotation, batch: Batch, cache, queries, kernels) -> Tensor:
        c = self.config
        qkv = self.qkv(rms_norm(hidden, self.input_norm, self.eps)).view(len(hidden), -1, c.head_dim)
        if c.qk_norm:
            q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
            qkv = torch.cat((q, k, v), dim=1)
        seen = batch.observation
        queries.observe(layer, qkv[:, : c.num_heads], batch.positions, seen, kernels)
        keys, values = cache.keys[layer], cache.values[layer]
        target = (queries.buffer[:, layer], seen.rows, seen.slots) if seen.rows is not None else ()
        q = kernels.store(qkv, *rotation, batch.slots, keys, values, *target)
        attended = kernels.paged_attention(
            q, keys, values, batch.page_table, batch.cached_lengths, batch.cu_seqlens,
            batch.max_query_length, batch.max_cached_length, c.head_dim**-0.5, batch.runs,
        )  # fmt: skip
        return self.o(attended.flatten(1))

    def _mlp(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(rms_norm(hidden, self.post_norm, self.eps)).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


class Decoder(nn.Module):
    """Embedding, layers, final norm and head. Parameters are empty until a loader has filled `weights()`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, page_size: int) -> None:
        super().__init__()
        self.config, self.dtype, self.device, self.rows = config, dtype, device, None
        self.kernels = choose(device, config.head_dim, page_size)
        self.rope = Rope(config.rope, config.head_dim, config.max_position_embeddings, device)
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = weight(*shape, dtype=dtype, device=device)
        self.layers = nn.ModuleList(Layer(config, dtype, device) for _ in range(config.num_layers))
        self.norm = weight(config.hidden_size, dtype=dtype, device=device)
        self.head = Linear(self.embedding if config.tied else weight(*shape, dtype=dtype, device=device))

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the view it fills; every parameter is covered exactly once."""
        views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.config.tied:
            views["lm_head.weight"] = self.head.weight
        for i, layer in enumerate(self.layers):
            views |= {f"model.layers.{i}.{name}": view for name, view in layer.weights().items()}
        return views

    def pack(self, rows: Callable[[Tensor], Tensor] | None = None) -> None:
        """Once loaded: on a CPU without bf16 instructions, lay bf16 matrices out so that they multiply fast.
        Activations are then float32, the cache stays bf16. `rows`: where a tied embedding's rows, ids -> bf16
        [T, hidden], can be had, so that it need not be in memory twice. `weights()` has no views any more."""
        if self.kernels is not reference or not packing_pays(self.dtype, self.device):
            return  # Triton's kernels, interpreted on a CPU, want q and the cache in one dtype
        self.head.pack()
        if self.config.tied and rows is not None:
            self.embedding, self.rows = None, rows
        for module in self.layers.modules():
            if isinstance(module, Linear):
                module.pack()
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.data = parameter.data.float()

    def forward(self, batch: Batch, cache: KVCache, queries: QueryBuffer) -> Tensor:
        """One forward pass; returns the hidden states [T, hidden] after the final norm."""
        cache.store_positions(batch.positions, batch.slots)
        queries.store_positions(batch.observation, batch.positions)
        rotation = self.rope.cos_sin(batch.positions, batch.rope_lengths)
        ids = batch.token_ids
        hidden = self.rows(ids) if self.rows is not None else F.embedding(ids, self.embedding)
        hidden = hidden.float()  # sums over layers stay in float32
        for i, layer in enumerate(self.layers):
            hidden = layer(i, hidden, rotation, batch, cache, queries, self.kernels)
        return rms_norm(hidden, self.norm, self.layers[-1].eps)

    def logits(self, hidden: Tensor, vocabulary: int | None = None) -> Tensor:
        """float32 [R, vocabulary] from hidden [R, hidden]; rows of the head past `vocabulary` are padding."""
        return self.head(hidden)[:, :vocabulary].float()
