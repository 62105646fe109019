"""Overlap: tokens that the host reads a step later, with everything said of a request as without it.

Each test runs the same on two engines, one of which overlaps; on a CPU, where nothing is gained by it.
"""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proofs import prove
from test_graphs import graphs_of
from tiny import prompt_of, text_folder, tiny_folder

from nanobeacon import LLM, SamplingParams, answers, sampling
from nanobeacon.policies import Policy, Stage

SIZES = dict(dtype="float32", device="cpu", page_size=8, chunk=16, seed=3)
BUDGET = dict(budget=40, window=4, trace=True)


def newest_first(slots):
    """A user's own score."""
    return slots.positions.float()


STAGED = Policy("staged", beacons=6, recents=2, stages=(Stage(0.5), Stage(latest=4, pool="sum")))
OWN = Policy("own", beacons=0, recents=0, score=newest_first)
MODES = {
    "full": {},
    "protect 4": BUDGET | dict(protect=4),
    "random": dict(budget=40, policy="random", trace=True),
    "streaming": dict(budget=40, policy="streaming", protect=4, trace=True),
    "staged": BUDGET | dict(policy=STAGED),
    "own": BUDGET | dict(policy=OWN),
}
for _name in ("beacon", "recent", "initial", "rpc", "snapkv", "rkv", "random-query"):
    MODES[_name] = BUDGET | dict(policy=_name)
PARAMS = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=0.9, top_p=0.9, seed=11),
    "plain": dict(temperature=1.0, seed=11),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("overlap"), "qwen3")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("overlap-text"))


def both(folder, work: Callable[[LLM], object], **options) -> tuple[LLM, LLM, object, object]:
    """The same work without overlap and with it: both engines, and what came of it."""
    without = LLM(folder, overlap=False, **(SIZES | options))
    with_it = LLM(folder, overlap=True, **(SIZES | options))
    wanted = work(without)
    found = work(with_it)
    idle(with_it)
    return without, with_it, wanted, found


def idle(llm: LLM) -> None:
    """Nobody runs, nothing is held, nothing is left to be read."""
    scheduler = llm.engine.scheduler
    prove(scheduler)
    assert not scheduler.running and not scheduler.waiting
    assert llm.engine.pool.used_count == 0 and llm.engine._flight is None


def same(wanted, found, bits: bool = True) -> None:
    """Outputs are equal; bits: log-probabilities to the last one."""
    assert len(wanted) == len(found)
    for a, b in zip(wanted, found, strict=True):
        for name in ("text", "token_ids", "finish_reason", "error", "prompt", "completion"):
            assert getattr(a, name) == getattr(b, name), name
        assert len(a.trace) == len(b.trace)
        for one, other in zip(a.trace, b.trace, strict=True):
            assert one.position == other.position
            assert torch.equal(one.kept, other.kept) and torch.equal(one.beacons, other.beacons)
        if bits:
            assert a.logprobs == b.logprobs
        elif a.logprobs is not None:
            ours = [own for own, _ in a.logprobs]
            assert ours == pytest.approx([own for own, _ in b.logprobs], abs=1e-4)


def counts(llm: LLM) -> dict:
    """Statistics but for the seconds."""
    return {name: value for name, value in vars(llm.stats).items() if not name.endswith("seconds")}


# ------------------------------------------------------------------------------------------- it overlaps


@pytest.mark.parametrize("how", PARAMS)
def test_a_step_s_tokens_are_read_once_the_next_step_is_launched(folder, how, monkeypatch):
    llm = LLM(folder, overlap=True, **SIZES)
    happened = []
    forward = llm.engine.model.forward
    fetch = answers.fetch

    def noted_forward(*given):
        happened.append("run")
        return forward(*given)

    def noted_fetch(tensors):
        arrived = fetch(tensors)

        def noted():
            happened.append("read")
            return arrived()

        return noted

    monkeypatch.setattr(llm.engine.model, "forward", noted_forward)
    monkeypatch.setattr(answers, "fetch", noted_fetch)
    llm.generate([prompt_of(9), prompt_of(12)], SamplingParams(max_tokens=5, ignore_eos=True, **PARAMS[how]))
    assert happened == ["run"] + ["run", "read"] * 4 + ["read"]
    happened.clear()
    llm = LLM(folder, **SIZES)  # on a CPU not by itself
    monkeypatch.setattr(llm.engine.model, "forward", noted_forward)
    llm.generate([prompt_of(9)], SamplingParams(max_tokens=3, ignore_eos=True))
    assert happened == ["run", "read"] * 3


# ----------------------------------------------------------------------- what is said of a request is equal


