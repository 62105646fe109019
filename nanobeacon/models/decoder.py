"""One decoder for every family: a forward pass is a function of a batch, a cache and a
query buffer.

Knows no requests, no sampling and no files. What differs between families are flags of
`ModelConfig`; where a checkpoint's tensors go is told by `weights`.

Letters of shapes: T tokens of the batch, of all its requests end to end; R requests; H query heads,
K KV heads, D head dim; C slots of a query buffer row, P page size. The residual stream is float32.

Members of a group share a model: each holds some of the heads, of the MLP and of the
vocabulary (`parts`). They meet where each of them has only a part of a result: two sums a
layer, behind `o` and `down`, one where rows of the embedding are looked up, and the logits,
which are put together."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batch import Batch
from ..cache import KVCache, QueryBuffer
from ..config import ModelConfig, share_of
from ..kernels import choose
from ..parallel import Group, Heads, Part
from ..rope import Rope
from .layers import Linear, SummedLinear, weight

Kernels = ModuleType | SimpleNamespace  # what `kernels.choose` returns


@dataclass(frozen=True)
class Shared:
    """What all layers of one forward pass share."""

    batch: Batch
    cache: KVCache
    queries: QueryBuffer
    kernels: Kernels
    cos: Tensor  # float32 [T, D/2], of the tokens' positions
    sin: Tensor
    page_table: Tensor  # int32 [R, pages of the longest], the batch's lines of the cache's
    # Where queries lie before the buffer takes some of them, [H, T, D]; None where `store` puts
    # every query into its buffer row, or where nobody observes. It is used again in each layer.
    unrotated: Tensor | None
    first_row: Tensor | None  # int64 [T], zeros: the one row of `unrotated`
    tokens: Tensor | None  # int64 [T], 0 … T - 1: its slots

    def queries_go_to(self, layer: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Buffer [rows, H, C, D], rows [T] and slots [T], to which `store` writes each
        token's queries."""
        observation = self.batch.observation
        # 1. Into the query buffer, which takes every query of this pass.
        if observation.rows is not None:
            return self.queries.buffer[:, layer], observation.rows, observation.slots
        # 2. Beside it: a buffer of one row, with a slot for each token, [1, H, T, D].
        if self.unrotated is not None:
            return self.unrotated[None], self.first_row, self.tokens
        # 3. Nowhere.
        return None, None, None


