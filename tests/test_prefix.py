"""The prefix cache: what is taken over gives the same tokens, log-probabilities and kept positions.

Every output is compared with that of an engine without the cache which serves one prompt at a time. Pages
that are free hold NaN, so that a page which was forgotten and is read all the same would be seen at once.
"""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proofs import prove
from tiny import prompt_of, tiny_folder

from nanobeacon import LLM, SamplingParams
from nanobeacon.pages import PagePool
from nanobeacon.prefix import PrefixCache
from nanobeacon.request import Request

PAGE, CHUNK = 8, 16
SIZES = dict(dtype="float32", device="cpu", page_size=PAGE, chunk=CHUNK)
FULL = {}
BEACON = dict(budget=40, window=4, trace=True)
MODES = {
    "full": FULL,
    "beacon": BEACON,
    "beacon, first 37 protected": BEACON | dict(protect=37),
    "beacon, first 4 protected": BEACON | dict(protect=4),
    **{name: BEACON | dict(policy=name) for name in ("recent", "initial", "snapkv", "rkv", "rpc")},
    "random": dict(budget=40, policy="random", protect=37, trace=True),
    "streaming": dict(budget=40, policy="streaming", protect=37, trace=True),
    "random-query": BEACON | dict(policy="random-query"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("prefix"), "llama")


def greedy(max_tokens: int = 60, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0, n=n, seed=5)


def poisoned(llm: LLM) -> LLM:
    """Free pages hold NaN from now on."""
    cache, pool = llm.engine.cache, llm.engine.pool
    give_back = pool._give_back

    def poison(page: int) -> None:
        cache.keys[:, :, page] = torch.nan
        cache.values[:, :, page] = torch.nan
        give_back(page)

    pool._give_back = poison
    cache.keys[:], cache.values[:] = torch.nan, torch.nan
    return llm


@functools.cache
def alone(folder, mode: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    """What a prompt gives without the cache and without neighbours."""
    llm = LLM(folder, max_num_seqs=1, prefix_cache=False, **SIZES, **MODES[mode])
    (request,) = llm.submit([list(prompt)], greedy(max_tokens))
    for _ in llm.run([request]):
        pass
    assert llm.stats.prefix_tokens == 0
    return request


def compare(request: Request, wanted: Request) -> None:
    """Equal tokens, log-probabilities and kept positions, as far as the request has come."""
    count = len(request.output_token_ids)
    assert request.output_token_ids == wanted.output_token_ids[:count]
    got = torch.tensor([own for own, _ in request.logprobs])
    assert torch.allclose(got, torch.tensor([own for own, _ in wanted.logprobs[:count]]), atol=1e-4)
    for ours, theirs in zip(request.trace, wanted.trace, strict=False):
        assert ours.position == theirs.position and torch.equal(ours.kept, theirs.kept)
        assert torch.equal(ours.beacons, theirs.beacons)
    if request.finish_reason == "length":
        assert len(request.trace) == len(wanted.trace)


def run(llm: LLM, *prompts: list[int], n: int = 1) -> list[Request]:
    """Serve prompts together, with every proof after every step."""
    requests = llm.submit([list(p) for p in prompts], greedy(n=n))
    while any(r.finish_reason is None for r in requests):
        llm.engine.step()
        prove(llm.engine.scheduler)
    return requests


@pytest.mark.parametrize("mode", MODES)
def test_what_begins_alike_gives_the_same_with_and_without(folder, mode):
    """The same prompt twice, a longer one over a shorter, the reverse, and prompts that part inside a page,
    at a page's border and at a chunk's."""
    llm = poisoned(LLM(folder, **SIZES, **MODES[mode]))
    whole = prompt_of(70)
    parted = [whole[:at] + prompt_of(30, seed=at) for at in (3 * CHUNK + 3, 2 * CHUNK + PAGE, 2 * CHUNK)]
    for prompt in (whole[:50], whole[:50], whole, whole[:35], *parted, whole[: 2 * CHUNK]):
        before = llm.stats.prefix_tokens
        (request,) = run(llm, prompt)
        compare(request, alone(folder, mode, tuple(prompt), 60))
        found = llm.stats.prefix_tokens - before
        assert found < len(prompt)
        if mode == "full":
            assert found % PAGE == 0
        elif "random" not in mode and mode != "streaming":
            assert found % CHUNK == 0
    shares = mode not in ("beacon, first 4 protected", "random-query")
    assert (llm.stats.prefix_tokens > 0) == shares
    assert llm.engine.pool.used_count == 0


@pytest.mark.parametrize(
    "mode, twice", [("full", 64), ("beacon", 64), ("beacon, first 37 protected", 32), ("streaming", 32)]
)
def test_as_much_is_found_as_can_be_shared(folder, mode, twice):
    """Of 70 tokens read twice: up to the last border below the prompt's end and within what is protected."""
    llm = LLM(folder, **SIZES, **MODES[mode])
    run(llm, prompt_of(70))
    assert llm.stats.prefix_tokens == 0 and llm.stats.prompt_tokens == 70
    run(llm, prompt_of(70))
    assert llm.stats.prefix_tokens == twice
    assert llm.stats.prompt_tokens == 140 - twice


@pytest.mark.parametrize("mode", ["full", "beacon"])
def test_a_prompt_of_whole_pages_computes_its_end(folder, mode):
    """At least one token is computed; with a query buffer the whole last chunk."""
    llm = LLM(folder, **SIZES, **MODES[mode])
    for _ in range(2):
        (request,) = run(llm, prompt_of(4 * CHUNK))
        compare(request, alone(folder, mode, tuple(prompt_of(4 * CHUNK)), 60))
    assert llm.stats.prefix_tokens == (4 * CHUNK - PAGE if mode == "full" else 3 * CHUNK)


def test_the_next_turn_finds_what_was_answered(folder):
    llm = LLM(folder, **SIZES)
    prompt = prompt_of(20)
    (first,) = run(llm, prompt)
    turn = prompt + first.output_token_ids + prompt_of(9)
    (second,) = run(llm, turn)
    compare(second, alone(folder, "full", tuple(turn), 60))
    assert llm.stats.prefix_tokens == (20 + 59) // PAGE * PAGE  # the last token that is sampled is never fed


@pytest.mark.parametrize("mode", ["full", "beacon", "beacon, first 37 protected"])
def test_completions_of_a_known_prompt_share_it(folder, mode):
    llm = poisoned(LLM(folder, **SIZES, **MODES[mode]))
    run(llm, prompt_of(70))
    for request in run(llm, prompt_of(70), n=3):
        compare(request, alone(folder, mode, tuple(prompt_of(70)), 60))
    assert llm.stats.prompt_tokens < 140


@pytest.mark.parametrize("mode", ["full", "beacon"])
def test_requests_admitted_together_share_a_header_that_one_of_them_has_read(folder, mode):
    """All have seats at once; those whose turn comes after the first step find what it computed."""
    llm = poisoned(LLM(folder, max_num_seqs=8, **SIZES, **MODES[mode]))
    llm.engine.scheduler.max_prefill_tokens = 2 * CHUNK
    header = prompt_of(3 * CHUNK)
    prompts = [header + prompt_of(9, seed=s) for s in range(8)]
    for request, prompt in zip(run(llm, *prompts), prompts, strict=True):
        compare(request, alone(folder, mode, tuple(prompt), 60))
    assert llm.stats.prefix_tokens >= 6 * 2 * CHUNK
    assert llm.stats.prompt_tokens + llm.stats.prefix_tokens == sum(map(len, prompts))


@pytest.mark.parametrize("mode", ["full", "beacon"])
def test_a_leader_that_leaves_hands_on_what_it_has_read(folder, mode):
    llm = poisoned(LLM(folder, max_num_seqs=3, **SIZES, **MODES[mode]))
    requests = llm.submit([prompt_of(70)], greedy(n=3))
    for _ in range(2):
        llm.engine.step()
    llm.engine.abort(requests[0])
    prove(llm.engine.scheduler)
    assert requests[1].num_computed == 2 * CHUNK and requests[2].leader is requests[1]
    for _ in llm.run(requests[1:]):
        prove(llm.engine.scheduler)
    for request in requests[1:]:
        compare(request, alone(folder, mode, tuple(prompt_of(70)), 60))


def test_a_preempted_request_finds_its_own_pages(folder):
    llm = poisoned(LLM(folder, max_num_seqs=3, num_pages=22, **SIZES))
    prompts = [prompt_of(40, seed=s) for s in range(3)]
    for request, prompt in zip(run(llm, *prompts), prompts, strict=True):
        compare(request, alone(folder, "full", tuple(prompt), 60))
    assert llm.engine.scheduler.preemptions > 0 and llm.stats.prefix_tokens > 0


def test_switched_off_nothing_is_found(folder):
    llm = LLM(folder, prefix_cache=False, **SIZES)
    run(llm, prompt_of(70))
    run(llm, prompt_of(70))
    assert llm.stats.prefix_tokens == 0 and not llm.engine.pool.idle
    with pytest.raises(ValueError, match="prefix_cache='no'"):
        LLM(folder, prefix_cache="no", **SIZES)


def test_score_takes_over_what_is_known(folder):
    prompt, given_tokens = prompt_of(70), prompt_of(50, seed=1)
    wanted = LLM(folder, prefix_cache=False, **SIZES, **BEACON).score([prompt], [given_tokens])
    llm = LLM(folder, **SIZES, **BEACON)
    run(llm, prompt)
    assert torch.allclose(llm.score([prompt], [given_tokens])[0], wanted[0], atol=1e-4)
    assert llm.stats.prefix_tokens == 4 * CHUNK


def test_dynamic_rope_shares_only_what_has_the_same_keys(tmp_path):
    """Beyond the context every key follows the prompt's length; within it they are those of any prompt."""
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = tiny_folder(tmp_path, "llama", max_position_embeddings=48, rope_parameters=scaling)
    llm = LLM(folder, **SIZES)
    found = []
    for length in (40, 44, 80, 88, 80, 60):
        before = llm.stats.prefix_tokens
        (request,) = llm.submit([prompt_of(100)[:length]], greedy(8))
        for _ in llm.run([request]):
            pass
        alone_llm = LLM(folder, prefix_cache=False, max_num_seqs=1, **SIZES)
        (wanted,) = alone_llm.submit([prompt_of(100)[:length]], greedy(8))
        for _ in alone_llm.run([wanted]):
            pass
        compare(request, wanted)
        found.append(llm.stats.prefix_tokens - before)
    assert found == [0, 40, 0, 0, 72, 0]


def test_kept_rows_are_bounded_counted_and_go_with_their_pages(folder):
    llm = LLM(folder, max_num_seqs=1, max_model_len=400, **SIZES, **BEACON)
    prefix, row_bytes = llm.engine.scheduler.prefix, llm.engine.queries.row_bytes
    run(llm, prompt_of(70))
    assert len(prefix.kept_rows) == 4
    assert llm.stats.query_buffer_bytes == (1 + 4) * row_bytes
    for seed in range(1, 8):
        run(llm, prompt_of(150, seed=seed))
    assert len(prefix.kept_rows) <= 16
    assert llm.stats.query_buffer_bytes <= (1 + 16) * row_bytes
    prefix.make_room(llm.engine.pool.num_pages - 1)
    assert not prefix.kept_rows and not llm.engine.pool.idle and len(prefix.free_rows) == 16
    prove(llm.engine.scheduler)


# The tree by itself.


def held(pool: PagePool, prefix: PrefixCache, tokens: list[int]) -> Request:
    """A request that has computed all its tokens."""
    request = Request(0, tokens, SamplingParams(), 1, len(tokens))
    request.pages = pool.allocate(-(-len(tokens) // prefix.page_size))
    request.num_computed = request.cached_length = len(tokens)
    prefix.insert(request)
    return request


def test_equal_hashes_are_not_equal_tokens():
    """-1 and -2 have the same hash in CPython, and so have tuples of them."""
    pool = PagePool(20)
    prefix = PrefixCache(pool, page_size=1, chunk=1)
    assert hash((-1,)) == hash((-2,))
    held(pool, prefix, [-1, 5, 6])
    assert len(prefix.find(Request(1, [-1, 5, 6, 7], SamplingParams(), 1, 4)).pages) == 3
    assert prefix.find(Request(1, [-2, 5, 6, 7], SamplingParams(), 1, 4)).pages == []


def test_the_least_recently_used_is_forgotten_first_and_leaves_before_their_parents():
    pool = PagePool(20)
    prefix = PrefixCache(pool, page_size=2, chunk=2)
    old, new = held(pool, prefix, [1, 2, 3, 4, 5, 6]), held(pool, prefix, [7, 8, 9, 10])
    for request in (old, new):
        pool.release(reversed(request.pages))
    assert pool.used_count == 0 and pool.available == 19
    order = [*reversed(old.pages), *reversed(new.pages)]
    for i, page in enumerate(order):
        prefix.make_room(pool.free_count + 1)
        prefix.check()
        pool.check([])
        assert page not in pool.kept and pool.kept == set(order[i + 1 :])


def test_two_that_computed_the_same_side_by_side_keep_their_own_pages():
    pool = PagePool(20)
    prefix = PrefixCache(pool, page_size=2, chunk=2)
    first, second = held(pool, prefix, [1, 2, 3, 4]), held(pool, prefix, [1, 2, 3, 4, 5, 6])
    assert not set(first.pages) & set(second.pages)
    found = prefix.find(Request(1, [1, 2, 3, 4, 5, 6, 7], SamplingParams(), 1, 7))
    assert found.pages == [*first.pages, second.pages[2]]
    pool.release(reversed(first.pages))
    prefix.make_room(pool.free_count + 2)  # the parents of a page that is held
    prefix.check()
    pool.check([second.pages])
    assert not prefix.find(Request(1, [1, 2, 3], SamplingParams(), 1, 3)).pages
    pool.release(reversed(second.pages))
    pool.check([])
    assert pool.free_count == 19


# Everything at random.

HEADERS = [prompt_of(64, seed=s) for s in (0, 1)]
LENGTHS = (PAGE - 1, PAGE, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + PAGE, 3 * CHUNK, 3 * CHUNK + 1)
PROMPTS = st.builds(
    lambda header, length, tail: tuple(HEADERS[header][:length] + prompt_of(5, seed=9)[:tail]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from(LENGTHS),
    st.sampled_from([0, 1, 5]),
)


@pytest.mark.parametrize("mode", ["full", "beacon", "beacon, first 37 protected", "snapkv", "streaming"])
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_arrivals_aborts_and_a_tiny_pool_at_random(folder, mode, data):
    seats = data.draw(st.sampled_from([1, 2, 3]))
    least = 15  # pages of the longest prompt and its output
    pages = data.draw(st.sampled_from([least, least + 3, 2 * least, 60]))
    llm = poisoned(LLM(folder, max_num_seqs=seats, num_pages=pages, **SIZES, **MODES[mode]))
    coming = data.draw(st.lists(st.tuples(st.sampled_from([0, 0, 3, 9]), PROMPTS), min_size=3, max_size=7))
    aborts = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)), max_size=2))
    made: list[Request] = []
    steps = 0
    news: list[Request] | None = []
    while coming or news is not None:
        if coming and (steps >= coming[0][0] or not llm.engine.scheduler.running):
            n = data.draw(st.sampled_from([1, 1, 3]))
            made += llm.submit([list(coming.pop(0)[1])], greedy(60, n))
        for when, which in aborts:
            if when == steps:
                llm.engine.abort(made[which % len(made)])
        news = llm.engine.step()
        prove(llm.engine.scheduler)
        steps += 1
        assert steps < 3000, "it hangs"
    assert llm.engine.pool.used_count == 0
    for request in made:
        assert request.finish_reason in ("length", "abort")
        compare(request, alone(folder, mode, tuple(request.prompt_token_ids), 60))
