"""What changes logits before a token is sampled: against transformers' processors, and inside an engine."""

import pytest
import torch
from tiny import VOCABULARY, prompt_of, text_folder, tiny_folder
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from nanobeacon import LLM, SamplingParams
from nanobeacon.processors import Processing, RepetitionPenalty
from nanobeacon.request import Request

EOS = 2


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"), "llama")
    return LLM(folder, dtype="float32", device="cpu", max_num_seqs=4, page_size=8)


@pytest.fixture(scope="module")
def text_llm(tmp_path_factory):
    folder = text_folder(tmp_path_factory.mktemp("text"))
    return LLM(folder, dtype="float32", device="cpu", max_num_seqs=4, page_size=8)


def request(**params) -> Request:
    settled = SamplingParams(**params).with_defaults({})
    return Request(0, [5, 5, 9], settled, 99, 3, eos_token_ids=frozenset({EOS}))


def greedy(**more) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | more))


@pytest.mark.parametrize("penalty", [0.5, 1.05, 3.0])
def test_repetition_penalty_is_that_of_transformers_token_after_token(penalty):
    generator = torch.Generator().manual_seed(1)
    processor, wanted = RepetitionPenalty(penalty), RepetitionPenaltyLogitsProcessor(penalty)
    ids = [4, 8, 4]
    for token in (3, 9, 3, 0, 8, 49):
        logits = torch.randn(50, generator=generator) * 4
        expected = wanted(torch.tensor([ids]), logits.unsqueeze(0).clone())[0]
        processor(ids, logits)
        assert torch.equal(logits, expected)
        ids = [*ids, token]


def test_repetition_penalty_looks_at_each_token_once():
    class Counted(list):
        looked_at = 0

        def __getitem__(self, index):
            items = super().__getitem__(index)
            Counted.looked_at += len(items)
            return items

    processor, ids = RepetitionPenalty(1.2), Counted(range(40))
    for step in range(30):
        ids.append(step)
        processor(ids, torch.zeros(100))
    assert Counted.looked_at == 70


def test_ids_beyond_the_row_are_left_aside():
    logits = torch.ones(6)
    made = request(repetition_penalty=2.0, bad_token_ids=[50], logit_bias={70: 3.0, 1: 2.0})
    assert Processing.of(made)(made, logits).tolist() == [1, 3, 1, 1, 1, 0.5]
    assert logits.tolist() == [1] * 6  # the raw ones stay, for log-probabilities


@pytest.mark.parametrize("made", [0, 1, 4, 5, 6])
def test_min_tokens_is_that_of_transformers(made):
    r = request(min_tokens=5, stop_token_ids=[7])
    r.output_token_ids = [4] * made
    logits = torch.arange(10.0)
    wanted = MinNewTokensLengthLogitsProcessor(3, 5, [EOS, 7], device="cpu")
    expected = wanted(torch.zeros(1, 3 + made), logits.unsqueeze(0))[0]
    assert torch.equal(Processing.of(r)(r, logits), expected)


def test_nothing_asked_for_is_nothing_done():
    assert Processing.of(request()) is None
    assert Processing.of(request(repetition_penalty=1, min_tokens=0, logit_bias={}, bad_token_ids=[])) is None
    given = request(repetition_penalty=2.0)
    given.forced = [1, 2]
    assert Processing.of(given) is None