@pytest.mark.parametrize("how", PARAMS)
@pytest.mark.parametrize("mode", MODES)
def test_outputs_and_statistics_are_equal_to_the_last_bit(folder, mode, how):
    """Ends by max_tokens are known in advance: also who shares a step is the same then."""
    prompts = [prompt_of(n) for n in (3, 50, 17, 40, 9)]
    lengths = (90, 1, 60, 45, 33)
    params = [
        SamplingParams(max_tokens=m, ignore_eos=True, logprobs=2, n=n, **PARAMS[how])
        for m, n in zip(lengths, (1, 3, 2, 1, 1), strict=True)
    ]

    def work(llm: LLM):
        return llm.generate(prompts, params)

    without, with_it, wanted, found = both(folder, work, max_num_seqs=3, **MODES[mode])
    same(wanted, found)
    assert counts(with_it) == counts(without)
    assert (with_it.stats.evictions > 0) == (mode != "full")


@pytest.mark.parametrize("mode", ["full", "beacon", "random-query"])
def test_ends_that_only_a_token_tells(folder, mode):
    """A request that has ended has had a row too many, and maybe an eviction: neither is seen."""
    prompts = [prompt_of(n) for n in (3, 17, 40, 8, 30, 12)]
    probe = LLM(folder, **SIZES, **MODES[mode])
    free = SamplingParams(max_tokens=90, ignore_eos=True)
    long = probe.generate(prompts, free)
    # Each ends at another place, two of them right where a cache is evicted.
    ends = [[o.token_ids[at]] for o, at in zip(long, (5, 39, 44, 0, 63, 20), strict=True)]
    params = [SamplingParams(max_tokens=90, ignore_eos=True, stop_token_ids=end, logprobs=1) for end in ends]

    def work(llm: LLM):
        return llm.generate(prompts, params)

    without, with_it, wanted, found = both(folder, work, max_num_seqs=6, **MODES[mode])
    assert {o.finish_reason for o in wanted} == {"stop"}
    same(wanted, found, bits=False)
    assert counts(with_it) == counts(without)
    # With a queue whoever waits comes a step later; what is said of it is the same.
    without, with_it, wanted, found = both(folder, work, max_num_seqs=2, **MODES[mode])
    same(wanted, found, bits=False)
    for name in ("output_tokens", "prompt_tokens", "evictions", "peak_cached_tokens"):
        assert counts(with_it)[name] == counts(without)[name], name


def test_an_eviction_behind_the_last_token_is_not_counted(folder):
    """The token that fills the budget ends the request: without overlap nothing is evicted then."""
    long = LLM(folder, **SIZES, **BUDGET).generate(
        [prompt_of(7)], SamplingParams(max_tokens=60, ignore_eos=True)
    )
    tokens = long[0].token_ids
    for at in range(38, 43):
        params = SamplingParams(max_tokens=60, ignore_eos=True, stop_token_ids=[tokens[at]])
        without, with_it, wanted, found = both(
            folder, lambda llm, params=params: llm.generate([prompt_of(7)], params), **BUDGET
        )
        same(wanted, found)
        assert counts(with_it) == counts(without)


@pytest.mark.parametrize("mode", ["full", "beacon"])
def test_stop_strings_streams_and_texts(texts, mode):
    options = MODES[mode]
    probe = LLM(texts, **SIZES, **options)
    (whole,) = probe.generate(["abc"], SamplingParams(max_tokens=70, ignore_eos=True))
    stop = whole.text[30:33]

    def work(llm: LLM):
        params = SamplingParams(max_tokens=70, ignore_eos=True, stop=stop)
        pieces = list(llm.stream("abc", params))
        return llm.generate(["abc", "abcd"], params), pieces

    without, with_it, (wanted, pieces), (found, ours) = both(texts, work, **options)
    same(wanted, found)
    assert "".join(ours) == "".join(pieces) == wanted[0].text
    assert counts(with_it) == counts(without)


def test_completions_share_a_prompt_whatever_ends_first(folder):
    params = SamplingParams(max_tokens=30, n=4, temperature=1.0, seed=2, logprobs=0)
    for mode in ("full", "beacon", "protect 4"):
        prompts = [prompt_of(50), prompt_of(31)]
        _, _, wanted, found = both(
            folder, lambda llm, prompts=prompts: llm.generate(prompts, params), **MODES[mode]
        )
        same(wanted, found, bits=False)


