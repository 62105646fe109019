"""Several processes that compute one model together give what one process gives: the same tokens, the same
log-probabilities and the same kept positions in float32, for the three families."""

import pytest
import ranks
import torch
from ranks import Group, Job
from tiny import prompt_of, tiny_folder

from nanobeacon import LLM
from nanobeacon.config import read_config
from nanobeacon.llm import _fill_with_noise
from nanobeacon.models.decoder import Decoder

SMALL = dict(budget=16, window=4)
BEACON = dict(policy="beacon", beacons=4, recents=4, **SMALL)
GREEDY = dict(max_tokens=26, temperature=0.0)
SAMPLED = dict(max_tokens=26, temperature=0.9, top_p=0.95, seed=3)
BIASED = dict(attention_bias=True, mlp_bias=True)
ONE = dict(num_key_value_heads=1)
SIX = dict(num_attention_heads=6, intermediate_size=90)
# name -> (ranks, family, changes of the tiny model, options of LLM, sampling)
CASES = {
    "llama, beacon": (2, "llama", BIASED, BEACON, GREEDY),
    "llama, full": (2, "llama", BIASED, {}, SAMPLED),
    "qwen2, beacon": (2, "qwen2", {}, BEACON, SAMPLED),
    "qwen2, rpc": (2, "qwen2", {}, dict(policy="rpc", recents=8, **SMALL), GREEDY),
    "qwen3, beacon": (2, "qwen3", {}, BEACON, GREEDY),
    "qwen3, random": (2, "qwen3", {}, dict(policy="random", **SMALL), SAMPLED),
    "qwen3 in bfloat16, full": (2, "qwen3", {}, dict(dtype="bfloat16"), dict(max_tokens=3, temperature=0.0)),
    "one KV head on two, snapkv": (2, "llama", ONE, dict(policy="snapkv", **SMALL), GREEDY),
    "one KV head on two, rpc": (2, "llama", ONE, dict(policy="rpc", recents=8, **SMALL), GREEDY),
    "three KV heads on three": (3, "llama", SIX | dict(num_key_value_heads=3), BEACON, GREEDY),
    "one KV head on three": (3, "qwen3", SIX | ONE, BEACON, GREEDY),
}
PROMPTS = [prompt_of(length) for length in (5, 40, 17)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    found = {}
    for name, (_, family, changes, options, params) in CASES.items():
        folder = tiny_folder(tmp_path_factory.mktemp("model"), family, **changes)
        options = dict(dtype="float32", seed=7, chunk=16) | options
        found[name] = Job(str(folder), options, PROMPTS, params)
    return found


@pytest.fixture(scope="module")
def results(jobs):
    """Of each case: what one process gives, and what every member gives."""
    shared = {}
    for size in (2, 3):
        names = [name for name, case in CASES.items() if case[0] == size]
        asked = [jobs[name] for name in names]
        with ranks.members(size, ranks.answer, asked) as members:
            alone = ranks.answer(Group(), asked)
            together = members.results()
        for i, name in enumerate(names):
            shared[name] = alone[i], [of_member[i] for of_member in together]
    return shared


@pytest.mark.parametrize("name", CASES)
def test_members_give_the_tokens_and_the_kept_positions_of_one_process(results, name):
    alone, together = results[name]
    for member in together:
        for mine, theirs in zip(alone.answers, member.answers, strict=True):
            assert theirs.token_ids == mine.token_ids
            assert theirs.logprobs == pytest.approx(mine.logprobs, abs=0.05 if "bfloat16" in name else 1e-4)
            assert theirs.kept == mine.kept
            assert theirs.beacons == mine.beacons
    if "full" not in name:
        assert all(len(answer.kept) > 1 for answer in alone.answers)


@pytest.mark.parametrize("name", CASES)
def test_a_member_holds_and_reads_its_part_only(results, name):
    size, _, changes, _, _ = CASES[name]
    alone, together = results[name]
    for member in together:
        # Padding of the vocabulary and copied KV heads aside: an equal part
        copied = changes.get("num_key_value_heads", size) < size
        assert member.weight_bytes == pytest.approx(alone.weight_bytes / size, rel=0.2 if copied else 0.02)
        assert member.page_bytes == alone.page_bytes // (1 if copied else size)
        assert member.parted > 0 == alone.parted


def test_a_model_that_cannot_be_shared_is_refused_in_one_line(tmp_path):
    # The heads of SmolLM2-135M
    folder = tiny_folder(tmp_path, "llama", hidden_size=36, num_attention_heads=9, num_key_value_heads=3)
    wanted = "num_attention_heads is 9; it must be a multiple of the 2 tensor-parallel ranks"
    with pytest.raises(ValueError, match=wanted):
        LLM(str(folder), group=Group(rank=0, size=2))


def test_random_weights_are_those_of_the_same_model_on_every_member(tmp_path):
    config = read_config(tiny_folder(tmp_path, "qwen3"))
    place = torch.float32, torch.device("cpu"), 16
    whole = Decoder(config, *place)
    _fill_with_noise(whole, seed=4)
    for rank in range(2):
        member = Decoder(config, *place, group=Group(rank, 2))
        _fill_with_noise(member, seed=4)
        parts = member.parts()
        for name, view in member.weights().items():
            expected = whole.weights()[name]
            if name in parts:
                part = parts[name]
                expected = expected.narrow(part.dim, part.start, view.shape[part.dim])
            torch.testing.assert_close(view.data, expected.data, rtol=0, atol=0)
