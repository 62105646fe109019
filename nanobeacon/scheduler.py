"""Who runs next: admission, prefill chunks, decode rows, preemption, abort. Pure Python.

Knows counts and pages, never tensors, tokens' values or text. A request alone decides where it is cut."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .pages import PagePool
from .request import Request


@dataclass(frozen=True)
class Plan:
    """The rows of one forward pass: each request and how many of its next tokens it computes."""

    requests: list[Request]
    lengths: list[int]
    prefill: bool

    @property
    def one_each(self) -> bool:
        """Whether this is the common decode step, which feeds one token of each request."""
        return not self.prefill and max(self.lengths) == 1

    def ready(self) -> dict[Request, range]:
        """Once computed: who gets output tokens, and the tokens of the batch that these follow, the last of
        a prompt, each one of a decode step."""
        ready, first = {}, 0
        for request, length in zip(self.requests, self.lengths, strict=True):
            end = first + length
            if request.num_computed >= request.num_tokens:
                ready[request] = range(end - 1 if self.prefill else first, end)
            first = end
        return ready


class Scheduler:
    """Requests in arrival order, `max_num_seqs` seats, one pool. budget None: caches grow with the output.
    `ahead` says how many tokens a request with a given output may feed at once."""

    def __init__(
        self, pool: PagePool, page_size: int, max_num_seqs: int, chunk: int, budget: int | None = None,
        max_prefill_tokens: int = 2048, ahead: Callable[[Request], int] = lambda request: 1,
    ) -> None:  # fmt: skip
        self.pool, self.page_size, self.chunk, self.budget = pool, page_size, chunk, budget
        self.ahead = ahead
        self.max_prefill_tokens = max(chunk, max_prefill_tokens)  # a step can always take one whole chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.preemptions = 0
        self._rows = list(range(max_num_seqs, 0, -1))
        self._stretch = (pool.num_pages - 1) // max_num_seqs
        self._decode_next = False

    def tokens_held(self, request: Request) -> int:
        """The most slots the request can ever hold; the last token it samples is never fed."""
        total = len(request.prompt_token_ids) + request.max_tokens - 1
        return total if self.budget is None else min(total, request.protected + self.budget)

    def fits(self, request: Request) -> bool:
        """Whether the pool, empty, could serve it: else it would wait for ever."""
        return self._pages_for(self.tokens_held(request)) <= self.pool.num_pages - 1

    def add(self, request: Request) -> None:
        assert self.fits(request), "the engine refuses what can never fit"
        self.waiting.append(request)

    def plan(self) -> Plan | None:
        """The next forward pass, or None when nobody waits or runs. Prefill and decode steps take turns."""
        self._admit()
        decoders = [r for r in self.running if r.decodes]
        plan = None if self._decode_next and decoders else self._plan_prefill()
        plan = plan or self._plan_decode(decoders)
        self._decode_next = plan is not None and plan.prefill
        return plan

    def finish(self, request: Request) -> None:
        """Forget a request, wherever it is; its pages and its row are free again."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def next_chunk(self, request: Request) -> int:
        """Tokens of the next prefill chunk: up to a multiple of `chunk`, not past the budget (section 3)."""
        done = request.num_computed
        length = min(request.num_tokens - done, self.chunk - done % self.chunk)
        return length if self.budget is None else min(length, self.budget - request.evictable)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _admit(self) -> None:
        """First come, first served: the head of the queue waits until its pages and a seat are there."""
        while self.waiting and self._rows:
            request = self.waiting[0]
            # A completion of the same prompt whose prefill lies ahead: the first of them runs it for all.
            same = (r for r in self.running if r.arrival == request.arrival and not r.output_token_ids)
            leader = next(same, None)
            alike = min(request.protected, len(request.prompt_token_ids)) // self.page_size
            shared = leader.pages[:alike] if leader else []
            tokens = request.num_tokens + 1 if self.budget is None else self.tokens_held(request)
            wanted = self._pages_for(min(tokens, self.tokens_held(request))) - len(shared)
            # Pages that those who grow will want soon: without them an admission would be preempted at once.
            spare = len(self.running) if self.budget is None else 0
            if wanted + spare > self.pool.free_count:
                return
            request.row, request.leader = self._rows.pop(), leader
            # Each seat has its own stretch of the pool: a growing request stays one run while it fits there.
            first = 1 + (request.row - 1) * self._stretch + len(shared)
            self.pool.share(shared)
            request.pages = shared + self.pool.allocate(wanted, at=first)
            request.pages_changed = True
            self.running.append(self.waiting.popleft())

    def _plan_prefill(self) -> Plan | None:
        requests = [r for r in self.running if not r.decodes and r.leader is None]
        lengths = [self.next_chunk(request) for request in requests]
        while sum(lengths) > self.max_prefill_tokens:
            lengths.pop()
        return Plan(requests[: len(lengths)], lengths, True) if lengths else None

    def _plan_decode(self, decoders: list[Request]) -> Plan | None:
        """One token for each, or what a given output allows, oldest first; whoever needs a page when none is
        left preempts the newest."""
        ready, lengths = [], []
        for request in decoders:
            length = min(request.num_given, self.ahead(request)) if request.forced else 1
            while request.row and request.cached_length + length > len(request.pages) * self.page_size:
                if page := self.pool.allocate(1, at=request.pages[-1] + 1):
                    request.pages, request.pages_changed = [*request.pages, *page], True
                else:
                    self._preempt(self.running[-1])
            if request.row:
                ready.append(request)
                lengths.append(length)
        return Plan(ready, lengths, False) if ready else self._plan_prefill()

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; its keys and values are computed again later."""
        assert self.budget is None, "an evicted cache cannot be recomputed"
        self.preemptions += 1
        self.running.remove(request)
        self._release(request)
        request.num_computed = request.cached_length = 0
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.pages)
        self._rows.append(request.row)
        request.pages, request.row, request.buffer_count = [], 0, 0
        followers = [r for r in self.running if r.leader is request]
        for follower in followers:  # the first of them takes over the prefill, on the pages they share
            follower.leader = followers[0] if follower is not followers[0] else None
        request.leader = None