def test_an_engine_with_a_penalty_writes_what_transformers_writes(llm, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tiny_folder(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = prompt_of(12)
    options = dict(max_new_tokens=24, do_sample=False, min_new_tokens=24, repetition_penalty=1.3)
    wanted = model.generate(torch.tensor([prompt]), **options)[0, 12:].tolist()
    params = SamplingParams(max_tokens=24, temperature=0, min_tokens=24, repetition_penalty=1.3)
    assert llm.generate([prompt], params)[0].token_ids == wanted
    assert llm.generate([prompt], greedy())[0].token_ids != wanted


def test_a_request_with_processors_leaves_its_neighbours_alone(llm):
    prompts = [prompt_of(n) for n in (5, 9, 14)]
    sampled = dict(temperature=0.9, top_p=0.95, seed=3)
    alone = [llm.generate([p], greedy(**sampled))[0].token_ids for p in prompts]
    penalised = greedy(repetition_penalty=1.5, **sampled)
    by_itself = llm.generate([prompts[1]], penalised)[0].token_ids
    together = llm.generate(prompts, [greedy(**sampled), penalised, greedy(**sampled)])
    assert [o.token_ids for o in together] == [alone[0], by_itself, alone[2]]
    assert by_itself != alone[1]


def test_bias_and_bad_ids(llm):
    prompt = prompt_of(6)
    assert set(llm.generate([prompt], greedy(logit_bias={40: 1e4}))[0].token_ids) == {40}
    usual = llm.generate([prompt], greedy())[0].token_ids
    without = llm.generate([prompt], greedy(bad_token_ids=usual))[0].token_ids
    assert not set(usual) & set(without)
    for named in (dict(bad_token_ids=[VOCABULARY]), dict(logit_bias={VOCABULARY: 1.0})):
        out = llm.generate([prompt], greedy(**named))[0]
        assert out.finish_reason == "error" and str(VOCABULARY) in out.error


def test_a_users_processor_sees_the_ids_so_far_and_changes_in_place_or_returns(llm):
    seen, prompt = [], prompt_of(6)

    def in_place(token_ids, logits):
        assert logits.dtype == torch.float32 and logits.shape == (VOCABULARY,)
        seen.append(list(token_ids))
        logits[:] = -torch.inf
        logits[50 + len(token_ids) % 7] = 1.0

    def returned(token_ids, logits):
        changed = logits.double().fill_(-torch.inf)
        changed[50 + len(token_ids) % 7] = 1.0
        return changed

    first = llm.generate([prompt], greedy(logits_processor=in_place, max_tokens=5, n=2, logprobs=0))
    assert [o.token_ids for o in first] == [[50 + n % 7 for n in range(6, 11)]] * 2
    assert sorted(map(len, seen)) == sorted(2 * [*range(6, 11)])
    assert all(ids == (prompt + first[0].token_ids)[: len(ids)] for ids in seen)
    # Log-probabilities stay those of the raw distribution: nothing was certain there.
    assert all(own < -1e-3 for own, _ in first[0].logprobs)
    assert llm.generate([prompt], greedy(logits_processor=returned, max_tokens=5))[0].token_ids == (
        first[0].token_ids
    )


@pytest.mark.parametrize(
    "fails, said",
    [
        (lambda ids, row: 1 / 0, "ZeroDivisionError"),
        (lambda ids, row: row[:5], "[5]"),
        (lambda ids, row: [1.0], "list"),
        (lambda ids, row: row.fill_(-torch.inf), "no token is left"),
        (lambda ids, row: row.fill_(torch.nan), "no token is left"),
    ],
)
def test_a_processor_that_fails_ends_its_own_request_only(llm, fails, said):
    def late(ids, row):
        return fails(ids, row) if len(ids) >= 8 else None

    prompts = [prompt_of(6), prompt_of(7)]
    wanted = llm.generate([prompts[1]], greedy())[0].token_ids
    failed, other = llm.generate(prompts, [greedy(logits_processor=late, logprobs=1), greedy()])
    assert failed.finish_reason == "error" and "logits_processor" in failed.error and said in failed.error
    assert len(failed.token_ids) == len(failed.logprobs) == 2
    assert other.token_ids == wanted and other.finish_reason == "length"
    assert llm.engine.pool.used_count == 0


def test_ids_that_are_all_bad_end_a_request_by_name(llm):
    out = llm.generate([prompt_of(4)], greedy(bad_token_ids=list(range(VOCABULARY))))[0]
    assert out.finish_reason == "error" and "bad_token_ids" in out.error


def test_score_is_not_affected(llm):
    prompt, given = prompt_of(5), [7, 8, 9, 7]
    plain = llm.score([prompt], [given])[0]
    llm._defaults, kept = llm._defaults | {"repetition_penalty": 5.0, "min_tokens": 3}, llm._defaults
    try:
        assert torch.equal(llm.score([prompt], [given])[0], plain)
    finally:
        llm._defaults = kept


def test_no_stop_string_ends_a_text_before_min_tokens(text_llm):
    usual = text_llm.generate(["abc"], greedy(max_tokens=40))[0]
    stop = next(c for c in usual.text if c.isascii() and c.isprintable())
    early = text_llm.generate(["abc"], greedy(max_tokens=40, stop=[stop]))[0]
    late = text_llm.generate(["abc"], greedy(max_tokens=40, stop=[stop], min_tokens=20))[0]
    assert len(early.token_ids) < 20 < len(late.token_ids) or late.finish_reason == "length"
    assert usual.text.startswith(late.text) and late.text.startswith(early.text) and early.text != late.text
    never = text_llm.generate(["abc"], greedy(max_tokens=40, stop=[stop], min_tokens=40))[0]
    assert never.text == usual.text and never.finish_reason == "length"
