"""`Batch`: the tensors of one forward pass, built from the scheduler's plan.

Knows where tokens go: positions by logical lengths, slots and cached lengths by physical ones, only here."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import KVCache, QueryBuffer
from .observation import Observation
from .pages import one_run
from .request import Request, SamplingParams
from .scheduler import Plan


@dataclass(frozen=True)
class Batch:
    """T tokens of R requests, packed. Host-side integers beside the tensors are upper bounds or layouts."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], logical
    rope_lengths: Tensor  # int64 [T]: sequence length that decides a dynamic RoPE's base
    slots: Tensor  # int64 [T], flat: page * P + offset
    cached_lengths: Tensor  # int32 [R], this step's tokens included
    cu_seqlens: Tensor  # int32 [R + 1]
    page_table: Tensor  # int32 [R, pages of the longest]
    max_query_length: int
    max_cached_length: int
    runs: list[int | None] | None  # first slot of each request whose pages are one run; CPU only
    observation: Observation

    @staticmethod
    def build(plan: Plan, cache: KVCache, queries: QueryBuffer) -> "Batch":
        """The tensors of a plan, on the cache's device; page tables that have changed are written first."""
        device = cache.keys.device
        page_size = cache.page_size
        token_ids: list[int] = []
        positions: list[int] = []
        rope_lengths: list[int] = []
        slots: list[int] = []
        cached_lengths: list[int] = []
        cu_seqlens = [0]
        for request, length in zip(plan.requests, plan.lengths, strict=True):
            if request.pages_changed:
                cache.write_page_table(request)
            # 1. Logical: which tokens, at which positions.
            start = request.num_computed
            new_positions = range(start, start + length)
            prompt = len(request.prompt_token_ids)
            token_ids += request.tokens(start, start + length)
            positions += new_positions
            rope_lengths += [max(prompt, position + 1) for position in new_positions]
            # 2. Physical: into which slots, behind what is cached.
            held = request.cached_length
            pages = request.pages
            slots += [pages[s // page_size] * page_size + s % page_size for s in range(held, held + length)]
            cached_lengths.append(held + length)
            cu_seqlens.append(len(token_ids))

        def whole(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        longest = max(cached_lengths)
        rows = torch.tensor([r.row for r in plan.requests], device=device)
        return Batch(
            token_ids=whole(token_ids),
            positions=whole(positions),
            rope_lengths=whole(rope_lengths),
            slots=whole(slots),
            cached_lengths=whole(cached_lengths, torch.int32),
            cu_seqlens=whole(cu_seqlens, torch.int32),
            page_table=cache.page_table[rows, : -(-longest // page_size)],
            max_query_length=max(plan.lengths),
            max_cached_length=longest,
            runs=_runs(plan, page_size) if device.type == "cpu" else None,
            observation=queries.plan(plan),
        )


def _runs(plan: Plan, page_size: int) -> list[int | None]:
    """For a CPU, which reads pages that lie behind each other as a view, without a gather: the first slot of
    each such request, None for the others."""
    return [r.pages[0] * page_size if one_run(r.pages) else None for r in plan.requests]


def padding_request(tokens: int, page_size: int, cached: int = 0) -> Request:
    """Nobody's request: it reads so many tokens behind so many cached ones, all on the scratch page and in
    the scratch row, where nobody looks. It fills up a batch, and warms kernels up."""
    total = cached + tokens
    request = Request(0, [0] * total, SamplingParams(), max_tokens=1, protected=1)
    request.pages = [0] * -(-total // page_size)
    request.num_computed = cached
    request.cached_length = cached
    return request
