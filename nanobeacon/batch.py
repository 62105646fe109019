"""`Batch`: the tensors of one forward pass, built from the scheduler's plan.

Knows where tokens go: positions by logical lengths, slots and cached lengths by physical ones, only here."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import KVCache, Observation, QueryBuffer
from .pages import one_run
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
        device, page_size = cache.keys.device, cache.page_size
        tokens, positions, rope_lengths, slots, cached, borders = [], [], [], [], [], [0]
        for request, length in zip(plan.requests, plan.lengths, strict=True):
            if request.pages_changed:
                cache.write_page_table(request)
            start, held, prompt = request.num_computed, request.cached_length, len(request.prompt_token_ids)
            tokens += request.tokens(start, start + length)
            positions += range(start, start + length)
            rope_lengths += [max(prompt, p + 1) for p in range(start, start + length)]
            pages = request.pages
            slots += [pages[s // page_size] * page_size + s % page_size for s in range(held, held + length)]
            cached.append(held + length)
            borders.append(len(tokens))
        longest, runs = max(cached), None
        if device.type == "cpu":
            runs = [r.pages[0] * page_size if one_run(r.pages) else None for r in plan.requests]
        rows = torch.tensor([r.row for r in plan.requests], device=device)

        def whole(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return Batch(
            token_ids=whole(tokens), positions=whole(positions), rope_lengths=whole(rope_lengths),
            slots=whole(slots), cached_lengths=whole(cached, torch.int32),
            cu_seqlens=whole(borders, torch.int32), max_query_length=max(plan.lengths),
            page_table=cache.page_table[rows, : -(-longest // page_size)], max_cached_length=longest,
            runs=runs, observation=queries.plan(plan),
        )  # fmt: skip
