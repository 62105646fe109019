"""Scheduler and pool under a pretended engine: random requests, aborts and small pools. No torch, no model.

The pretended cache is a list of slots that hold (position, token), written and read through the requests'
pages; the next token is a hash of everything that is read. So a slot that is lost, shared wrongly or
overwritten changes what comes out, and the output of every request must equal that of `alone`, which knows no
pages and no neighbours.
"""

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from proofs import prove

from nanobeacon.pages import PagePool, one_run
from nanobeacon.request import Request, SamplingParams
from nanobeacon.scheduler import Plan, Scheduler

VOCABULARY = 13
STOP, EOS = 0, 1
Slot = tuple[int, int]  # (position, token)


@dataclass(frozen=True)
class Setup:
    """An engine's sizes. pages: what the pool can give out; protect: "prompt" or the first n tokens."""

    page_size: int = 4
    chunk: int = 8
    seats: int = 3
    pages: int = 64
    budget: int | None = None
    protect: str | int = "prompt"
    max_prefill_tokens: int = 2048

    def protected(self, prompt: int) -> int:
        return prompt if self.budget is None or self.protect == "prompt" else self.protect

    @property
    def kept(self) -> int:
        return self.budget - max(1, self.budget // 8)


@dataclass(frozen=True)
class Ask:
    """One prompt, and when it arrives (in steps)."""

    prompt: int
    max_tokens: int
    n: int = 1
    stops: bool = False
    ignore_eos: bool = True
    arrives: int = 0


def prompt_ids(arrival: int, length: int) -> list[int]:
    return [hash((arrival, i)) % VOCABULARY for i in range(length)]


def next_token(seen: list[Slot], completion: int) -> int:
    """What the pretended model samples after reading `seen`: every slot and their order count."""
    return hash((tuple(seen), completion)) % VOCABULARY


def survivors(evictable: list[Slot], kept: int) -> list[Slot]:
    """The pretended policy: any `kept` of the evictable slots, in ascending order of position."""
    return sorted(sorted(evictable, key=lambda slot: (hash((*slot, "rank")), slot))[:kept])


@cache
def borders(total: int, protected: int, setup: Setup) -> list[tuple[int, int]]:
    """(first position, length) of the prefill chunks of a request: from its own numbers alone."""
    chunks, start, cached = [], 0, 0
    while start < total:
        length = min(setup.chunk - start % setup.chunk, total - start)
        if setup.budget is not None:
            length = min(length, protected + setup.budget - cached)
        chunks.append((start, length))
        start, cached = start + length, cached + length
        if setup.budget is not None and cached == protected + setup.budget:
            cached = protected + setup.kept
    return chunks


def alone(request: Request, setup: Setup) -> tuple[list[int], str]:
    """Output tokens and finish reason of a request that nobody disturbs: plain lists, no pages."""
    tokens, output, cache = list(request.prompt_token_ids), [], []
    chunks = iter(borders(len(tokens), request.protected, setup))
    computed = 0
    while True:
        length = next(chunks)[1] if computed < len(request.prompt_token_ids) else 1
        cache += [(p, tokens[p]) for p in range(computed, computed + length)]
        computed += length
        if computed == len(tokens):
            token = next_token(cache, request.completion)
            tokens.append(token)
            output.append(token)
            if token in request.params.stop_token_ids:
                return output, "stop"
            if token in request.eos_token_ids and not request.params.ignore_eos:
                return output, "stop"
            if len(output) == request.max_tokens:
                return output, "length"
        if setup.budget is not None and len(cache) == request.protected + setup.budget:
            cache[request.protected :] = survivors(cache[request.protected :], setup.kept)


@dataclass(eq=False)
class PretendedEngine:
    """Engine.step without tensors, with every promise of the scheduler checked around each step."""

    setup: Setup
    requests: list[Request] = field(default_factory=list)  # in order of arrival
    seen: Counter = field(default_factory=Counter)  # what has happened, so that tests can ask for it

    def __post_init__(self):
        s = self.setup
        self.pool = PagePool(s.pages + 1)
        self.scheduler = Scheduler(self.pool, s.page_size, s.seats, s.chunk, s.budget, s.max_prefill_tokens)
        self.slots: list[Slot | None] = [None] * ((s.pages + 1) * s.page_size)
        self.arrivals = self.steps = 0
        self.last: Plan | None = None
        self.reserved: dict[Request, int] = {}

    # What the engine does, step by step.

    def submit(self, ask: Ask) -> list[Request]:
        arrival, prompt = self.arrivals, prompt_ids(self.arrivals, ask.prompt)
        self.arrivals += 1
        params = SamplingParams(
            max_tokens=ask.max_tokens,
            n=ask.n,
            ignore_eos=ask.ignore_eos,
            stop_token_ids=(STOP,) if ask.stops else (),
        )
        made = [
            Request(
                arrival,
                prompt,
                params,
                ask.max_tokens,
                self.setup.protected(ask.prompt),
                completion,
                eos_token_ids=frozenset({EOS}),
            )
            for completion in range(ask.n)
        ]
        for request in made:
            if self.scheduler.fits(request):
                self.scheduler.add(request)
                self.requests.append(request)
            else:  # refused with a message by the engine; here: really larger than the pool
                self.seen["refused"] += 1
                assert self.scheduler.tokens_held(request) > self.setup.pages * self.setup.page_size
        return made

    def abort(self, request: Request) -> None:
        if request.finish_reason is None:
            self.seen[f"abort {self.state(request)}"] += 1
            request.finish_reason = "abort"
            self.scheduler.finish(request)
            self.check()

    def state(self, request: Request) -> str:
        if request.finish_reason is not None:
            return "finished"
        if request in self.scheduler.waiting:
            return "preempted" if request.output_token_ids else "waiting"
        if request.leader is not None:
            return "following"
        if any(r.leader is request for r in self.scheduler.running):
            return "leading"
        return "decoding" if request.decodes else "prefilling"

    def step(self) -> Plan | None:
        before = list(self.scheduler.running)
        plan = self.scheduler.plan()
        self.steps += 1
        self.check_order(before)
        self.check_admission([r for r in self.scheduler.running if r not in before], plan)
        self.check_turns(plan)
        self.check_sharing()
        self.check_reservations()
        self.last = plan
        if plan is None:
            assert not (self.scheduler.waiting or self.scheduler.running), "there is work and nothing runs"
            return None
        for request, length in zip(plan.requests, plan.lengths, strict=True):
            start = request.num_computed
            for i, token in enumerate(request.tokens(start, start + length)):
                self.slots[self.slot(request, request.cached_length + i)] = (start + i, token)
            request.num_computed += length
            request.cached_length += length
        ready = [r for r in plan.requests if r.num_computed == r.num_tokens]
        forks = self.fork(ready)
        for request in ready + forks:
            request.append(next_token(self.content(request), request.completion))
            if request.finish_reason is not None:
                self.scheduler.finish(request)
        for request in forks:
            request.leader = None
        self.check_budget()
        for request in plan.requests + forks:
            if request.finish_reason is None and request.evictable == self.setup.budget:
                self.evict(request)
        self.check()
        return plan

    def fork(self, ready: list[Request]) -> list[Request]:
        forks = [r for r in self.scheduler.running if r.leader in ready] if ready else []
        for request in forks:
            leader, size = request.leader, self.setup.page_size
            request.num_computed, request.cached_length = leader.num_computed, leader.cached_length
            for source, target in zip(leader.pages, request.pages, strict=False):
                if source != target:
                    at, to = source * size, target * size
                    self.slots[to : to + size] = self.slots[at : at + size]
            self.seen["fork"] += 1
        return forks

    def evict(self, request: Request) -> None:
        keep = survivors(self.content(request)[request.protected :], self.setup.kept)
        for i, what in enumerate(keep):
            self.slots[self.slot(request, request.protected + i)] = what
        request.cached_length = request.protected + self.setup.kept
        self.seen["evict a prompt" if not request.output_token_ids else "evict"] += 1

    def slot(self, request: Request, index: int) -> int:
        size = self.setup.page_size
        return request.pages[index // size] * size + index % size

    def content(self, request: Request) -> list[Slot]:
        return [self.slots[self.slot(request, i)] for i in range(request.cached_length)]

    # What must hold.

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.setup.page_size)

    def check(self) -> None:
        prove(self.scheduler)
        rows = [r.row for r in self.scheduler.running]
        assert len(rows) == len(set(rows)) <= self.setup.seats
        assert all(1 <= row <= self.setup.seats for row in rows)
        for request in self.requests:
            assert request.cached_length <= request.num_computed <= request.num_tokens
            if request.finish_reason is not None:
                assert request not in self.scheduler.running and request not in self.scheduler.waiting
                assert not request.pages and request.row == 0 and request.leader is None
        self.check_budget()

    def check_budget(self) -> None:
        """Cached tokens never exceed protected + budget, even before the eviction of their step."""
        for request in self.scheduler.running if self.setup.budget is not None else []:
            assert request.cached_length <= request.protected + self.setup.budget

    def check_order(self, before: list[Request]) -> None:
        """First come, first served; preemption takes the newest, and never from a budgeted engine."""
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        line = [self.requests.index(r) for r in running + waiting]
        assert line == sorted(line), "somebody overtook an older request"
        stayed = [r for r in before if r in running]
        preempted = before[len(stayed) :]
        assert stayed == before[: len(stayed)], "an older request was preempted than one that stayed"
        if preempted:
            assert self.setup.budget is None and preempted == waiting[: len(preempted)]
            assert running == stayed, "an admission cost a running request its pages"
            assert all(r.num_computed == r.cached_length == 0 and not r.pages for r in preempted)
        self.seen["preempted"] += len(preempted)
        assert self.seen["preempted"] == self.scheduler.preemptions
        self.seen["resumed"] += sum(bool(r.output_token_ids) for r in running if r not in before)

    def check_admission(self, admitted: list[Request], plan: Plan | None) -> None:
        """Pages up to the first new token, or all that a budget allows; and the head of the queue is not
        kept waiting beside free seats and pages."""
        held, full = self.scheduler.tokens_held, self.setup.budget is None
        for request in admitted:
            tokens = min(request.num_tokens + 1, held(request)) if full else held(request)
            assert len(request.pages) == self.pages_for(tokens)
        running, waiting = self.scheduler.running, self.scheduler.waiting
        if admitted and full and plan.prefill:  # a decode step has used this already
            assert self.pool.free_count >= len(running) - 1, "none left for those who grow"
        if waiting and not full and len(running) < self.setup.seats:
            same = [r for r in running if r.arrival == waiting[0].arrival and not r.output_token_ids]
            alike = min(waiting[0].protected, len(waiting[0].prompt_token_ids)) // self.setup.page_size
            missing = self.pages_for(held(waiting[0])) - (alike if same else 0)
            assert missing > self.pool.free_count

    def check_turns(self, plan: Plan | None) -> None:
        """Prefill and decode alternate where both are possible, and a prefill step takes whole chunks."""
        running, last = self.scheduler.running, self.last
        decoders = [r for r in running if r.decodes]
        prefillers = [r for r in running if not r.decodes and r.leader is None]
        assert (plan is None) == (not running)
        if plan is None:
            return
        if not plan.prefill:
            assert plan.requests == decoders and plan.lengths == [1] * len(decoders)
            assert not prefillers or (last is not None and last.prefill), "a prompt was passed over"
            return
        assert not decoders or last is None or not last.prefill, "those who decode were passed over"
        assert plan.requests == prefillers[: len(plan.requests)], "a newer prompt overtook an older one"
        for request, length in zip(plan.requests, plan.lengths, strict=True):
            chunks = borders(request.num_tokens, request.protected, self.setup)
            assert (request.num_computed, length) in chunks, "a chunk was cut where neighbours decided"
        most = max(self.setup.chunk, self.setup.max_prefill_tokens)
        assert sum(plan.lengths) <= most
        left = prefillers[len(plan.requests) :]
        assert not left or sum(plan.lengths) + self.scheduler.next_chunk(left[0]) > most, "room was left"
        if len(plan.requests) > 1:
            self.seen["several prompts in a step"] += 1

    def check_sharing(self) -> None:
        """Followers hold exactly the full protected prompt pages of their leader, which prefills."""
        for request in self.scheduler.running:
            leader = request.leader
            if leader is None:
                continue
            assert leader in self.scheduler.running and leader.leader is None and not leader.output_token_ids
            assert leader.arrival == request.arrival
            assert request.num_computed == request.cached_length == 0 and not request.output_token_ids
            alike = min(request.protected, len(request.prompt_token_ids)) // self.setup.page_size
            assert request.pages[:alike] == leader.pages[:alike]
            assert len(set(request.pages) & set(leader.pages)) == alike, "an unprotected page is shared"
            self.seen["shared pages"] += alike

    def check_reservations(self) -> None:
        """A budgeted request has all its pages from admission to its end, and no more."""
        for request in self.scheduler.running:
            most = self.pages_for(self.scheduler.tokens_held(request))
            assert len(request.pages) <= most
            if self.setup.budget is not None:
                assert self.reserved.setdefault(request, len(request.pages)) == len(request.pages) == most

    def most_steps(self) -> int:
        """The oldest prefills at least every second step, and decodes at least every second step."""
        return sum(
            2 * (len(borders(len(r.prompt_token_ids) + r.max_tokens, r.protected, self.setup)) + r.max_tokens)
            for r in self.requests
        )

    def run(self) -> None:
        """Until everybody has ended, within the bound; then nothing is held and outputs are as alone."""
        limit = self.steps + self.most_steps()
        while self.scheduler.waiting or self.scheduler.running:
            assert self.steps < limit, "it hangs"
            self.step()
        assert self.step() is None
        assert self.pool.free_count == self.setup.pages
        self.pool.check([])
        assert sorted(self.scheduler.free_rows) == list(range(1, self.setup.seats + 1))
        for request in self.requests:
            output, reason = alone(request, self.setup)
            if request.finish_reason == "abort":
                assert request.output_token_ids == output[: len(request.output_token_ids)]
            else:
                assert (request.output_token_ids, request.finish_reason) == (output, reason)


def serve(setup: Setup, *asks: Ask) -> PretendedEngine:
    """An engine to which these prompts have come, before its first step."""
    engine = PretendedEngine(setup)
    for ask in asks:
        engine.submit(ask)
    return engine


# Everything at random.

MOMENTS = ["waiting", "preempted", "prefilling", "decoding", "leading", "following"]


@st.composite
def scenarios(draw, budgeted: bool):
    """(setup, asks, aborts): lengths at borders, pools from too small to roomy, aborts by step or state."""
    page, chunk = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 3, 4, 6, 8, 16]))
    budget = draw(st.sampled_from(sorted({2, 5, 8, 9, 16, page, page + 1} - {1}))) if budgeted else None
    edges = {page - 1, page, page + 1, 2 * page, chunk - 1, chunk, chunk + 1, 2 * chunk, 4 * chunk + 1}
    asks = draw(
        st.lists(
            st.builds(
                Ask,
                prompt=st.sampled_from(sorted(edges - {0})),
                max_tokens=st.sampled_from([1, 2, page, page + 1, 5 * page, 30]),
                n=st.sampled_from([1, 2, 3]),
                stops=st.booleans(),
                ignore_eos=st.booleans(),
                arrives=st.sampled_from([0, 0, 1, 2, 5, 12]),
            ),
            min_size=2,
            max_size=6,
        )
    )
    protect = draw(st.sampled_from(["prompt", 0, 1, page, page + 1, 10])) if budget else "prompt"
    setup = Setup(
        page,
        chunk,
        draw(st.sampled_from([3, 1, 2, 4, 5])),
        1,
        budget,
        protect,
        draw(st.sampled_from([1, 20, 99])),
    )
    need = []  # pages of each ask; the pool is about as large as the largest needs
    for ask in asks:
        total = ask.prompt + ask.max_tokens - 1  # the last token is never fed
        held = total if budget is None else min(total, setup.protected(ask.prompt) + budget)
        need.append(-(-held // page))
    pages = max(1, max(need) + draw(st.sampled_from([2, 0, 1, 3, 8, 20, -1])))
    setup = Setup(**(vars(setup) | {"pages": pages}))
    moments = st.sampled_from(MOMENTS) | st.integers(0, 40)
    aborts = draw(st.lists(st.tuples(moments, st.integers(0, 8)), max_size=4))
    return setup, asks, aborts


@pytest.mark.parametrize("budgeted", [False, True])
@settings(max_examples=180, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_requests_mixed_at_random(budgeted, data):
    setup, asks, aborts = data.draw(scenarios(budgeted))
    engine, aborts, coming = PretendedEngine(setup), list(aborts), sorted(asks, key=lambda a: a.arrives)
    while coming or aborts:
        while coming and coming[0].arrives <= engine.steps:
            engine.submit(coming.pop(0))
        for when, which in list(aborts):
            if when == engine.steps and engine.requests:
                engine.abort(engine.requests[which % len(engine.requests)])
            alike = [r for r in engine.requests if engine.state(r) == when]
            if alike:
                engine.abort(alike[which % len(alike)])
                aborts.remove((when, which))
        if not coming and not (engine.scheduler.waiting or engine.scheduler.running):
            break
        engine.step()
        assert engine.steps < 20 + engine.most_steps(), "it hangs"
    engine.run()
    for what, count in engine.seen.items():
        if count:
            event(what)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_chunk_borders_are_the_same_for_any_neighbours(data):
    """The recorded prefill chunks of one request, beside others drawn at random and alone."""
    budget = data.draw(st.sampled_from([None, 6, 16]))
    sizes = {"budget": budget, "protect": data.draw(st.sampled_from(["prompt", 0, 5])), "pages": 400}
    watched = Ask(data.draw(st.integers(1, 50)), 3)
    recorded = []
    for neighbours in (0, data.draw(st.integers(1, 4))):
        most = data.draw(st.sampled_from([1, 17, 2048]))
        engine = PretendedEngine(Setup(seats=5, chunk=7, max_prefill_tokens=most, **sizes))
        (request,) = engine.submit(watched)
        for _ in range(neighbours):
            engine.submit(Ask(data.draw(st.integers(1, 50)), data.draw(st.integers(1, 20))))
        chunks = []
        while engine.scheduler.waiting or engine.scheduler.running:
            start = request.num_computed
            plan = engine.step()
            if plan.prefill and request in plan.requests:
                chunks.append((start, plan.lengths[plan.requests.index(request)]))
        recorded.append(chunks)
    assert recorded[0] == recorded[1] == borders(watched.prompt, request.protected, engine.setup)


# The cases that matter, one by one.


@pytest.mark.parametrize("page_size", [1, 4, 8])
@pytest.mark.parametrize("budget", [None, 8])
@pytest.mark.parametrize("seats", [1, 2, 5])
def test_page_borders(page_size, budget, seats):
    lengths = sorted({page_size - 1, page_size, page_size + 1, 2 * page_size} - {0})
    asks = [Ask(prompt, 2 * page_size) for prompt in lengths]
    serve(Setup(page_size, 8, seats, 4 * page_size, budget), *asks).run()


@pytest.mark.parametrize("budget", [None, 4, 8])
def test_a_request_that_takes_exactly_the_pool(budget):
    setup = Setup(pages=4, budget=budget)
    engine = serve(setup, Ask(15, 1), Ask(12, 4), Ask(8, 8))
    assert engine.seen["refused"] == 0
    engine.run()
    assert [len(r.output_token_ids) for r in engine.requests] == [1, 4, 8]


def test_what_can_never_fit_is_refused_and_a_budget_makes_it_fit():
    assert serve(Setup(pages=4), Ask(8, 10)).seen["refused"] == 1
    assert serve(Setup(pages=4), Ask(8, 9)).seen["refused"] == 0  # the last token is never fed
    assert serve(Setup(pages=4, budget=8), Ask(9, 9)).seen["refused"] == 1  # 9 protected + 8 in 16 slots
    engine = serve(Setup(pages=4, budget=8), Ask(8, 10_000))
    assert engine.seen["refused"] == 0
    with pytest.raises(AssertionError, match="never fit"):
        engine.scheduler.add(Request(9, [1] * 17, SamplingParams(), 1, 17))


@pytest.mark.parametrize("prompt", [4, 8])
def test_a_budget_of_exactly_one_page(prompt):
    engine = serve(Setup(page_size=4, pages=3, budget=4), Ask(prompt, 40))
    engine.run()
    assert engine.seen["evict"] > 30


def test_the_newest_is_preempted_and_resumes_with_all_its_tokens():
    engine = serve(Setup(pages=8, seats=3), Ask(8, 20), Ask(8, 20), Ask(8, 20))
    engine.run()  # checks the order, and that outputs are as alone
    assert engine.seen["preempted"] >= 1 and engine.seen["resumed"] >= 1
    assert [len(r.output_token_ids) for r in engine.requests] == [20, 20, 20]


def test_whoever_decodes_and_preempts_itself_leaves_the_step_to_an_older_prompt():
    # 60 tokens take 16 of 18 pages; the short one needs a third page while the long one still prefills.
    engine = serve(Setup(pages=18), Ask(60, 3), Ask(3, 20))
    while not engine.seen["preempted"]:
        plan = engine.step()
    assert plan.prefill and plan.requests == engine.requests[:1] and not plan.requests[0].output_token_ids
    engine.run()


def test_full_caches_that_grow_side_by_side_each_stay_one_run():
    engine = serve(Setup(pages=64, seats=2), Ask(8, 60), Ask(8, 60))
    while engine.scheduler.waiting or engine.scheduler.running:
        assert all(one_run(r.pages) for r in engine.scheduler.running)
        engine.step()
    engine.run()


def test_a_budgeted_request_is_never_preempted_and_the_peak_is_known_before():
    engine = serve(Setup(pages=8, seats=3, budget=8), *[Ask(8, 100)] * 3)
    peak = 0
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
        peak = max(peak, engine.pool.used_count)
        assert len(engine.scheduler.running) <= 2  # 4 pages each, whatever the output's length
    engine.run()
    assert peak == 8 and engine.seen["preempted"] == 0 and engine.seen["evict"] > 200


def test_prefill_and_decode_take_turns():
    engine = serve(Setup(seats=2, chunk=8), Ask(4, 50))
    engine.step()
    engine.submit(Ask(8 * 8, 2))
    kinds = [engine.step().prefill for _ in range(16)]
    assert kinds == [False, True] * 8 or kinds == [True, False] * 8
    engine.run()


@pytest.mark.parametrize("most, prompts", [(1, 1), (8, 1), (15, 1), (16, 2), (23, 2), (24, 3), (2048, 3)])
def test_a_step_takes_whole_chunks_and_at_least_one(most, prompts):
    engine = serve(Setup(chunk=8, max_prefill_tokens=most), *[Ask(30, 1)] * 3)
    assert engine.step().lengths == [8] * prompts
    engine.run()


def test_a_prompt_chunk_is_cut_at_the_budget():
    engine = serve(Setup(chunk=8, budget=8, protect=2), Ask(30, 4))
    lengths = []
    while not engine.requests[0].output_token_ids:
        lengths += engine.step().lengths
    # 8 to the first border; 2 reach 2 + 8 slots; from then on every token costs an eviction of one.
    assert lengths == [8, 2] + [1] * 20
    assert engine.seen["evict a prompt"] == 20  # the eviction of the last step comes after the first token
    engine.run()


@pytest.mark.parametrize("budget, protect, prompt, alike", [
    (None, "prompt", 11, 2),
    (None, "prompt", 12, 3),
    (8, "prompt", 11, 2),
    (8, 6, 11, 1),
    (8, 3, 11, 0),
    (8, 30, 11, 2),
])  # fmt: skip
def test_completions_share_the_full_protected_pages_of_their_prompt(budget, protect, prompt, alike):
    engine = serve(Setup(seats=3, budget=budget, protect=protect), Ask(prompt, 9, n=3))
    engine.step()
    first, second, third = (set(r.pages) for r in engine.requests)
    assert len(first & second) == len(second & third) == alike
    assert first & second == first & third
    engine.run()
    assert engine.seen["fork"] == 2


def test_shared_pages_outlive_the_leader():
    engine = serve(Setup(seats=3), Ask(12, 9, n=3))
    while not engine.requests[0].output_token_ids:
        engine.step()
    leader, *others = engine.requests
    shared = set(leader.pages) & set(others[0].pages)
    engine.abort(leader)
    assert shared and all(engine.pool.references[page] == 2 for page in shared)
    engine.abort(others[0])
    assert all(engine.pool.references[page] == 1 for page in shared)
    engine.run()


@pytest.mark.parametrize("budget, protect", [(None, "prompt"), (8, "prompt"), (8, 4)])
def test_an_aborted_leader_is_followed_by_the_first_of_the_others(budget, protect):
    engine = serve(Setup(seats=3, budget=budget, protect=protect), Ask(30, 5, n=3))
    engine.step()
    engine.step()
    leader, second, third = engine.requests
    assert second.leader is third.leader is leader and engine.state(leader) == "leading"
    engine.abort(leader)
    assert second.leader is None and third.leader is second
    engine.abort(third)
    engine.run()
    assert len(second.output_token_ids) == 5


def test_completions_beyond_the_seats_prefill_for_themselves():
    engine = serve(Setup(seats=2), Ask(10, 4, n=5))
    engine.run()
    assert all(len(r.output_token_ids) == 4 for r in engine.requests)


@pytest.mark.parametrize("moment", MOMENTS)
def test_abort_at_any_moment(moment):
    engine = serve(Setup(seats=3, pages=18), Ask(20, 24), Ask(20, 24, n=2), Ask(8, 12))
    for _ in range(200):
        alike = [r for r in engine.requests if engine.state(r) == moment]
        if alike:
            engine.abort(alike[-1])
            break
        engine.step()
    assert engine.seen[f"abort {moment}"] == 1
    engine.run()


def test_finishing_somebody_unknown_changes_nothing():
    engine = serve(Setup(), Ask(8, 4))
    engine.scheduler.finish(Request(9, [1], SamplingParams(), 1, 1))
    engine.step()
    engine.run()


def test_check_catches_a_seat_with_two_owners_and_slots_without_pages():
    engine = serve(Setup(seats=3), Ask(8, 9), Ask(8, 9))
    engine.step()
    first, second = engine.requests
    row, second.row = second.row, first.row
    with pytest.raises(AssertionError, match="two owners"):
        prove(engine.scheduler)
    second.row = row
    length, first.cached_length = first.cached_length, 100
    with pytest.raises(AssertionError, match="slots without pages"):
        prove(engine.scheduler)
    first.cached_length = length
    prove(engine.scheduler)
    engine.pool.release([first.pages.pop()])
    first.pages.append(second.pages[0])
    with pytest.raises(AssertionError):
        prove(engine.scheduler)


def test_scheduling_needs_no_torch():
    modules = "nanobeacon.scheduler, nanobeacon.pages, nanobeacon.request, nanobeacon.policies"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
