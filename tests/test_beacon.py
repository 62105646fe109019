"""The engine under a budget against the oracle: kept positions, tokens, bounds, and a masked dense model."""

import dataclasses

import pytest
import torch
from comparing import GREEDY, compare, engine_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Oracle, masked_dense_logits
from proofs import prove
from tiny import FAMILIES, prompt_of, tiny_folder

from nanobeacon import LLM, Policy, SamplingParams

# Score differences between float32 and float64, in each policy's unit (log units where max-pooled).
TOLERANCE = {"beacon-mean": 1e-6, "rpc": 1e-6, "snapkv": 1e-6, "rkv": 1e-7}
POLICIES = (
    "beacon",
    "beacon-half",
    "beacon-mean",
    "recent",
    "initial",
    "random-query",
    "rpc",
    "snapkv",
    "rkv",
    "streaming",
    "random",
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [64, 128, 256])
def test_kept_positions_and_tokens_equal_the_oracle(models, family, budget):
    """Prompts shorter than 16 tokens, longer than a chunk, longer than the budget; alone and in a batch."""
    folder, config, state = models[family]
    prompts = [prompt_of(n) for n in (5, 40, budget + 30)]
    count = budget + 40 if budget < 256 else 300
    oracle = Oracle(config, state, "beacon", budget, chunk=64)
    wanted = [oracle.generate(p, count) for p in prompts]
    params = SamplingParams(max_tokens=count, **GREEDY)
    together = engine_for(folder, budget=budget, chunk=64).generate(prompts, params)
    alone = [engine_for(folder, budget=budget, chunk=64).generate([p], params)[0] for p in prompts[:2]]
    compared = [compare(w, o) for w, o in zip(wanted + wanted[:2], together + alone, strict=True)]
    assert sum(compared) >= 0.9 * sum(len(w.events) for w in wanted + wanted[:2])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("protect", ["prompt", 4])
def test_every_policy_equals_the_oracle(models, policy, protect):
    folder, config, state = models["qwen3"]
    prompt, count, budget = prompt_of(90), 100, 72
    llm = engine_for(folder, budget=budget, policy=policy, protect=protect, chunk=64)
    (request,) = llm.submit([prompt], SamplingParams(max_tokens=count, seed=3, **GREEDY))

    def choose_random(t, layer, kv_head, candidates, k):
        seed = int(request.chance("random eviction", t + 1) * 2**53)
        shape = (config["num_hidden_layers"], config["num_key_value_heads"], len(candidates))
        draws = torch.rand(shape, generator=torch.Generator().manual_seed(seed))[layer, kv_head]
        return [candidates[i] for i in draws.argsort(descending=True, stable=True)[:k].tolist()]

    def draw_queries(t, layer, head, m):
        kept = []
        for position in range(t + 1):
            slot = position if position < m else int(request.chance("reservoir", position) * (position + 1))
            if position < m:
                kept.append(position)
            elif slot < m:
                kept[slot] = position
        return kept

    oracle = Oracle(
        config, state, policy, budget, protect=protect, chunk=64,
        choose_random=choose_random, draw_queries=draw_queries,
    )  # fmt: skip
    wanted = oracle.generate(prompt, count)
    for _ in llm.run([request]):
        pass
    from nanobeacon.llm import output_of

    output = output_of(request)
    if policy not in ("beacon", "beacon-mean"):  # what is left in a ring has no order worth comparing
        for event in wanted.events:
            event.beacons = [[[] for _ in heads] for heads in event.beacons]
        output = dataclasses.replace(
            output, trace=[dataclasses.replace(e, beacons=e.beacons[..., :0]) for e in output.trace]
        )
    assert len(wanted.events) >= 3
    assert compare(wanted, output, TOLERANCE.get(policy, 2e-5)) >= 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protect", ["prompt", 4])
def test_compacted_cache_equals_a_masked_dense_model(models, family, protect):
    folder, config, state = models[family]
    prompts, budget = [prompt_of(21), prompt_of(150)], 48
    given = [prompt_of(150, seed=4), prompt_of(60, seed=5)]
    llm = engine_for(folder, budget=budget, protect=protect, window=16, chunk=32, page_size=8)
    seen = {}
    requests = []
    for r, (prompt, forced) in enumerate(zip(prompts, given, strict=True)):
        params = SamplingParams(max_tokens=len(forced), logprobs=0).with_defaults({})
        (request,) = llm.engine.submit(prompt, params, forced=forced)
        request.on_logits = lambda i, logits, r=r: seen.__setitem__((r, i), logits.double())
        requests.append(request)
    for _ in llm.run(requests):
        pass
    for r, request in enumerate(requests):
        assert len(request.trace) >= 2
        dense = masked_dense_logits(config, state, prompts[r] + given[r][:-1], request.trace)
        dense = dense[len(prompts[r]) - 1 :]
        got = torch.stack([seen[r, i] for i in range(len(given[r]))])
        assert (got - dense).abs().max() / dense.abs().max() < 1e-4


