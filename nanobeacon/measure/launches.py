"""How many launches a pass makes, counted without a GPU: the model runs on "meta", where
nothing computes.

A Triton kernel is one launch, and so is every torch operator that is no view and no allocation;
what a GPU's operator does inside itself (a sort is several kernels) is not seen. A tensor made from
Python numbers is a copy to the device. Reading one is impossible on "meta": a pass that waits for
the device fails here.
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
# Operators that are views on every call the engine makes, or whose schema does not say
# that they are
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
    """Sees every operator that torch runs while it is entered, and counts those that
    launch or copy."""

    def __init__(self, found: Launches) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.removeprefix("aten::")
        if not any(tensor.device.type == "meta" for tensor in _tensors_in(result)):
            return result  # the host's own arithmetic
        given = _tensors_in((args, kwargs))
        from_host = any(tensor.device.type == "cpu" and tensor.numel() for tensor in given)
        if from_host and name in ("_to_copy", "copy_"):
            self.found.copies += 1
        elif name not in ALLOCATIONS | VIEWS and not operator.is_view:
            self.found.made[name] += 1
        return result


def _tensors_in(tree: object) -> list[torch.Tensor]:
    """The tensors of nested lists, tuples and dictionaries."""
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def count(call: Callable[[], object]) -> Launches:
    """What a call on "meta" tensors launches and copies."""
    found = Launches()
    make = torch.tensor

    def counted_tensor(data: object, **how: object) -> torch.Tensor:
        result = make(data, **how)
        # made there at once, out of sight of the operators
        found.copies += result.device.type == "meta"
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
    """One model on "meta" with its cache, its query buffer and its evictor, and requests mid-way.

    Every request has a prompt of 64 tokens and `cached` tokens of output. budget None: a full
    cache, and no policy.
    """

    def __init__(
        self, config: ModelConfig, requests: int, cached: int, budget: int | None, policy: str
    ) -> None:
        # 1. The engine's parts, which allocate nothing on "meta"; room for 64 pages more each
        device = torch.device("meta")
        page = 16
        pages_each = -(-cached // page) + 64
        rows = requests + 1  # row 0 and page 0 are nobody's
        pages = requests * pages_each + 1
        self.settings = settle(policy, budget) if budget else None
        self.model = Decoder(config, torch.bfloat16, device, page)
        self.model.kernels = triton_kernels()
        self.cache = KVCache(config, pages, page, rows, pages_each, torch.bfloat16, device)
        self.queries = QueryBuffer(self.settings, config, rows, torch.bfloat16, device)
        self.newest = torch.zeros(rows, dtype=torch.int64, device=device)
        self.evictor = Evictor(self.settings, self.cache, self.queries, self.model.rope, self.model.kernels)

        # 2. The requests, whose newest token is the next one to be fed
        self.requests = []
        for i in range(requests):
            request = Request(i, [1] * 64, SamplingParams(), 32768, protected=64)
            request.output_token_ids = [1] * cached
            request.num_computed = request.num_tokens - 1
            request.cached_length = cached
            first_page = 1 + i * pages_each
            request.pages = list(range(first_page, first_page + pages_each))
            request.row = i + 1
            request.buffer_count = 16
            self.requests.append(request)

    def step(self) -> None:
        """A decode step of all requests, up to the tokens."""
        self._forward(Plan(self.requests, [1] * len(self.requests), prefill=False))

    def prefill(self, tokens: int) -> None:
        """A step that reads so many prompt tokens of every request, from the prompt's start."""
        for request in self.requests:
            request.prompt_token_ids = [1] * tokens
            request.output_token_ids = []
            request.num_computed = 0
            request.cached_length = 0
            request.buffer_count = 0
            request.protected = tokens
        self._forward(Plan(self.requests, [tokens] * len(self.requests), prefill=True))

    def _forward(self, plan: Plan) -> None:
        batch = Batch.build(plan, self.cache, self.queries)
        if not plan.prefill:
            batch = batch.with_unread(self.newest)  # overlap's share, and below
        hidden = self.model(batch, self.cache, self.queries)
        if plan.prefill:
            hidden = hidden[batch.cu_seqlens[1:] - 1]
        tokens = best_tokens(self.model.logits(hidden))
        self.newest.index_copy_(0, batch.rows, tokens.clamp(min=0))

    def evict(self) -> None:
        """All requests evict at once."""
        for request in self.requests:
            request.cached_length = request.protected + self.settings.budget
            request.buffer_count = self.settings.policy.observed
        self.evictor.after_step(self.requests)


def counted(
    shape: Shape,
    family: str,
    requests: int,
    budget: int | None,
    call: Callable[[Counted], None],
    policy: str = "beacon",
) -> Launches:
    """What `call` launches on so many requests of 1,024 cached tokens."""
    subject = Counted(configured(shape, family), requests, 1024, budget, policy)
    return count(partial(call, subject))


def expected(model: str = "qwen3-4b", family: str = "qwen3") -> list[dict]:
    """The paper's rows with what launches cost beside the bytes: each takes LAUNCH seconds and
    nothing overlaps. `of_floor` is the share of the floor's tokens/s that is left."""
    rows = []
    for row in roofline(model)["table4"]:
        batch = row["batch"]
        budget = row["budget"]
        # 1. Launches of a step, and its part of an eviction's, which comes once a period
        launches = counted(SHAPES[model], family, batch, budget, Counted.step).total
        if budget is not None:
            eviction = counted(SHAPES[model], family, batch, budget, Counted.evict).total
            launches += eviction * PERIODS / budget
        # 2. What they add to the shortest time of a step
        shortest = batch / row["floor_tokens_per_s"]  # seconds
        share = shortest / (shortest + launches * LAUNCH)
        rows.append(
            {
                "gpu": row["gpu"],
                "policy": row["policy"],
                "budget": budget,
                "batch": batch,
                "floor_tokens_per_s": row["floor_tokens_per_s"],
                "launches_a_step": round(launches, 1),
                "expected_tokens_per_s": round(row["floor_tokens_per_s"] * share, 1),
                "of_floor": round(share, 3),
            }
        )
    return rows


def passes(model: str = "qwen3-4b", family: str = "qwen3") -> list[dict]:
    """Launches and copies of a decode step, a prefill step and an eviction, one row each; `a_layer`
    is what one layer more costs."""
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
        most = [f"{made} {times}" for made, times in whole.made.most_common(10)]
        rows.append(
            {
                "pass": name,
                "requests": requests,
                "budget": budget,
                "launches": whole.total,
                "a_layer": whole.total - less.total,
                "copies": whole.copies,
                "most": ", ".join(most),
            }
        )
    return rows
