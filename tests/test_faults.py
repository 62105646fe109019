"""Faults while running, injected: whatever fails ends no more than it must, and nothing is lost by it.

Memory that runs out, functions of the user's that fail, Ctrl-C at any line, logits that are no numbers.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import pytest
import torch
from proofs import prove
from tiny import prompt_of, tiny_folder

import nanobeacon
from nanobeacon import LLM, SamplingParams
from nanobeacon.policies import Policy

PACKAGE = Path(nanobeacon.__file__).parent
SIZES = dict(dtype="float32", device="cpu", page_size=8, chunk=16)
BUDGET = dict(budget=40, window=4, protect=4)
MODES = {"full": {}, "beacon": BUDGET, "snapkv": BUDGET | dict(policy="snapkv")}
WITH_OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
PROMPTS = [prompt_of(40), prompt_of(40)[:32] + prompt_of(9), prompt_of(21)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("faults"), "llama")


def greedy(max_tokens: int = 30, n: int = 1, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, n=n, **more)


def idle(llm: LLM) -> None:
    """Nobody runs, nothing is held, nothing is lost."""
    scheduler = llm.engine.scheduler
    prove(scheduler)
    assert not scheduler.running and not scheduler.waiting
    assert llm.engine.pool.used_count == 0


def tokens(outputs) -> list[list[int]]:
    return [o.token_ids for o in outputs]


# ------------------------------------------------------------------------------------- memory that runs out


ERRORS = {
    "python": MemoryError(),
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    "cpu": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
}


def limit_forward(llm: LLM, monkeypatch, most: int, error: Exception, late: bool = False) -> list[int]:
    """A model whose forward passes (late: whose logits) have memory for `most` requests; sizes tried."""
    tried = []
    model = llm.engine.model
    forward, logits = model.forward, model.logits

    def limited(batch, cache, queries):
        requests = len(batch.cached_lengths)
        tried.append(requests)
        hidden = forward(batch, cache, queries)  # the failing pass has written what it could
        if requests > most and not late:
            raise error
        return hidden

    def limited_logits(hidden, vocabulary):
        if late and len(hidden) > most:
            raise error
        return logits(hidden, vocabulary)

    monkeypatch.setattr(model, "forward", limited)
    monkeypatch.setattr(model, "logits", limited_logits)
    return tried


@WITH_OVERLAP
@pytest.mark.parametrize("late", [False, True], ids=["forward", "logits"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_memory_is_run_again_in_smaller_parts_and_nobody_ends(
    folder, overlap, mode, late, monkeypatch
):
    llm = LLM(folder, overlap=overlap, **SIZES, **MODES[mode])
    params = greedy(60, logprobs=0)
    wanted = llm.generate(PROMPTS, params)
    llm = LLM(folder, overlap=overlap, **SIZES, **MODES[mode])
    tried = limit_forward(llm, monkeypatch, most=1, error=ERRORS["python"], late=late)
    found = llm.generate(PROMPTS, params)
    assert tokens(found) == tokens(wanted) and {o.finish_reason for o in found} == {"length"}
    assert [len(o.logprobs) for o in found] == [60] * 3
    assert max(tried) > 1, "no step was ever too large"
    idle(llm)


@WITH_OVERLAP
@pytest.mark.parametrize("error", ERRORS)
def test_a_request_that_memory_cannot_hold_alone_ends_and_no_other(folder, overlap, error, monkeypatch):
    llm = LLM(folder, overlap=overlap, **SIZES, **BUDGET)
    wanted = tokens(llm.generate(PROMPTS, greedy()))
    forward = llm.engine.model.forward

    def limited(batch, cache, queries):
        if (batch.token_ids == 96).any():
            raise ERRORS[error]
        return forward(batch, cache, queries)

    monkeypatch.setattr(llm.engine.model, "forward", limited)
    good = [[t for t in p if t != 96] for p in PROMPTS]
    *others, bad = llm.generate([*good, [3, 96, 5]], greedy(5))
    assert bad.finish_reason == "error" and "memory ran out in a step of 3 tokens" in bad.error
    assert {o.finish_reason for o in others} == {"length"}
    idle(llm)
    monkeypatch.undo()
    assert tokens(llm.generate(PROMPTS, greedy())) == wanted


@WITH_OVERLAP
def test_completions_whose_prompt_memory_cannot_hold_end_and_no_other(folder, overlap, monkeypatch):
    """The copies for completions fail: they and their leader begin again, alone in the end."""
    llm = LLM(folder, overlap=overlap, **SIZES, **BUDGET)
    (wanted,) = tokens(llm.generate([PROMPTS[2]], greedy()))

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(llm.engine.cache, "copy_pages", fail)
    outputs = llm.generate([PROMPTS[0], PROMPTS[2]], [greedy(n=3), greedy()])
    assert [o.finish_reason for o in outputs] == ["error", "error", "length", "length"]
    assert outputs[3].token_ids == wanted
    idle(llm)


@WITH_OVERLAP
def test_an_eviction_without_memory_for_all_is_tried_one_by_one(folder, overlap, monkeypatch):
    llm = LLM(folder, overlap=overlap, **SIZES, **BUDGET)
    wanted = tokens(llm.generate([prompt_of(20, seed=s) for s in range(3)], greedy(90)))
    ranks = llm.engine.evictor.ranker.ranks
    sizes = []

    def limited(due):
        sizes.append(len(due.requests))
        if len(due.requests) > 1:
            raise MemoryError
        return ranks(due)

    monkeypatch.setattr(llm.engine.evictor.ranker, "ranks", limited)
    assert tokens(llm.generate([prompt_of(20, seed=s) for s in range(3)], greedy(90))) == wanted
    assert max(sizes) == 3
    idle(llm)


@WITH_OVERLAP
def test_a_cache_left_half_moved_ends_its_requests_and_no_other(folder, overlap, monkeypatch):
    llm = LLM(folder, overlap=overlap, **SIZES, **BUDGET)
    (wanted,) = tokens(llm.generate([PROMPTS[2]], greedy(10)))

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(llm.engine.evictor, "_move", fail)
    short, *long = llm.generate([PROMPTS[2], *PROMPTS[:2]], [greedy(10), greedy(90), greedy(90)])
    assert short.token_ids == wanted and short.finish_reason == "length"
    assert [o.finish_reason for o in long] == ["error"] * 2 and "could not be evicted" in long[0].error
    idle(llm)


# --------------------------------------------------------------------------------- functions of the user's


@WITH_OVERLAP
def test_a_score_that_fails_ends_the_request_it_fails_for_and_no_other(folder, overlap):
    """Both prompts are evicted in one group; the function fails on the positions of the longer one."""
    groups = []

    def score(slots):
        groups.append(len(slots.positions))
        if slots.positions.max() > 60:
            raise KeyError("beyond what I can judge")
        return slots.positions.float()

    policy = Policy("mine", beacons=0, recents=0, score=score)
    llm = LLM(folder, overlap=overlap, **(SIZES | dict(chunk=32)), budget=40, window=4, policy=policy)
    short, long = llm.generate([prompt_of(10), prompt_of(30)], greedy(50))
    assert groups[:3] == [2, 1, 1]
    assert short.finish_reason == "length"
    assert long.finish_reason == "error" and "beyond what I can judge" in long.error
    idle(llm)


@WITH_OVERLAP
def test_a_listener_that_fails_ends_its_own_request_only(folder, overlap):
    llm = LLM(folder, overlap=overlap, **SIZES, **BUDGET)
    wanted = tokens(llm.generate(PROMPTS, greedy()))

    def fail(index, logits):
        if index == 3:
            raise KeyError("from the listener")

    others = llm.submit(PROMPTS, greedy())
    (heard,) = llm.engine.submit(PROMPTS[0], greedy().with_defaults({}), on_logits=fail)
    for _ in llm.run([*others, heard]):
        prove(llm.engine.scheduler)
    assert heard.finish_reason == "error" and "from the listener" in heard.error
    assert len(heard.output_token_ids) == 3
    assert [r.output_token_ids for r in others] == wanted
    idle(llm)


@WITH_OVERLAP
def test_a_processor_that_fails_or_answers_nan_ends_its_own_request_only(folder, overlap):
    llm = LLM(folder, overlap=overlap, **SIZES, **BUDGET)
    wanted = tokens(llm.generate(PROMPTS, greedy()))

    def fail(token_ids, logits):
        if len(token_ids) > 45:
            raise KeyError("from the processor")

    def nan(token_ids, logits):
        return logits * torch.nan

    more = [greedy(logits_processor=fail), greedy(logits_processor=nan)]
    outputs = llm.generate([*PROMPTS, PROMPTS[0], PROMPTS[1]], [greedy()] * 3 + more)
    assert tokens(outputs[:3]) == wanted
    assert [o.finish_reason for o in outputs[3:]] == ["error"] * 2
    idle(llm)


# ------------------------------------------------------------------------------- logits that are no numbers


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_full_of_nan_is_left_to_nobody(folder, mode, monkeypatch):
    """Keys and values of one request become NaN: it ends, and whoever gets its pages reads none of it."""
    llm = LLM(folder, **SIZES, **MODES[mode], num_pages=24, max_num_seqs=2)
    wanted = tokens(llm.generate(PROMPTS, greedy(50)))
    (ill,) = llm.submit([prompt_of(33, seed=7)], greedy(60))
    for _ in llm.run([ill]):
        if len(ill.output_token_ids) == 10:
            own = [p for p in ill.pages if p not in llm.engine.pool.kept]
            llm.engine.cache.keys[:, :, own] = torch.nan
            llm.engine.cache.values[:, :, own] = torch.nan
            llm.engine.queries.buffer[ill.row] = torch.nan
    assert ill.finish_reason == "error" and "not finite" in ill.error
    idle(llm)
    assert tokens(llm.generate(PROMPTS, greedy(50))) == wanted


# ----------------------------------------------------------------------------------------- Ctrl-C anywhere


class Interrupt:
    """KeyboardInterrupt when line `place` (file, number) is about to run for the `nth` time, within the
    functions that `wanted(file, name)` picks. `seen` counts how often each of their lines was."""

    def __init__(
        self, wanted: Callable[[str, str], bool], place: tuple[str, int] | None = None, nth: int = 1
    ) -> None:
        self.wanted = wanted
        self.place = place
        self.nth = nth
        self.seen: Counter[tuple[str, int]] = Counter()
        self.inside: dict[CodeType, bool] = {}

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._call)
        return self

    def __exit__(self, *_) -> None:
        sys.settrace(None)

    def _call(self, frame, event, arg):
        code = frame.f_code
        if code not in self.inside:
            path = Path(code.co_filename)
            self.inside[code] = path.parent == PACKAGE and self.wanted(path.name, code.co_name)
        return self._line if self.inside[code] else None

    def _line(self, frame, event, arg):
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            self.seen[place] += 1
            if place == self.place and self.seen[place] == self.nth:
                raise KeyboardInterrupt(place)
        return self._line


REPAIR = ("_put_right", "put_right", "restore", "_reachable", "_take_holdings", "_forget_progress")
LOCKED = (
    "step",
    "_at_work",
)  # taking and giving back a lock is Python's own: no line tears it out of a `with`
FILES = (
    "engine.py",
    "answers.py",
    "scheduler.py",
    "pages.py",
    "prefix.py",
    "cache.py",
    "eviction.py",
    "batch.py",
)


def work(file: str, name: str) -> bool:
    return file in FILES and name not in LOCKED + REPAIR


def repair(file: str, name: str) -> bool:
    return file in FILES and name in REPAIR


def crowd(llm: LLM):
    """Completions, shared beginnings, waiting for seats, and preemption or eviction, as the mode is."""
    return llm.generate(PROMPTS, [greedy(30, n=2), greedy(8), greedy(45)])


@pytest.mark.parametrize("apart", [16, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mode, overlap", [("full", False), ("beacon", False), ("full", True), ("beacon", True)]
)
def test_ctrl_c_at_any_line_loses_nothing(folder, mode, overlap, apart):
    """Lines of engine, scheduler, pool, caches and evictor that are run, the first time or a later one: each,
    or those so far apart. A bystander who waits for a seat is served all the same."""
    sizes = SIZES | MODES[mode] | dict(num_pages=11, max_num_seqs=3, overlap=overlap)
    llm = LLM(folder, **sizes)
    with Interrupt(work) as lines:
        wanted = tokens(crowd(llm))
    if mode == "full":
        assert llm.engine.scheduler.preemptions
    (alone,) = tokens(llm.generate([PROMPTS[1][:24]], greedy(6)))
    assert len(lines.seen) > 250
    llm = LLM(folder, **sizes)
    draw = random.Random(0)
    reached = served = 0
    places = list(lines.seen.items())[::apart]
    for place, count in places:
        (bystander,) = llm.submit([PROMPTS[1][:24]], greedy(6))
        with Interrupt(work, place, draw.randint(1, min(count, 20))):
            try:
                crowd(llm)
            except KeyboardInterrupt:
                reached += 1
        prove(llm.engine.scheduler)
        if bystander.finish_reason is None:
            for _ in llm.run([bystander]):
                pass
        if bystander.finish_reason != "abort":
            served += 1
            assert bystander.output_token_ids == alone, place
        idle(llm)
    assert reached > 0.8 * len(places) and served > 0.1 * reached
    assert tokens(crowd(llm)) == wanted


@WITH_OVERLAP
def test_a_second_ctrl_c_while_the_first_is_cleaned_up_loses_nothing(folder, overlap):
    llm = LLM(folder, overlap=overlap, **SIZES, **BUDGET)
    wanted = tokens(crowd(llm))

    def stopped(*_):
        raise KeyboardInterrupt

    def stop_twice(place: tuple[str, int] | None) -> Interrupt:
        """The first in the second eviction-free step, the second at a line of the repair."""
        with pytest.MonkeyPatch.context() as patch, Interrupt(repair, place) as lines:
            patch.setattr(llm.engine.model, "logits", stopped)
            with pytest.raises(KeyboardInterrupt):
                crowd(llm)
        return lines

    lines = stop_twice(None)
    assert len(lines.seen) > 40
    for place in list(lines.seen)[::4]:
        stop_twice(place)
        assert tokens(crowd(llm)) == wanted, place
        idle(llm)


def test_ctrl_c_in_a_listener_or_between_two_submits_leaves_nothing_behind(folder, monkeypatch):
    llm = LLM(folder, **SIZES, **BUDGET)
    wanted = tokens(llm.generate(PROMPTS, greedy()))

    def stopped(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.score([PROMPTS[0]], [PROMPTS[1]], on_logits=stopped)
    idle(llm)
    submit = llm.engine.submit

    def interrupted_submit(prompt, *rest):
        if prompt == PROMPTS[1]:
            raise KeyboardInterrupt
        return submit(prompt, *rest)

    for call in (lambda: llm.generate(PROMPTS), lambda: llm.score(PROMPTS, PROMPTS)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(llm.engine, "submit", interrupted_submit)
            call()
        idle(llm)
    assert tokens(llm.generate(PROMPTS, greedy())) == wanted