@pytest.mark.parametrize("mode", ["full", "beacon"])
def test_processors_see_every_token_and_the_penalty_counts_it(folder, mode):
    def work(llm: LLM):
        heard = []

        def listen(token_ids, logits):
            heard.append(list(token_ids))

        fields = dict(max_tokens=60, ignore_eos=True)
        params = [
            SamplingParams(**fields, repetition_penalty=1.5),
            SamplingParams(**fields, logits_processor=listen),
            SamplingParams(**fields),
        ]
        return llm.generate([prompt_of(n) for n in (5, 9, 20)], params), heard

    _, _, (wanted, heard), (found, ours) = both(folder, work, **MODES[mode])
    same(wanted, found)
    assert ours == heard and len(heard[-1]) == 9 + 59


@pytest.mark.parametrize("mode", ["full", "beacon"])
def test_given_outputs_among_sampled_ones(folder, mode):
    """Scores run while others decode: they wait for nothing that is in flight."""

    def work(llm: LLM):
        others = llm.submit([prompt_of(9), prompt_of(20)], SamplingParams(max_tokens=80, ignore_eos=True))
        for _ in range(7):
            llm.engine.step()
        scores = llm.score([prompt_of(12)], [prompt_of(50, seed=4)])
        for _ in llm.run(others):
            pass
        return [r.output_token_ids for r in others], scores[0].tolist()

    _, _, wanted, found = both(folder, work, **MODES[mode])
    assert found[0] == wanted[0] and found[1] == pytest.approx(wanted[1], abs=1e-4)


def test_known_prefixes_are_found_alike(folder):
    def work(llm: LLM):
        first = llm.generate([prompt_of(50)], SamplingParams(max_tokens=40, ignore_eos=True))
        more = prompt_of(50) + first[0].token_ids + prompt_of(3)
        second = llm.generate([more, prompt_of(50)], SamplingParams(max_tokens=20, ignore_eos=True))
        return first + second

    for mode in ("full", "beacon"):
        without, with_it, wanted, found = both(folder, work, **MODES[mode])
        same(wanted, found)
        assert counts(with_it) == counts(without) and with_it.stats.prefix_tokens > 0


def test_logits_that_are_no_numbers_end_their_request_alone(folder, monkeypatch):
    def work(llm: LLM):
        logits = llm.engine.model.logits
        steps = []

        def broken(*given, **named):
            found = logits(*given, **named)
            steps.append(len(found))
            if len(steps) == 6:
                found = found.clone()
                found[0] = torch.nan
            return found

        monkeypatch.setattr(llm.engine.model, "logits", broken)
        return llm.generate([prompt_of(9), prompt_of(4)], SamplingParams(max_tokens=20, ignore_eos=True))

    _, _, wanted, found = both(folder, work)
    same(wanted, found)
    assert [o.finish_reason for o in found] == ["error", "length"] and len(found[0].token_ids) == 5


# --------------------------------------------------------------------------------------- doubts and graphs


@pytest.mark.parametrize("mode", ["full", "beacon", "random-query", "staged"])
def test_a_row_fed_with_a_doubtful_token_is_computed_again(folder, mode, monkeypatch):
    """Few candidates are looked at, so that nearly every token is in doubt."""
    monkeypatch.setattr(sampling, "DEPTH", 2)
    monkeypatch.setattr(sampling, "FIRST_LOOK", (6, 16))
    doubts = []
    second_look = answers.second_look

    def noted(logits, draws):
        doubts.append(len(draws))
        return second_look(logits, draws)

    monkeypatch.setattr(answers, "second_look", noted)
    params = SamplingParams(max_tokens=90, ignore_eos=True, temperature=0.8, top_p=0.9, seed=4, logprobs=1)

    def work(llm: LLM):
        return llm.generate([prompt_of(n) for n in (5, 30, 18)], params)

    doubts.clear()
    without, with_it, wanted, found = both(folder, work, **MODES[mode])
    assert len(doubts) > 20
    same(wanted, found, bits=False)
    for name in ("output_tokens", "evictions", "peak_cached_tokens"):
        assert counts(with_it)[name] == counts(without)[name], name


@pytest.mark.parametrize("mode", ["full", "beacon", "recent"])
@pytest.mark.parametrize("how", PARAMS)
def test_recorded_steps_find_the_tokens_that_the_host_has_not_read(folder, mode, how):
    prompts = [prompt_of(n) for n in (3, 17, 40, 8, 9)]
    params = [
        SamplingParams(max_tokens=m, ignore_eos=True, logprobs=1, **PARAMS[how]) for m in (70, 20, 64, 5, 33)
    ]
    replayed = []

    def work(llm: LLM):
        def record(forward):
            def replay():
                replayed.append(1)
                return forward()

            return replay

        llm.engine.graphs = graphs_of(llm, record, most=5)
        llm.engine.graphs.record_all()
        return llm.generate(prompts, params)

    _, _, wanted, found = both(folder, work, **MODES[mode])
    same(wanted, found)
    assert len(replayed) > 100


