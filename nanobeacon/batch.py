"""`Batch`: the tensors of one forward pass, built from the scheduler's plan.

Knows where tokens go: positions by logical lengths, slots and cached lengths by physical ones, only
here. All numbers of a step are gathered in columns on the host and reach the device in one copy.
Knows nothing of weights, of what attention does with these numbers, or of who was chosen and why.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .cache import KVCache, QueryBuffer
from .observation import Columns, Observation
from .pages import one_run
from .request import Request, SamplingParams
from .scheduler import Plan
from .staging import send

# columns that kernels want as int32; the others are int64, torch's type of an index
INT32 = ("cached_lengths", "cu_seqlens", "new_pages", "chunk_table")
UNREAD = -1  # in the place of a token that the device has sampled and the host has not read


@dataclass(frozen=True)
class Batch:
    """T tokens of R requests, packed. Host-side integers beside the tensors are upper bounds or layouts."""

    token_ids: Tensor  # int64 [T]; UNREAD until `with_unread`
    positions: Tensor  # int64 [T], logical
    rope_lengths: Tensor  # int64 [T]: sequence length that decides a dynamic RoPE's base
    slots: Tensor  # int64 [T], flat: page * P + offset
    cached_lengths: Tensor  # int32 [R], this step's tokens included
    cu_seqlens: Tensor  # int32 [R + 1]
    rows: Tensor  # int64 [R]: their lines of the cache's page table
    max_query_length: int
    max_cached_length: int
    # first slot of each request whose pages are one run, None for the others; CPU only
    runs: list[int | None] | None
    observation: Observation

    @staticmethod
    def build(plan: Plan, cache: KVCache, queries: QueryBuffer, onto: Tensor | None = None) -> "Batch":
        """The tensors of a plan, on the cache's device; the page table learns of new pages.

        onto: where on the device the numbers go, int64; None: to a place of their own."""
        requests = plan.requests
        device = cache.keys.device
        # 1. Tokens: what they are, and where they go.
        if plan.one_each:
            columns = _one_token_each(plan, cache.page_size)
        else:
            columns = _tokens(plan, cache.page_size)
        # 2. Requests: how much they have cached once this is stored, and who they are.
        cached_lengths = []
        for request, length in zip(requests, plan.lengths, strict=True):
            cached_lengths.append(request.cached_length + length)
        columns["cached_lengths"] = cached_lengths
        columns["rows"] = [request.row for request in requests]
        # 3. Queries: which of them stay.
        chunks, observed = queries.plan(plan)
        columns.update(observed)
        # 4. New pages. They come last: the lengths of all columns before follow from the plan's, so
        #    that a recorded step finds these at the same places each time.
        grown = [request for request in requests if request.pages_sent != len(request.pages)]
        columns.update(_new_pages(grown, cache.page_table.shape[1]))
        # 5. One copy, and the new pages from there into the page table.
        sent = send(columns, device, INT32, onto)
        _into_page_table(grown, sent, cache)
        runs = None
        if device.type == "cpu":
            runs = _runs(requests, cache.page_size)
        return Batch(
            token_ids=sent["token_ids"],
            positions=sent["positions"],
            rope_lengths=sent["rope_lengths"],
            slots=sent["slots"],
            cached_lengths=sent["cached_lengths"],
            cu_seqlens=sent["cu_seqlens"],
            rows=sent["rows"],
            max_query_length=max(plan.lengths),
            max_cached_length=max(cached_lengths),
            runs=runs,
            observation=Observation.of(chunks, sent),
        )

    def with_unread(self, newest: Tensor) -> "Batch":
        """The same for a step of one token each, with those that the host does not know.

        newest: int64 [rows], the token sampled last for each row of the page table."""
        token_ids = torch.where(self.token_ids == UNREAD, newest[self.rows], self.token_ids)
        return replace(self, token_ids=token_ids)


def _one_token_each(plan: Plan, page_size: int) -> Columns:
    """The columns of tokens in the common decode step, one column at a time.

    `_tokens` gives the same, one request at a time, and takes three times as long."""
    requests = plan.requests
    # 1. Logical: the last token, at the next position, which lies behind the prompt.
    positions = [request.num_computed for request in requests]
    token_ids = [UNREAD if r.num_unread else r.token(r.num_computed) for r in requests]
    # 2. Physical: into the slot behind what is cached.
    cached = [request.cached_length for request in requests]
    pages = [request.pages[length // page_size] for request, length in zip(requests, cached, strict=True)]
    slots = [page * page_size + length % page_size for page, length in zip(pages, cached, strict=True)]
    return {
        "token_ids": token_ids,
        "positions": positions,
        "rope_lengths": [position + 1 for position in positions],
        "slots": slots,
        "cu_seqlens": list(range(len(requests) + 1)),
    }


def _tokens(plan: Plan, page_size: int) -> Columns:
    """The columns of tokens where requests compute several: prompts, and given outputs."""
    token_ids: list[int] = []
    positions: list[int] = []
    rope_lengths: list[int] = []
    slots: list[int] = []
    cu_seqlens = [0]
    for request, length in zip(plan.requests, plan.lengths, strict=True):
        # 1. Logical: which tokens, at which positions.
        start = request.num_computed
        new_positions = range(start, start + length)
        token_ids += request.tokens(start, start + length)
        positions += new_positions
        # A prompt counts as a whole for a dynamic RoPE, whichever chunk of it is read.
        prompt = len(request.prompt_token_ids)
        rope_lengths += [max(prompt, position + 1) for position in new_positions]
        # 2. Physical: into which slots, behind what is cached.
        held = request.cached_length
        for cached in range(held, held + length):
            page, offset = divmod(cached, page_size)
            slots.append(request.pages[page] * page_size + offset)
        cu_seqlens.append(len(token_ids))
    return {
        "token_ids": token_ids,
        "positions": positions,
        "rope_lengths": rope_lengths,
        "slots": slots,
        "cu_seqlens": cu_seqlens,
    }


def _new_pages(requests: list[Request], table_width: int) -> Columns:
    """Pages that the device's page table does not know yet, and their places in it, flat."""
    places: list[int] = []
    pages: list[int] = []
    for request in requests:
        first = request.row * table_width
        places += range(first + request.pages_sent, first + len(request.pages))
        pages += request.pages[request.pages_sent :]
    return {"page_places": places, "new_pages": pages}


