"""Several scores that share the free slots: against the oracle, against one score, what is refused."""

import pytest
import torch
from comparing import GREEDY, compare, engine_for
from oracle import Oracle
from tiny import prompt_of

from nanobeacon import Policy, SamplingParams, Stage
from nanobeacon.measure import tried
from nanobeacon.observation import EMPTY, SideBySide
from nanobeacon.policies import EvictionSettings, settle
from nanobeacon.request import Request


@pytest.mark.parametrize("protect", ["prompt", 4])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_beacons_first_equals_the_oracle(models, family, protect):
    """Prompts below and above a chunk, in one batch; the first 20 of 31 free slots go to the beacons."""
    folder, config, state = models[family]
    policy = Policy("mine", beacons=24, recents=8, stages=(Stage(20), tried.NEIGHBOURHOOD))
    settings = dict(budget=72, protect=protect, chunk=64)
    prompts = [prompt_of(90), prompt_of(7, seed=3)]
    params = SamplingParams(max_tokens=110, **GREEDY)
    oracle = Oracle(config, state, "beacons-first", beacons=24, recents=8, first=20, **settings)
    wanted = [oracle.generate(prompt, 110) for prompt in prompts]
    outputs = engine_for(folder, policy=policy, **settings).generate(prompts, params)
    compared = [compare(w, o) for w, o in zip(wanted, outputs, strict=True)]
    assert sum(len(w.events) for w in wanted) >= 8
    assert sum(compared) >= 0.7 * sum(len(w.events) for w in wanted)


@pytest.mark.parametrize("budget, first", [(64, 96), (72, 500), (128, 96)])
def test_with_few_free_slots_the_first_stage_has_them_all(models, budget, first):
    """And then nobody asks the second."""
    folder = models["qwen2"][0]
    staged = Policy("mine", beacons=24, recents=8, stages=(Stage(first), tried.NEIGHBOURHOOD))
    prompts = [prompt_of(70), prompt_of(3)]
    params = SamplingParams(max_tokens=300, **GREEDY)
    alone = engine_for(folder, policy=tried.beacon_24_8, budget=budget, chunk=64).generate(prompts, params)
    llm = engine_for(folder, policy=staged, budget=budget, chunk=64)
    asked = []
    scores = llm.engine.evictor.ranker._scores
    llm.engine.evictor.ranker._scores = lambda due, number: asked.append(number) or scores(due, number)
    together = llm.generate(prompts, params)
    assert set(asked) == {0}
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert len(ours.trace) == len(theirs.trace) > 1
        for a, b in zip(ours.trace, theirs.trace, strict=True):
            assert torch.equal(a.kept, b.kept) and torch.equal(a.beacons, b.beacons)


def test_one_stage_is_what_the_policy_says_without(models):
    folder = models["llama"][0]
    fields = dict(domain="evictable", group="layer", pool="sum", smoothing="avg")
    as_rpc = Policy("mine", select="none", beacons=0, recents=0, stages=(Stage(latest=32, **fields),))
    params = SamplingParams(max_tokens=150, **GREEDY)
    outputs = [
        engine_for(folder, policy=policy, budget=64).generate([prompt_of(40)], params)[0]
        for policy in (as_rpc, "rpc")
    ]
    ours, theirs = outputs
    assert ours.token_ids == theirs.token_ids and len(ours.trace) == len(theirs.trace) > 3
    assert all(torch.equal(a.kept, b.kept) for a, b in zip(ours.trace, theirs.trace, strict=True))


@pytest.mark.parametrize("protect", ["prompt", 4])
def test_a_score_of_ones_own_sees_what_each_stage_says(models, protect):
    """Half of the slots of every head by the first stage, by hand: as the row of the table does it."""
    folder, config, _ = models["llama"]
    shares = [[0.5] * config["num_key_value_heads"]] * config["num_hidden_layers"]
    params = SamplingParams(max_tokens=170, **GREEDY)
    prompts = [prompt_of(80), prompt_of(9)]
    ours, theirs = (
        engine_for(folder, policy=policy, budget=72, protect=protect).generate(prompts, params)
        for policy in (tried.by_shares(shares), "beacon-half")
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids and len(one.trace) == len(other.trace) > 3
        assert all(torch.equal(a.kept, b.kept) for a, b in zip(one.trace, other.trace, strict=True))


def test_shares_are_learnt_of_every_head(models, tmp_path):
    folder, config, _ = models["qwen3"]
    shares = tried.learn(str(folder), prompt_of(30), tokens=200, budget=64)
    assert len(shares) == config["num_hidden_layers"]
    assert all(len(layer) == config["num_key_value_heads"] for layer in shares)
    assert {share for layer in shares for share in layer} <= set(tried.SHARES)


@pytest.mark.parametrize("front", [dict(beacons=4, recents=4), dict(select="first", beacons=3, recents=2)])
def test_the_ring_stands_behind_what_the_policy_keeps(front):
    policy = Policy("mine", stages=(Stage(1), Stage(latest=5)), **front)
    settings = EvictionSettings(policy, budget=48)
    assert settings.capacity == policy.observed + 5
    request = Request(0, [1] * 10, SamplingParams(), max_tokens=90, protected=10)
    request.num_computed = request.cached_length = 20
    request.buffer_count = policy.beacons
    rotations = SideBySide(settings).rotations(request)
    ring = rotations[policy.observed :]
    assert len(rotations) == settings.capacity and sorted(ring) == [15, 16, 17, 18, 19]
    assert [ring[position % 5] for position in range(15, 20)] == [15, 16, 17, 18, 19]
    assert all(at == EMPTY or at <= 19 for at in rotations)


@pytest.mark.parametrize(
    "slots, free, left, wanted",
    [(96, 31, 31, 31), (96, 200, 200, 96), (96, 200, 50, 50), (0.5, 31, 31, 15), (None, 31, 7, 7)],
)
def test_slots_of_a_stage(slots, free, left, wanted):
    assert Stage(slots).slots_of(free, left) == wanted


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda: Stage(0), "stage: slots=0"),
        (lambda: Stage(1.5), "stage: slots=1.5"),
        (lambda: Stage(True), "stage: slots=True"),
        (lambda: Stage(latest=0), "stage: latest=0"),
        (lambda: Stage(group="median"), "stage: group='median'"),
        (lambda: Policy("mine", stages=[Stage()]), "a tuple of Stage"),
        (lambda: Policy("mine", stages=(Stage(5),)), "slots=None"),
        (lambda: Policy("mine", stages=(Stage(), Stage())), "slots=None"),
        (lambda: Policy("mine", stages=(Stage(),), pool="sum"), "pool='sum'"),
        (lambda: Policy("mine", stages=(Stage(5), Stage()), score=len), "leave slots out"),
        (lambda: Policy("mine", ranking="random", stages=(Stage(),)), "ranking='queries'"),
        (lambda: Policy("mine", stages=(Stage(),), attention_share=0.5), "attention_share"),
        (lambda: Policy("mine", select="none", beacons=0, recents=0, stages=(Stage(),)), "there are none"),
    ],
)
def test_impossible_stages_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong()


def test_unscored_newest_tokens_of_a_stage_always_stay():
    stages = (Stage(4), Stage(latest=40, domain="before-recents"))
    assert settle(Policy("mine", stages=stages), 96).window == 40
