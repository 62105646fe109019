"""Who runs next: admission, prefill chunks, decode rows, preemption, abort. Pure Python.

Knows counts and pages, never tensors, tokens' values or text. A request alone decides where it is
cut: its neighbours change when its chunks are read, never which tokens a chunk has.

A request waits in a queue until it has a seat (a row of page table and query buffer) and pages.
Then its prompt is read in chunks (prefill), then it takes a token a step (decode). Under a budget
it gets all the pages it can ever need at once, and nothing takes them away. Without one it grows
page by page, and where none is left the newest request gives up its own and begins again later."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from .pages import PagePool
from .prefix import Found, PrefixCache
from .request import Request

log = logging.getLogger("nanobeacon")

MOST_PREFILL_TOKENS = 2048  # of one step, unless one chunk is longer


@dataclass(frozen=True)
class Plan:
    """The rows of one forward pass: each request and how many of its next tokens it computes.

    prefill: the tokens are of prompts; else each is fed to have the one behind it sampled."""

    requests: list[Request]
    lengths: list[int]
    prefill: bool

    @cached_property
    def one_each(self) -> bool:
        """Whether this is the common decode step, which feeds one token of each request."""
        return not self.prefill and max(self.lengths) == 1

    def part(self, first: int, end: int) -> "Plan":
        """The same for the requests [first, end), without those that have ended in the meantime."""
        requests = []
        lengths = []
        for request, length in zip(self.requests[first:end], self.lengths[first:end], strict=True):
            if request.finish_reason is None:
                requests.append(request)
                lengths.append(length)
        return Plan(requests, lengths, self.prefill)

    def takers(self) -> list[tuple[Request, int]]:
        """Once computed: who gets an output token, and which token of the batch it follows: the
        last of a prompt that has been read, each one of a decode step."""
        # 1. The common decode step: each of its tokens has one answer.
        if self.one_each:
            return list(zip(self.requests, range(len(self.requests)), strict=True))
        # 2. Prompts, and given outputs.
        takers = []
        first = 0
        for request, length in zip(self.requests, self.lengths, strict=True):
            end = first + length
            if not self.prefill:
                takers += [(request, token) for token in range(first, end)]
            elif request.num_computed >= request.num_tokens:
                takers.append((request, end - 1))
            first = end
        return takers


class Scheduler:
    """Requests in arrival order, `max_num_seqs` seats, one pool.

    page_size, chunk (of a prompt), budget and max_prefill_tokens (of one step) count tokens.
    budget None: caches grow with the output. prefix: where known beginnings of prompts are found;
    None: nowhere."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        max_num_seqs: int,
        chunk: int,
        budget: int | None = None,
        max_prefill_tokens: int = MOST_PREFILL_TOKENS,
        prefix: PrefixCache | None = None,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.chunk = chunk
        self.budget = budget
        # a step can always take one whole chunk
        self.max_prefill_tokens = max(chunk, max_prefill_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.prefix = prefix
        self.preemptions = 0
        self.prefix_tokens = 0  # that were found instead of computed
        self._rows = range(max_num_seqs, 0, -1)  # row 0 is nobody's
        self.free_rows = list(self._rows)  # the next one is taken from the end
        self._stretch = (pool.num_pages - 1) // max_num_seqs  # pages of the pool for each seat
        self._decode_next = False  # whether the last step was a prefill step

    def tokens_held(self, request: Request) -> int:
        """The most slots the request can ever hold; the last token it samples is never fed."""
        total = len(request.prompt_token_ids) + request.max_tokens - 1
        if self.budget is None:
            return total
        return min(total, request.protected + self.budget)

    def fits(self, request: Request) -> bool:
        """Whether the pool, empty, could serve it: else it would wait for ever. Page 0 is
        scratch."""
        return self._pages_for(self.tokens_held(request)) <= self.pool.num_pages - 1

    def add(self, request: Request) -> None:
        """Queue a request behind those that wait."""
        assert self.fits(request), "the engine refuses what can never fit"
        self.waiting.append(request)

    def plan(self, ahead: Callable[[Request], int] = lambda request: 1) -> Plan | None:
        """The next forward pass, or None when nobody waits or runs. Prefill and decode
        steps take turns.

        `ahead` says how many tokens a request with a given output may feed at once."""
        # 1. Whoever finds a seat and pages begins to run.
        self._admit()
        # 2. After a prefill step comes a decode step, if anybody decodes: neither starves.
        decoders = [r for r in self.running if r.decodes]
        plan = None
        prompts_left = len(decoders) < len(self.running)
        decoders_turn = self._decode_next and len(decoders) > 0
        if prompts_left and not decoders_turn:
            plan = self._plan_prefill()
        # 3. No prompt is left to read, or it is the decoders' turn.
        if plan is None:
            plan = self._plan_decode(decoders, ahead)
        self._decode_next = plan is not None and plan.prefill
        return plan

    def may_preempt(self) -> bool:
        """Whether the next decode step could take somebody's pages away: more of those that decode
        are at the end of theirs than there are pages."""
        if self.budget is not None or self.pool.available >= len(self.running):
            return False
        decoders = [r for r in self.running if r.decodes]
        at_end = sum(r.cached_length == len(r.pages) * self.page_size for r in decoders)
        return at_end > self.pool.available

    def finish(self, request: Request) -> None:
        """Forget a request, wherever it is; its pages and its row are free again."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def next_chunk(self, request: Request) -> int:
        """Tokens of the next prefill chunk: up to a multiple of `chunk`, not past the budget, where
        an eviction comes first (METHOD.md)."""
        done = request.num_computed
        left = request.num_tokens - done
        to_border = self.chunk - done % self.chunk
        length = min(left, to_border)
        if self.budget is None:
            return length
        return min(length, self.budget - request.evictable)

    def _pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def _admit(self) -> None:
        """First come, first served: the head of the queue waits until its pages and a
        seat are there."""
        while self.waiting and self.free_rows:
            request = self.waiting[0]
            # 1. What need not be computed? Another completion of the same prompt may read it for
            #    both: the full protected pages, which no eviction touches, are shared. Else
            #    whatever is known of it. (Completions arrive together, before any page of their
            #    prompt is known, and a prompt shorter than a border never is: the prefix cache
            #    cannot take the leader's place.)
            leader = self._leader_of(request)
            found = Found()
            if leader is None and self.prefix is not None:
                found = self.prefix.find(request)
            if leader is not None:
                shared = leader.pages[: self._full_protected_pages(request)]
            else:
                shared = found.pages
            # 2. Are there pages enough for the rest?
            wanted = self._pages_for(self._tokens_at_first(request)) - len(shared)
            if not self._has_room(wanted, shared):
                return
            # 3. Take the seat, with its row, and the pages.
            request.row = self.free_rows.pop()
            request.leader = leader
            self.pool.share(shared)
            behind_shared = self._place(request.row) + len(shared)
            own = self._allocate(wanted, at=behind_shared)
            request.pages = shared + own
            request.pages_sent = 0
            self._begin_behind(request, found)
            # 4. First into this list: whoever stands in both begins again after a fault.
            self.running.append(request)
            self.waiting.popleft()

    def _has_room(self, wanted: int, shared: list[int]) -> bool:
        """Whether a request can have `wanted` pages beside those that it shares."""
        # Idle pages are available, but not those that this request wakes.
        woken = sum(page in self.pool.idle for page in shared)
        # Those who grow will want one soon: without these spare ones an admission would be
        # preempted at once.
        spare = len(self.running) if self.budget is None else 0
        return wanted + woken + spare <= self.pool.available

    def _allocate(self, count: int, at: int) -> list[int] | None:
        """Pages of the pool, from `at` on if these are free; idle ones give way where too
        few are free."""
        if self.prefix is not None:
            self.prefix.make_room(count)
        return self.pool.allocate(count, at=at)

    def _begin_behind(self, request: Request, found: Found) -> None:
        """What was found stands as if the request had computed it; its first chunk begins there."""
        tokens = len(found.pages) * self.page_size
        request.num_computed = tokens
        request.cached_length = tokens
        request.found_row = found.row
        request.buffer_count = found.row_count
        self.prefix_tokens += tokens

    def _leader_of(self, request: Request) -> Request | None:
        """The completion of the same prompt whose prefill lies ahead: the first of them runs
        it for all."""
        for other in self.running:
            if other.arrival == request.arrival and not other.num_output:
                return other
        return None

    def _full_protected_pages(self, request: Request) -> int:
        """Pages that hold protected prompt tokens and nothing else: those that may be shared."""
        return min(request.protected, len(request.prompt_token_ids)) // self.page_size

    def _tokens_at_first(self, request: Request) -> int:
        """Slots it gets when it is admitted: its worst case under a budget, else up to
        one new token."""
        most = self.tokens_held(request)
        if self.budget is not None:
            return most
        return min(request.num_tokens + 1, most)

    def _place(self, row: int) -> int:
        """The first page of a seat's own stretch of the pool.

        A request that grows stays one run of pages while it fits there, which a CPU reads without a
        copy; elsewhere any page is as good."""
        return 1 + (row - 1) * self._stretch

    def _plan_prefill(self) -> Plan | None:
        """The next chunk of each prompt, oldest first, as many whole ones as a step may take."""
        requests: list[Request] = []
        lengths: list[int] = []
        room = self.max_prefill_tokens
        for request in self.running:
            # 1. Whose prompt is left to read, and is not read by a leader?
            if request.decodes or request.leader is not None:
                continue
            # 2. Its next chunk, whole: a neighbour does not change where it is cut.
            self._look_again(request)
            length = self.next_chunk(request)
            # 3. Chunks until the step is full. One always goes, or nobody ever would.
            if requests and length > room:
                break
            requests.append(request)
            lengths.append(length)
            room -= length
        return Plan(requests, lengths, prefill=True) if requests else None

    def _look_again(self, request: Request) -> None:
        """Take over, before the first chunk, what a neighbour has read of the same beginning since
        this request was admitted; its own pages for that are given back."""
        if self.prefix is None or request.num_computed > 0:
            return
        if any(other.leader is request for other in self.running):
            return  # these pages are its followers' too
        found = self.prefix.find(request)
        count = len(found.pages)
        replaced = request.pages[:count]
        kept = request.pages[count:]
        self.pool.share(found.pages)
        self.pool.release(reversed(replaced))
        request.pages = found.pages + kept
        request.pages_sent = 0
        self._begin_behind(request, found)

    def _plan_decode(self, decoders: list[Request], ahead: Callable[[Request], int]) -> Plan | None:
        """One token for each, or what a given output allows, oldest first."""
        requests: list[Request] = []
        lengths: list[int] = []
        page_size = self.page_size
        for request in decoders:
            # 1. How many tokens: one is sampled at a time, given ones go up to what is due next.
            length = 1
            if request.forced:
                length = min(request.num_given, ahead(request))
            # 2. Room for them; the newest request gives up its pages where none is left, maybe
            #    this one.
            tokens = request.cached_length + length
            if tokens > len(request.pages) * page_size:
                self._grow(request, tokens)
            still_running = request.row != 0
            if still_running:
                requests.append(request)
                lengths.append(length)
        # 3. Where nobody decodes any more, a prompt may be left to read.
        if not requests:
            return self._plan_prefill()
        return Plan(requests, lengths, prefill=False)

    def _grow(self, request: Request, tokens: int) -> None:
        """Pages for so many tokens, one by one, as long as the request has not been
        preempted itself.

        Row 0 is nobody's: a request that has it has lost its seat."""
        while request.row and tokens > len(request.pages) * self.page_size:
            page = self._allocate(1, at=request.pages[-1] + 1)
            if page is not None:
                request.pages = request.pages + page
            else:
                self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; its keys and values are computed again later."""
        assert self.budget is None, "an evicted cache cannot be recomputed"
        self.preemptions += 1
        self._put_back(request)

    def _put_back(self, request: Request) -> None:
        """To the head of the queue, to begin again."""
        self.waiting.appendleft(request)  # first here, as in `_admit`
        self.running.remove(request)
        self._release(request)
        _forget_progress(request)

    def _release(self, request: Request) -> None:
        """Take a request's seat and pages away."""
        # so that idle pages are forgotten from the last one on
        self.pool.release(reversed(request.pages))
        self.free_rows.append(request.row)
        _take_holdings(request)
        # Whoever has taken the prompt over already needs nobody to read it.
        followers = [r for r in self.running if r.leader is request and not r.num_computed]
        if followers:
            self._lead_anew(followers)

    def _lead_anew(self, followers: list[Request]) -> None:
        """The first of those who waited for a prefill takes it over.

        It reads on the pages that they share, behind what is known of these; what is computed again
        there has the same tokens."""
        first = followers[0]
        first.leader = None
        for follower in followers[1:]:
            follower.leader = first
        if self.prefix is not None:
            known = self.prefix.find_among(first, first.pages)
            self._begin_behind(first, known)

    # --------------------------------------------------------------------------- after faults

    def try_fewer(self, plan: Plan) -> None:
        """Make the next prefill steps smaller than this one, which memory did not suffice for.

        Its prompts, and the completions that wait for them, begin again (nothing of them has been
        answered), and from now on a step reads at most half as many tokens. A plan of one request
        only sends its followers back."""
        several = len(plan.requests) > 1
        # From the end, so that they keep their order in the queue.
        for request in reversed(self.running):
            follows = request.leader in plan.requests
            if follows or (several and request in plan.requests):
                self._put_back(request)
        if several:
            self.max_prefill_tokens = sum(plan.lengths) // 2
            log.warning("memory ran out: prefill steps of %d tokens at most", self.max_prefill_tokens)

    def put_right(self) -> None:
        """After an exception that may have come at any line: queue, seats, pages and prefix cache
        follow anew from the requests.

        Those that ended are forgotten. Those that decode go on: only a step changes what they have
        cached. The others begin again, which costs them nothing but time."""
        # 1. Who goes on, who begins again. Whoever was on the way between both lists begins again.
        queued = [r for r in self.waiting if r.finish_reason is None]
        seated = [r for r in self.running if r.finish_reason is None and r not in queued]
        going_on = [r for r in seated if r.decodes]
        again = [r for r in seated if not r.decodes] + queued
        self.waiting = deque(again)
        self.running = going_on
        for request in again:
            _take_holdings(request)
            _forget_progress(request)
        # 2. What they hold is taken, all else is free.
        taken = {request.row for request in going_on}
        self.free_rows = [row for row in self._rows if row not in taken]
        kept = self.prefix.restore() if self.prefix is not None else ()
        self.pool.restore([request.pages for request in going_on], kept)

    def check(self) -> None:
        """Prove pool, prefix cache and seats against the requests; AssertionError where
        they disagree."""
        # 1. Every page and every row has one place.
        self.pool.check(r.pages for r in self.running)
        if self.prefix is not None:
            self.prefix.check()
        rows = [*self.free_rows, *(r.row for r in self.running)]
        assert sorted(rows) == sorted(self._rows), "a row has two owners or is lost"
        # 2. Nobody has more cached than its pages, or its budget, allow.
        housed = all(r.cached_length <= len(r.pages) * self.page_size for r in self.running)
        assert housed, "slots without pages"
        assert not any(r.pages or r.row for r in self.waiting), "a waiting request holds something"
        if self.budget is not None:
            within = all(r.cached_length <= r.protected + self.budget for r in self.running)
            assert within, "more is cached than the budget allows"


def _take_holdings(request: Request) -> None:
    """From now on a request has no seat and no pages, and nobody runs its prompt for it."""
    request.pages = []
    request.pages_sent = 0
    request.row = 0
    request.buffer_count = 0
    request.found_row = 0
    request.prefix_node = None
    request.pages_inserted = 0
    request.leader = None


def _forget_progress(request: Request) -> None:
    """Its tokens are all that it has: keys and values are computed again, and evicted
    from again."""
    request.num_computed = 0
    request.cached_length = 0
    request.trace = []
    request.kept_scores = None
