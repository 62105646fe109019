"""How many launches a pass makes, counted without a GPU: the model runs on "meta", where nothing computes.

A Triton kernel is one launch, and so is every torch operator that is no view and no allocation; what a GPU's
operator does inside itself (a sort is several kernels) is not seen. A tensor made from Python numbers is a
copy to the device. Reading one is impossible on "meta": a pass that waits for the device fails here.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanobeacon.batch import Batch
from nanobeacon.cache import KVCache, QueryBuffer
from nanobeacon.config import ModelConfig, RopeConfig
from nanobeacon.eviction import Evictor
from nanobeacon.kernels import triton_kernels
from nanobeacon.models.decoder import Decoder
from nanobeacon.policies import settle
from nanobeacon.request import Request, SamplingParams
from nanobeacon.sampling import best_tokens
from nanobeacon.scheduler import Plan

from .kernels import PERIODS, SHAPES, Shape, recorded_launches, roofline

LAUNCH = 2e-6  # seconds from one small kernel of a CUDA graph to the next

# Operators that launch nothing although their results do not share memory with their inputs
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
# Operators that are views on every call the engine makes, or whose schema does not say that they are
VIEWS = {"_unsafe_view", "_reshape_alias", "detach", "detach_"}


@dataclass
class Launches:
    """What was counted: launches by operator or kernel, and copies from the host."""

    made: Counter = field(default_factory=Counter)
    copies: int = 0

    @property
    def total(self) -> int:
        return sum(self.made.values())


class _Operators(TorchDispatchMode):
    def __init__(self, found: Launches) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.removeprefix("aten::")
        tensors = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        if not any(x.device.type == "meta" for x in tensors):
            return result  # the host's own arithmetic
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(x.device.type == "cpu" and x.numel() for x in given) and name in ("_to_copy", "copy_"):
            self.found.copies += 1
        elif name not in ALLOCATIONS | VIEWS and not operator.is_view:
            self.found.made[name] += 1
        return result


def count(call: Callable[[], object]) -> Launches:
    """What a call on "meta" tensors launches and copies."""
    found = Launches()
    make = torch.tensor

    def counted_tensor(data: object, **how: object) -> torch.Tensor:
        result = make(data, **how)
        found.copies += result.device.type == "meta"  # made there at once, out of sight of the operators
        return result

    with (
        recorded_launches() as kernels,
        mock.patch.object(torch, "tensor", counted_tensor),
        _Operators(found),
        torch.no_grad(),  # in inference mode a cast would look like a view
    ):
        call()
    found.made.update(kernel.__name__.removesuffix("_kernel") for kernel, _, _ in kernels)
    return found


def configured(shape: Shape, family: str) -> ModelConfig:
    """A shape of the table as a model's config; the families differ in norm and biases."""
    return ModelConfig(
        family=family,
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.dim,
        vocab_size=shape.vocabulary,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        tied=True,
        qkv_bias=family == "qwen2",
        o_bias=False,
        mlp_bias=False,
        qk_norm=family == "qwen3",
        rope=RopeConfig("default", 1e6),
    )