# ------------------------------------------------------------------------------------ aborts, and at random


@pytest.mark.parametrize("mode", ["full", "beacon"])
def test_an_abort_leaves_what_was_shown(folder, mode):
    """Whoever aborts after n tokens has n tokens, and the evictions that lie before them."""

    def work(llm: LLM):
        ended = []
        for count in (1, 2, 39, 40, 41, 42, 55):
            params = SamplingParams(max_tokens=90, ignore_eos=True)
            request, other = llm.submit([prompt_of(7), prompt_of(12)], params)
            for seen, _ in llm.run([request]):
                if len(seen.output_token_ids) == count:
                    break
            ended.append((request.output_token_ids, [event.position for event in request.trace]))
            for _ in llm.run([other]):
                pass
            ended.append((other.output_token_ids, [event.position for event in other.trace]))
        return ended

    _, _, wanted, found = both(folder, work, **MODES[mode])
    assert found == wanted


@pytest.mark.parametrize("mode", ["full", "beacon", "protect 4", "snapkv"])
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_arrivals_ends_and_aborts_at_random(folder, mode, data):
    """Small pools, so that the full cache preempts; each request is what it is alone."""
    seats = data.draw(st.sampled_from([1, 2, 4]))
    pages = data.draw(st.sampled_from([12, 16, 60]))
    lengths = st.sampled_from([1, 7, 15, 16, 17, 33, 40])
    asks = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 0, 3, 9]),  # arrives at this step
                lengths,
                st.sampled_from([1, 2, 20, 41, 50]),  # max_tokens
                st.sampled_from([None, 4, 11, 39]),  # ends with the token at this place
                st.sampled_from([1, 1, 2]),
            ),
            min_size=2,
            max_size=6,
        )
    )
    aborts = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), max_size=2))
    options = SIZES | MODES[mode] | dict(max_num_seqs=seats, num_pages=pages)
    llm = LLM(folder, overlap=True, **options)
    coming = sorted(asks, key=lambda ask: ask[0])
    made = []
    news: list | None = []
    steps = 0
    while coming or news is not None:
        while coming and (steps >= coming[0][0] or not llm.engine.scheduler.running):
            _, length, most, end, n = coming.pop(0)
            alone = _alone(folder, mode, length, 50)
            ends = [alone[end]] if end is not None else []
            params = SamplingParams(max_tokens=most, ignore_eos=True, stop_token_ids=ends, n=n)
            made += llm.submit([prompt_of(length)], params)
        for when, which in aborts:
            if when == steps and which < len(made):
                llm.engine.abort(made[which])
        news = llm.engine.step()
        prove(llm.engine.scheduler)
        steps += 1
        assert steps < 2000, "it hangs"
    idle(llm)
    for request in made:
        alone = _alone(folder, mode, len(request.prompt_token_ids), 50)
        output = request.output_token_ids
        ends = request.params.stop_token_ids
        place = next((i for i, token in enumerate(alone) if token in ends), len(alone))
        whole = alone[: min(request.max_tokens, place + 1)]
        assert output == whole[: len(output)]
        assert request.finish_reason == "abort" or output == whole
        assert request.finish_reason == ("abort" if output != whole else request.finish_reason)


_ALONE: dict[tuple, list[int]] = {}


def _alone(folder, mode: str, length: int, most: int) -> list[int]:
    """The output of a prompt that nobody shares a step with, without overlap."""
    key = (mode, length, most)
    if key not in _ALONE:
        llm = LLM(folder, overlap=False, **SIZES, **MODES[mode])
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        _ALONE[key] = llm.generate([prompt_of(length)], params)[0].token_ids
    return _ALONE[key]


def test_a_pool_that_runs_short_is_looked_at_with_nothing_in_flight(folder):
    """Preemptions come where they come without overlap."""
    draw = random.Random(5)
    prompts = [prompt_of(draw.randint(5, 40)) for _ in range(6)]
    params = [SamplingParams(max_tokens=draw.randint(20, 60), ignore_eos=True) for _ in prompts]

    def work(llm: LLM):
        return llm.generate(prompts, params)

    options = dict(max_num_seqs=4, num_pages=16)
    without, with_it, wanted, found = both(folder, work, **options)
    same(wanted, found, bits=False)
    assert with_it.engine.scheduler.preemptions == without.engine.scheduler.preemptions > 0
    assert counts(with_it) == counts(without)