@pytest.mark.parametrize("policy", POLICIES)
def test_budget_of_the_output_or_more_is_the_full_cache_bit_for_bit(models, policy):
    folder, _, _ = models["llama"]
    prompts = [prompt_of(n) for n in (3, 17, 40)]
    params = SamplingParams(max_tokens=60, logprobs=2, **GREEDY)
    full = LLM(folder, dtype="float32", device="cpu").generate(prompts, params)
    kept = LLM(folder, dtype="float32", device="cpu", policy=policy, budget=60).generate(prompts, params)
    assert [(o.token_ids, o.logprobs) for o in full] == [(o.token_ids, o.logprobs) for o in kept]


def test_what_is_kept_depends_on_the_request_alone(models):
    """Alone, in any batch, in any order, at any max_num_seqs, with other pages: the same kept positions."""
    folder, _, _ = models["qwen3"]
    prompts = [prompt_of(n) for n in (4, 33, 70, 100, 18)]
    params = SamplingParams(max_tokens=90, **GREEDY)
    wanted = engine_for(folder, budget=64, chunk=32, max_num_seqs=1).generate(prompts, params)
    for options, order in (
        (dict(max_num_seqs=5), [0, 1, 2, 3, 4]),
        (dict(max_num_seqs=2, page_size=8), [3, 1, 4, 0, 2]),
        (dict(max_num_seqs=3, num_pages=40), [4, 3, 2, 1, 0]),
    ):
        got = engine_for(folder, budget=64, chunk=32, **options).generate([prompts[i] for i in order], params)
        same = total = 0
        for i, output in zip(order, got, strict=True):
            assert [e.position for e in output.trace] == [e.position for e in wanted[i].trace]
            for a, b in zip(output.trace, wanted[i].trace, strict=True):
                same += (a.kept == b.kept).sum().item()
                total += a.kept.numel()
        assert same >= 0.999 * total
        assert [o.token_ids for o in got] == [wanted[i].token_ids for i in order]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.sampled_from([1, 7, 8, 9, 31, 32, 33, 50]), min_size=1, max_size=5),
    tokens=st.integers(1, 90),
    budget=st.sampled_from([24, 40, 64]),
    protect=st.sampled_from(["prompt", 0, 4, 20]),
    page_size=st.sampled_from([1, 8, 16]),
    max_num_seqs=st.integers(1, 4),
    stop_at=st.integers(0, 60),
)
def test_the_cache_never_exceeds_its_bound(
    models, lengths, tokens, budget, protect, page_size, max_num_seqs, stop_at
):
    """At every step: tokens <= protected + B_max, pages within the reservation, nothing preempted or lost."""
    folder, _, _ = models["llama"]
    llm = LLM(
        folder, dtype="float32", device="cpu", budget=budget, protect=protect, window=12, chunk=32,
        page_size=page_size, max_num_seqs=max_num_seqs,
    )  # fmt: skip
    engine = llm.engine
    requests = llm.submit([prompt_of(n) for n in lengths], SamplingParams(max_tokens=tokens, **GREEDY))
    for step, _ in enumerate(llm.run(requests)):
        prove(engine.scheduler)
        for r in engine.scheduler.running:
            assert r.cached_length <= r.protected + budget
            assert len(r.pages) == -(-engine.scheduler.tokens_held(r) // page_size)
        if step == stop_at:
            engine.abort(requests[0])
    assert engine.scheduler.preemptions == 0 and engine.pool.used_count == 0
    shape = llm.model_config
    slot_bytes = 2 * shape.head_dim * 4 + 4  # key, value and position
    bytes_each = page_size * shape.num_layers * shape.num_kv_heads * slot_bytes
    assert llm.stats.peak_kv_bytes % bytes_each == 0
    worst = sum(
        -(-min(n + tokens, (n if protect == "prompt" else protect) + budget) // page_size) for n in lengths
    )
    assert llm.stats.peak_kv_bytes <= worst * bytes_each


def test_a_request_that_ends_with_a_step_does_not_evict_in_it(models):
    folder, _, _ = models["llama"]
    for count, events in ((64, 0), (65, 0), (66, 1), (73, 1), (74, 2)):
        llm = engine_for(folder, budget=64)
        (output,) = llm.generate([prompt_of(10)], SamplingParams(max_tokens=count, **GREEDY))
        assert len(output.trace) == events == llm.stats.evictions, count


def test_completions_after_an_eviction_inside_the_prompt(models):
    """protect=4 and a prompt longer than the budget: forks carry on from an evicted cache."""
    folder, _, _ = models["qwen2"]
    params = SamplingParams(max_tokens=50, temperature=0.7, seed=1, n=3, ignore_eos=True)
    options = dict(budget=48, window=16, protect=4, chunk=32, page_size=4)
    together = LLM(folder, dtype="float32", device="cpu", **options).generate([prompt_of(101)], params)
    one = LLM(folder, dtype="float32", device="cpu", max_num_seqs=1, **options).generate(
        [prompt_of(101)], params
    )
    assert [o.token_ids for o in together] == [o.token_ids for o in one]


@pytest.mark.parametrize("splits", [(0, 32), (31, 1), (8, 24), (16, 0)])
def test_other_splits_of_beacons_and_recents_run(models, splits):
    folder, config, state = models["llama"]
    beacons, recents = splits
    options = dict(budget=64, beacons=beacons, recents=recents)
    (output,) = engine_for(folder, **options).generate(
        [prompt_of(20)], SamplingParams(max_tokens=120, **GREEDY)
    )
    assert len(output.trace) == 7
    if beacons and recents:
        wanted = Oracle(config, state, "beacon", 64, beacons=beacons, recents=recents).generate(
            prompt_of(20), 120
        )
        compare(wanted, output)


def test_a_policy_of_ones_own(models):
    """Any Policy works, not only the table's: here, recents pooled by sum, with a small window."""
    folder, _, _ = models["llama"]
    policy = Policy("mine", select="none", beacons=0, recents=12, pool="sum", window=4)
    (output,) = engine_for(folder, budget=32, policy=policy).generate(
        [prompt_of(20)], SamplingParams(max_tokens=60, **GREEDY)
    )
    assert output.trace[0].kept.shape == (2, 2, 20 + 28)


def test_dynamic_rope_beacons_are_rotated_like_the_model_does(tmp_path):
    folder = tiny_folder(
        tmp_path, "llama", max_position_embeddings=64, rope_scaling={"rope_type": "dynamic", "factor": 4.0}
    )
    llm = engine_for(folder, budget=48, window=16)
    assert llm.engine.max_model_len == 256
    (output,) = llm.generate([prompt_of(100)], SamplingParams(max_tokens=100, **GREEDY))
    assert len(output.trace) > 5 and output.finish_reason == "length"


@pytest.mark.parametrize("protect", ["prompt", 4])
@pytest.mark.parametrize("policy", [*POLICIES, None])
def test_a_given_output_fed_many_tokens_at_once_is_read_as_token_by_token(models, policy, protect):
    """Between two reductions or evictions nothing is removed, so that a step may feed all up to the next."""
    eviction = {"policy": policy, "budget": 128, "protect": protect} if policy else {}
    prompts = [prompt_of(n, seed=n) for n in (5, 150, 40)]
    given = [prompt_of(n, seed=n) for n in (300, 200, 1)]
    greedy = SamplingParams(seed=7, logprobs=0, **GREEDY).with_defaults({})
    params = [dataclasses.replace(greedy, max_tokens=len(g)) for g in given]
    seen = []
    for ahead in (None, lambda request: 1):
        llm = engine_for(models["qwen3"][0], num_pages=30 if policy is None else 200, **eviction)
        llm.engine.evictor.ahead = ahead or llm.engine.evictor.ahead
        pairs = zip(prompts, params, given, strict=True)
        requests = [llm.engine.submit(p, how, forced=g)[0] for p, how, g in pairs]
        steps = 0
        while any(r.finish_reason is None for r in requests):
            llm.engine.step()
            steps += 1
        assert [r.output_token_ids for r in requests] == given
        scores = [torch.tensor([own for own, _ in r.logprobs]) for r in requests]
        seen.append((steps, scores, [[e.kept.tolist() for e in r.trace] for r in requests]))
    assert seen[0][0] < seen[1][0] / 5
    torch.testing.assert_close(seen[0][1], seen[1][1], atol=2e-5, rtol=1e-5)
    assert seen[0][2] == seen[1][2] and (policy is None) == (not seen[0][2][0])
    assert policy is not None or llm.engine.scheduler.preemptions > 0
