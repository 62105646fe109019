"""A policy of the user's own: a function that scores slots, under every protection, batched, and by name."""

import sys
from types import ModuleType

import pytest
import torch
from tiny import prompt_of, tiny_folder

from nanobeacon import LLM, Policy, SamplingParams
from nanobeacon.policies import settle

GREEDY = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
NOBODY = dict(select="none", beacons=0, recents=0, window=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("own"), "qwen3")


def run(folder, policy, prompts, protect="prompt", **options):
    options = dict(budget=40, protect=protect, trace=True, page_size=8, chunk=32, **options)
    llm = LLM(folder, dtype="float32", device="cpu", policy=policy, **options)
    return llm, llm.generate(prompts, GREEDY)


def by_value_norm(slots):
    return slots.value_norms


def newest(slots):
    return slots.positions.float()


@pytest.mark.parametrize("protect", ["prompt", 4])
def test_a_score_by_age_keeps_what_streaming_keeps(folder, protect):
    prompts = [prompt_of(9), prompt_of(70)]
    own = run(folder, Policy("mine", score=newest, **NOBODY), prompts, protect)[1]
    streaming = run(folder, "streaming", prompts, protect)[1]
    for mine, theirs in zip(own, streaming, strict=True):
        assert mine.token_ids == theirs.token_ids and mine.trace
        assert all(torch.equal(a.kept, b.kept) for a, b in zip(mine.trace, theirs.trace, strict=True))


@pytest.mark.parametrize("protect", ["prompt", 4])
def test_a_policy_by_value_norm_keeps_the_longest_values_alone_and_in_a_batch(folder, protect):
    """The first eviction keeps the positions of the largest norms."""
    seen = []

    def score(slots):
        seen.append((slots.positions, slots.value_norms))
        return slots.value_norms

    policy = Policy("mine", score=score, **NOBODY)
    llm, (output,) = run(folder, policy, [prompt_of(20)], protect)
    positions, norms = seen[0]
    settings = llm.engine.config.eviction
    best = norms[0].sort(dim=-1, descending=True, stable=True).indices[..., : settings.kept - settings.window]
    chosen = positions[0].gather(-1, best).sort(-1).values
    first = output.trace[0].kept[..., settings.protected(20) :][..., : chosen.shape[-1]]
    assert torch.equal(first.long(), chosen)
    together = run(folder, policy, [prompt_of(50), prompt_of(20), prompt_of(3)], protect)[1]
    assert together[1].token_ids == output.token_ids
    assert all(torch.equal(a.kept, b.kept) for a, b in zip(together[1].trace, output.trace, strict=True))


def test_norms_are_those_of_the_vectors_in_the_cache(folder):
    checked = []

    def score(slots):
        engine = llm.engine
        (request,) = engine.scheduler.running
        pages = torch.tensor(request.pages)
        for tensor, norms in ((engine.cache.keys, slots.key_norms), (engine.cache.values, slots.value_norms)):
            held = tensor[:, :, pages].flatten(2, 3)[:, :, request.protected :]
            torch.testing.assert_close(norms[0], held[:, :, : norms.shape[-1]].norm(dim=-1))
        checked.append(True)
        return slots.key_norms

    options = dict(budget=40, page_size=8, policy=Policy("mine", score=score, **NOBODY))
    llm = LLM(folder, dtype="float32", device="cpu", **options)
    llm.generate([prompt_of(11)], GREEDY)
    assert checked


def test_the_attention_of_its_queries_is_handed_over(folder):
    """Returning it unchanged is the policy without a function."""
    mine = Policy("mine", score=lambda slots: slots.attention)
    own = run(folder, mine, [prompt_of(30)], window=8)[1]
    beacon = run(folder, "beacon", [prompt_of(30)], window=8)[1]
    assert own[0].token_ids == beacon[0].token_ids
    assert all(torch.equal(a.kept, b.kept) for a, b in zip(own[0].trace, beacon[0].trace, strict=True))


@pytest.mark.parametrize("protect", ["prompt", 4])
def test_previous_scores_follow_their_slots_through_evictions_and_completions(folder, protect):
    """A score that is the position, once given, is found again at the same position."""
    rounds = []

    def score(slots):
        given = slots.previous > 0
        assert torch.equal(slots.previous[given], slots.positions[given].float())
        rounds.append(int(given.sum()))
        return slots.positions.float()

    llm = LLM(
        folder, dtype="float32", device="cpu", budget=40, protect=protect, page_size=8, chunk=32,
        policy=Policy("mine", score=score, **NOBODY),
    )  # fmt: skip
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, n=3, ignore_eos=True)
    llm.generate([prompt_of(60)], params)
    assert rounds[0] == 0 and sum(rounds) > 0


def test_nobody_is_asked_by_a_policy_without_queries(folder):
    llm, _ = run(folder, Policy("mine", score=newest, **NOBODY), [prompt_of(5)])
    assert llm.stats.query_buffer_bytes == 0
    assert settle(Policy("mine", score=newest, **NOBODY), 40).capacity == 0


def test_not_a_number_is_the_lowest_score(folder):
    def score(slots):
        return slots.positions.float().masked_fill(slots.positions % 2 == 0, float("nan"))

    output = run(folder, Policy("mine", score=score, **NOBODY), [prompt_of(4)])[1][0]
    assert output.finish_reason == "length"
    kept = output.trace[0].kept[0, 0, 4:]
    odd = (kept % 2).sum()
    assert odd > len(kept) - odd


@pytest.mark.parametrize("answer", [None, torch.zeros(3), [1.0]])
def test_an_answer_of_another_shape_is_named(folder, answer):
    output = run(folder, Policy("mine", score=lambda slots: answer, **NOBODY), [prompt_of(4)])[1][0]
    assert output.finish_reason == "error" and "policy 'mine': score returned" in output.error


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(score=5), "score=5"),
        (dict(score=newest, ranking="newest"), "ranking='queries'"),
    ],
)
def test_an_impossible_score_is_named(options, words):
    with pytest.raises(ValueError, match=words):
        Policy("mine", **options)


def test_a_policy_is_found_by_module_and_name(folder, monkeypatch):
    module = ModuleType("ideas")
    module.mine = Policy("mine", score=newest, **NOBODY)
    module.number = 5
    monkeypatch.setitem(sys.modules, "ideas", module)
    assert settle("ideas:mine", 40).policy == module.mine
    outputs = run(folder, "ideas:mine", [prompt_of(9)])[1]
    assert outputs[0].trace
    for name, said in (
        ("ideas:other", "no attribute 'other'"),
        ("ideas:number", "number is no Policy"),
        ("nowhere_to_be_found:mine", "No module named"),
        ("ideas:", "possible are"),
    ):
        with pytest.raises(ValueError, match=said):
            settle(name, 40)


def test_a_policy_file_lies_where_the_program_is_called_from(tmp_path, monkeypatch):
    """Not beside the program: nobody keeps ideas there."""
    line = "from nanobeacon import Policy\nmine = Policy('mine', beacons=0, recents=0, score=len)\n"
    (tmp_path / "an_idea_of_mine.py").write_text(line)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    assert settle("an_idea_of_mine:mine", 40).policy.name == "mine"
    sys.modules.pop("an_idea_of_mine")