class Counted:
    """One model on "meta" with its cache, its query buffer and its evictor, and requests in the middle of
    their lives. budget None: a full cache, and no policy."""

    def __init__(
        self, config: ModelConfig, requests: int, cached: int, budget: int | None, policy: str
    ) -> None:
        device, page = torch.device("meta"), 16
        self.settings = settle(policy, budget) if budget else None
        self.model = Decoder(config, torch.bfloat16, device, page)
        self.model.kernels = triton_kernels()
        pages_each = -(-cached // page) + 64
        rows, pages = requests + 1, requests * pages_each + 1
        self.cache = KVCache(config, pages, page, rows, pages_each, torch.bfloat16, device)
        self.queries = QueryBuffer(self.settings, config, rows, torch.bfloat16, device)
        self.evictor = Evictor(self.settings, self.cache, self.queries, self.model.rope, self.model.kernels)
        self.requests = []
        for i in range(requests):
            request = Request(i, [1] * 64, SamplingParams(), 32768, protected=64)
            request.output_token_ids = [1] * cached
            request.num_computed = request.num_tokens - 1
            request.cached_length = cached
            request.pages = list(range(1 + i * pages_each, 1 + (i + 1) * pages_each))
            request.row = i + 1
            request.buffer_count = 16
            self.requests.append(request)

    def step(self) -> None:
        """A decode step of all requests, up to the tokens."""
        self._forward(Plan(self.requests, [1] * len(self.requests), prefill=False))

    def prefill(self, tokens: int) -> None:
        """A step that reads so many prompt tokens of every request, from the prompt's start."""
        for request in self.requests:
            request.prompt_token_ids, request.output_token_ids = [1] * tokens, []
            request.num_computed = request.cached_length = request.buffer_count = 0
            request.protected = tokens
        self._forward(Plan(self.requests, [tokens] * len(self.requests), prefill=True))

    def _forward(self, plan: Plan) -> None:
        batch = Batch.build(plan, self.cache, self.queries)
        hidden = self.model(batch, self.cache, self.queries)
        if plan.prefill:
            hidden = hidden[batch.cu_seqlens[1:] - 1]
        best_tokens(self.model.logits(hidden))

    def evict(self) -> None:
        """All requests evict at once."""
        for request in self.requests:
            request.cached_length = request.protected + self.settings.budget
            request.buffer_count = self.settings.policy.observed
        self.evictor.after_step(self.requests)


def counted(
    shape: Shape, family: str, requests: int, budget: int | None, call: Callable[[Counted], None],
    policy: str = "beacon",
) -> Launches:  # fmt: skip
    """What `call` launches on so many requests of 1,024 cached tokens."""
    subject = Counted(configured(shape, family), requests, 1024, budget, policy)
    return count(partial(call, subject))


def expected(model: str = "qwen3-4b", family: str = "qwen3") -> list[dict]:
    """The paper's rows with what launches cost beside the bytes: each takes LAUNCH seconds and nothing
    overlaps. `of_floor` is the share of the floor's tokens/s that is left."""
    rows = []
    for row in roofline(model)["table4"]:
        batch, budget = row["batch"], row["budget"]
        launches = counted(SHAPES[model], family, batch, budget, Counted.step).total
        a_step = launches
        if budget is not None:
            eviction = counted(SHAPES[model], family, batch, budget, Counted.evict).total
            a_step += eviction * PERIODS / budget
        seconds = batch / row["floor_tokens_per_s"]
        share = seconds / (seconds + a_step * LAUNCH)
        named = {name: row[name] for name in ("gpu", "policy", "budget", "batch", "floor_tokens_per_s")}
        rows.append(
            named
            | {"launches_a_step": round(a_step, 1)}
            | {"expected_tokens_per_s": round(row["floor_tokens_per_s"] * share, 1)}
            | {"of_floor": round(share, 3)}
        )
    return rows


def passes(model: str = "qwen3-4b", family: str = "qwen3") -> list[dict]:
    """Launches and copies of a decode step, a prefill step and an eviction, one row each; `a_layer` is what
    one layer more costs."""
    shape = SHAPES[model]
    one_less = replace(shape, layers=shape.layers - 1)
    cases = [
        ("decode step", 14, None, Counted.step),
        ("decode step", 14, 2048, Counted.step),
        ("decode step", 320, 1024, Counted.step),
        ("prefill step of 16 x 32", 16, None, lambda counted: counted.prefill(32)),
        ("prefill step of 16 x 32", 16, 2048, lambda counted: counted.prefill(32)),
        ("eviction of all", 14, 2048, Counted.evict),
    ]
    rows = []
    for name, requests, budget, call in cases:
        whole = counted(shape, family, requests, budget, call)
        less = counted(one_less, family, requests, budget, call)
        row = {"pass": name, "requests": requests, "budget": budget}
        row |= {"launches": whole.total, "a_layer": whole.total - less.total, "copies": whole.copies}
        most = ", ".join(f"{n} {times}" for n, times in whole.made.most_common(10))
        rows.append(row | {"most": most})
    return rows