def _into_page_table(requests: list[Request], sent: dict[str, Tensor], cache: KVCache) -> None:
    """Write what `_new_pages` gathered of these requests, and remember that it is known now."""
    if not requests:
        return
    cache.page_table.view(-1)[sent["page_places"]] = sent["new_pages"]
    for request in requests:
        request.pages_sent = len(request.pages)
        request.one_run = one_run(request.pages)


def write_pages(requests: list[Request], cache: KVCache) -> None:
    """Let the page table learn of the pages of requests that are in no batch."""
    columns = _new_pages(requests, cache.page_table.shape[1])
    sent = send(columns, cache.keys.device, INT32)
    _into_page_table(requests, sent, cache)


def _runs(requests: list[Request], page_size: int) -> list[int | None]:
    """For a CPU, which reads pages that lie behind each other as a view, without a gather: the first
    slot of each such request, None for the others."""
    runs: list[int | None] = []
    for request in requests:
        first_slot = request.pages[0] * page_size if request.one_run else None
        runs.append(first_slot)
    return runs


def padding_request(tokens: int, page_size: int, cached: int = 0) -> Request:
    """Nobody's request, which fills up a batch and warms kernels up.

    It reads so many tokens behind a prompt of so many cached ones, all on the scratch page and in
    the scratch row, where nobody looks."""
    request = Request(0, [0] * cached, SamplingParams(), max_tokens=1, protected=1)
    request.output_token_ids = [0] * tokens
    request.pages = [0] * -(-(cached + tokens) // page_size)
    request.pages_sent = len(request.pages)
    request.num_computed = cached
    request.cached_length = cached
    return request