class Layer(nn.Module):
    """Attention and MLP of one layer; q, k, v and gate, up are fused into one matrix each.

    config: of this member's share of the layer. dtype: of the weights. Parameters that the family
    does not have (biases, the norms of q and k) are None."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
    ) -> None:
        super().__init__()
        self.config = config
        self.eps = torch.tensor([config.rms_norm_eps], device=device)  # where kernels read it
        hidden = config.hidden_size
        mlp = config.intermediate_size
        dim = config.head_dim
        q_size = config.num_heads * dim
        qkv_size = (config.num_heads + 2 * config.num_kv_heads) * dim

        def make(*shape: int, wanted: bool = True) -> nn.Parameter | None:
            """A parameter, where the family has it."""
            return weight(*shape, dtype=dtype, device=device) if wanted else None

        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            """A map to this member's part of the outputs."""
            return Linear(make(outputs, inputs), make(outputs, wanted=bias))

        def summed(inputs: int, bias: bool) -> SummedLinear:
            """A map from this member's part of the inputs back to the stream."""
            return SummedLinear(make(hidden, inputs), make(hidden, wanted=bias), group)

        # 1. Attention
        self.input_norm = make(hidden)
        self.qkv = linear(hidden, qkv_size, config.qkv_bias)
        self.q_norm = make(dim, wanted=config.qk_norm)
        self.k_norm = make(dim, wanted=config.qk_norm)
        self.o = summed(q_size, config.o_bias)
        # 2. MLP
        self.post_norm = make(hidden)
        self.gate_up = linear(hidden, 2 * mlp, config.mlp_bias)
        self.down = summed(mlp, config.mlp_bias)

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint name inside the layer -> the part of a parameter that it fills."""
        views = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_norm,
            "self_attn.q_norm.weight": self.q_norm,
            "self_attn.k_norm.weight": self.k_norm,
            "self_attn.o_proj.weight": self.o.product.weight,
            "self_attn.o_proj.bias": self.o.bias,
            "mlp.down_proj.weight": self.down.product.weight,
            "mlp.down_proj.bias": self.down.bias,
        }
        views.update(self._fused_views("weight"))
        views.update(self._fused_views("bias"))
        return {name: view for name, view in views.items() if view is not None}

    def _fused_views(self, kind: str) -> dict[str, Tensor]:
        """What lies in the fused matrices (`kind` "weight") or their biases ("bias"):
        views of rows."""
        # q, k and v one below the other: the outputs of a product are rows of its matrix.
        views = {}
        qkv = getattr(self.qkv, kind)
        if qkv is not None:
            q_size = self.config.num_heads * self.config.head_dim
            kv_size = self.config.num_kv_heads * self.config.head_dim
            q, k, v = qkv.split([q_size, kv_size, kv_size])
            views[f"self_attn.q_proj.{kind}"] = q
            views[f"self_attn.k_proj.{kind}"] = k
            views[f"self_attn.v_proj.{kind}"] = v
        gate_up = getattr(self.gate_up, kind)
        if gate_up is not None:
            gate, up = gate_up.chunk(2)
            views[f"mlp.gate_proj.{kind}"] = gate
            views[f"mlp.up_proj.{kind}"] = up
        return views

    def forward(self, layer: int, hidden: Tensor, update: Tensor | None, shared: Shared) -> Tensor:
        """What this layer's MLP adds to the residual stream, [T, hidden].

        layer: the number of this one. hidden float32 [T, hidden]: the stream, to which `update`,
        what the layer before adds (None in the first), and what this layer's attention adds are
        added in place: so an addition and the norm after it are one launch. Keys, values and
        queries are stored on the way."""
        kernels = shared.kernels
        # 1. Attention, over the normed stream
        normed = kernels.add_rms_norm(hidden, update, self.input_norm, self.eps)
        attended = self._attend(layer, normed, shared)
        # 2. MLP: silu(gate) * up, and back to the stream
        normed = kernels.add_rms_norm(hidden, attended, self.post_norm, self.eps)
        return self.down(kernels.silu_mul(self.gate_up(normed)))

    def _attend(self, layer: int, normed: Tensor, shared: Shared) -> Tensor:
        """What attention adds to the stream, [T, hidden], from the normed stream [T, hidden]."""
        batch = shared.batch
        kernels = shared.kernels
        keys = shared.cache.keys[layer]  # [K, pages, P, D]
        values = shared.cache.values[layer]
        head_dim = self.config.head_dim

        # 1. q, k and v of the tokens, [T, H + 2K, D]
        qkv = self.qkv(normed).view(len(normed), -1, head_dim)

        # 2. q and k are normed and rotated; k and v go to the cache, q as it was before the
        #    rotation to the query buffer, or beside it where that takes only some of this pass
        buffer, rows, slots = shared.queries_go_to(layer)
        q = kernels.store(
            qkv, shared.cos, shared.sin, batch.slots, keys, values,
            buffer, rows, slots,
            q_norm=self.q_norm, k_norm=self.k_norm, eps=self.eps,
        )  # fmt: skip
        if shared.unrotated is not None:
            of_tokens = shared.unrotated.transpose(0, 1)  # [T, H, D]
            shared.queries.observe(layer, of_tokens, batch.positions, batch.observation, kernels)

        # 3. Each token attends to its request's slots
        attended = kernels.paged_attention(
            q, keys, values, shared.page_table, batch.cached_lengths, batch.cu_seqlens,
            batch.max_query_length, batch.max_cached_length, head_dim**-0.5, batch.runs,
        )  # fmt: skip
        return self.o(attended.flatten(1))


class Decoder(nn.Module):
    """Embedding, layers, final norm and head. Parameters are empty until a loader has
    filled `weights()`.

    config: of the whole model; `self.config` is then that of this member's share, whose vocab_size
    is still the whole one. dtype: of activations and cache. held: of the weights, where they are to
    be packed from another dtype. group: who computes the model together; ValueError where it cannot
    be shared by so many."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int,
        held: torch.dtype | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        # 1. What this member computes of the model.
        self.group = group or Group()
        self.whole_config = config
        config = share_of(config, self.group.size)
        self.config = config
        self.heads = Heads(self.group, self.whole_config.num_kv_heads)
        self.dtype = dtype
        self.held = held or dtype
        self.device = device
        # ids [T] -> rows [T, hidden] of an embedding that is not held (`packing.pack`)
        self.rows: Callable[[Tensor], Tensor] | None = None
        self.kernels = choose(device, config.head_dim, page_size)
        self.rope = Rope(config.rope, config.head_dim, config.max_position_embeddings, device)

        # 2. What a forward pass goes through. Every member has as many rows of the vocabulary, for
        #    results of one shape; the last one's may go beyond it.
        rows = -(-config.vocab_size // self.group.size)
        self.first_row = self.group.rank * rows
        self.known_rows = min(rows, config.vocab_size - self.first_row)
        shape = (rows, config.hidden_size)
        self.embedding = weight(*shape, dtype=self.held, device=device)
        layers = [Layer(config, self.held, device, self.group) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = weight(config.hidden_size, dtype=self.held, device=device)
        if config.tied:
            self.head = Linear(self.embedding)
        else:
            self.head = Linear(weight(*shape, dtype=self.held, device=device))

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the view it fills; every parameter is covered exactly once."""
        known = self.known_rows
        views = {
            "model.embed_tokens.weight": self.embedding[:known],
            "model.norm.weight": self.norm,
        }
        if not self.config.tied:
            views["lm_head.weight"] = self.head.weight[:known]
        # Every layer names its tensors as if it were alone.
        for i, layer in enumerate(self.layers):
            for name, view in layer.weights().items():
                views[f"model.layers.{i}.{name}"] = view
        return views

    def parts(self) -> dict[str, Part]:
        """Checkpoint tensor name -> the part of it that this member's view holds; no
        name: all of it."""
        if self.group.size == 1:
            return {}
        whole = self.whole_config
        share = self.config
        rank = self.group.rank
        dim = share.head_dim
        # 1. The four things that are shared out: where this member's begin, and how many there are.
        q = Part(0, rank * share.num_heads * dim, whole.num_heads * dim)
        kv = Part(0, self.heads.first * dim, whole.num_kv_heads * dim)
        mlp = Part(0, rank * share.intermediate_size, whole.intermediate_size)
        vocabulary = Part(0, self.first_row, whole.vocab_size)
        # 2. What makes heads, MLP and logits is split by its outputs; what sums over them by
        #    its inputs.
        by_outputs = {
            "q_proj": q,
            "k_proj": kv,
            "v_proj": kv,
            "gate_proj": mlp,
            "up_proj": mlp,
            "embed_tokens": vocabulary,
            "lm_head": vocabulary,
        }
        by_inputs = {
            "o_proj": replace(q, dim=1),
            "down_proj": replace(mlp, dim=1),
        }
        # 3. A bias follows the outputs: behind a sum every member has all of it.
        #    Norms are whole everywhere.
        parts = {}
        for name in self.weights():
            *_, module, kind = name.split(".")
            if module in by_outputs:
                parts[name] = by_outputs[module]
            elif module in by_inputs and kind == "weight":
                parts[name] = by_inputs[module]
        return parts

    def forward(self, batch: Batch, cache: KVCache, queries: QueryBuffer) -> Tensor:
        """One forward pass; returns the hidden states [T, hidden] after the final norm."""
        # 1. The positions of what the layers will store: the same for all of them.
        cache.store_positions(batch.positions, batch.slots)
        queries.store_positions(batch.observation, batch.positions)
        # 2. The layers. Each changes `hidden` in place and leaves its last update to the next.
        hidden = self._embedded(batch.token_ids).float()  # sums over layers stay in float32
        shared = self._shared(batch, cache, queries)
        update = None
        for i, layer in enumerate(self.layers):
            update = layer(i, hidden, update, shared)
        # 3. The last update, and the final norm.
        return self.kernels.add_rms_norm(hidden, update, self.norm, self.layers[-1].eps)

    def _embedded(self, ids: Tensor) -> Tensor:
        """Rows [T, hidden] of the embedding for ids [T]: each comes from the member that
        holds it."""
        # The matrix is packed away, or held as a whole, or dealt out.
        if self.rows is not None:
            return self.rows(ids)
        if self.group.size == 1:
            return F.embedding(ids, self.embedding)
        # Every id is found by one member, and the others add zeros.
        row = ids - self.first_row
        elsewhere = (row < 0) | (row >= self.known_rows)
        found = F.embedding(row.masked_fill(elsewhere, 0), self.embedding)
        return self.group.all_reduce(found.masked_fill_(elsewhere[:, None], 0))

    def _shared(self, batch: Batch, cache: KVCache, queries: QueryBuffer) -> Shared:
        """What the layers need beside their weights, computed once for all of them."""
        # 1. The angles of the tokens, and the pages of the requests.
        cos, sin = self.rope.cos_sin(batch.positions, batch.rope_lengths)
        pages = -(-batch.max_cached_length // cache.page_size)
        page_table = cache.page_table[:, :pages].index_select(0, batch.rows)
        # 2. A place for queries, where somebody observes but does not take them all.
        unrotated = None
        first_row = None
        tokens = None
        if queries.capacity and batch.observation.rows is None:
            count = len(batch.token_ids)
            device = batch.token_ids.device
            shape = (self.config.num_heads, count, self.config.head_dim)
            unrotated = torch.empty(shape, dtype=queries.buffer.dtype, device=device)
            first_row = torch.zeros(count, dtype=torch.int64, device=device)
            tokens = torch.arange(count, device=device)
        return Shared(
            batch=batch,
            cache=cache,
            queries=queries,
            kernels=self.kernels,
            cos=cos,
            sin=sin,
            page_table=page_table,
            unrotated=unrotated,
            first_row=first_row,
            tokens=tokens,
        )

    def logits(
        self,
        hidden: Tensor,
        vocabulary: int | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        """float32 [R, vocabulary] from hidden [R, hidden]; rows of the head past
        `vocabulary` are padding.

        onto: where they go, float32 [R, vocabulary]; None: to memory of their own."""
        of_all_members = self.group.gather(self.head(hidden), dim=1)
        logits = of_all_members[:, :vocabulary]
        return logits.float() if onto is None else onto.copy_(logits)
