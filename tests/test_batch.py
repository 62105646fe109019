"""What a step sends to the device, and when it does what nobody waits for: texts."""

import pytest
import torch
from tiny import prompt_of, text_folder, tiny_folder

from nanobeacon import LLM, SamplingParams, batch
from nanobeacon.batch import INT32, Batch, padding_request
from nanobeacon.scheduler import Plan
from nanobeacon.staging import send

GREEDY = dict(temperature=0.0, ignore_eos=True)


def test_columns_keep_their_numbers_and_types_in_one_tensor():
    columns = {"token_ids": [1, 2, 3], "cached_lengths": [7, 8, 9], "rows": [], "new_pages": [2**31 - 1]}
    for onto in (None, torch.zeros(20, dtype=torch.int64)):
        sent = send(columns, torch.device("cpu"), INT32, onto)
        assert {name: column.tolist() for name, column in sent.items()} == columns
        for name, column in sent.items():
            assert column.dtype == (torch.int32 if name in INT32 else torch.int64)
        storages = {column.untyped_storage().data_ptr() for column in sent.values()}
        assert len(storages) == 1 and (onto is None or storages == {onto.data_ptr()})


@pytest.mark.parametrize("budget", [None, 48])
def test_one_token_each_has_the_columns_of_several(tmp_path, monkeypatch, budget):
    """The common decode step is built on a way of its own; both give the same batch."""
    window = {} if budget is None else dict(window=16)
    llm = LLM(tiny_folder(tmp_path, "qwen3"), dtype="float32", device="cpu", budget=budget, **window)
    one_each = batch._one_token_each
    lengths = []

    def compared(plan, page_size):
        columns = one_each(plan, page_size)
        assert columns == batch._tokens(plan, page_size)
        lengths.append(len(plan.requests))
        return columns

    monkeypatch.setattr(batch, "_one_token_each", compared)
    params = [SamplingParams(max_tokens=m, **GREEDY) for m in (90, 20, 60)]
    llm.generate([prompt_of(n) for n in (3, 17, 40)], params)
    assert lengths == [3] * 19 + [2] * 40 + [1] * 30


def test_a_page_more_sends_that_page_alone(tmp_path, monkeypatch):
    llm = LLM(tiny_folder(tmp_path, "llama"), dtype="float32", device="cpu", page_size=4)
    sent = []

    def noted(columns, *rest):
        sent.append(columns["new_pages"])
        return send(columns, *rest)

    monkeypatch.setattr(batch, "send", noted)
    llm.generate([prompt_of(10)], SamplingParams(max_tokens=20, **GREEDY))
    first, *later = [len(pages) for pages in sent]
    assert first == 3 and set(later) == {0, 1}
    assert first + sum(later) == 8  # for 29 slots: the last token is never fed


def test_a_padding_request_stays_on_the_scratch_page(tmp_path):
    llm = LLM(tiny_folder(tmp_path, "llama"), dtype="float32", device="cpu", budget=48, window=16)
    it = llm.engine
    plan = Plan([padding_request(1, 16, cached=20)] * 2, [1, 1], prefill=False)
    built = Batch.build(plan, it.cache, it.queries)
    assert built.slots.tolist() == [4, 4] and it.cache.page_table[built.rows].eq(0).all()
    assert built.observation.rows.tolist() == [0, 0] and built.rows.tolist() == [0, 0]


def test_text_is_decoded_when_somebody_takes_it(tmp_path):
    """Between two steps only for whom a stop string could end there."""
    llm = LLM(text_folder(tmp_path), dtype="float32", device="cpu")
    plain = SamplingParams(max_tokens=30, **GREEDY)
    stops = SamplingParams(max_tokens=30, stop="never to be found", **GREEDY)
    lazy, eager = llm.submit(["abc", "abc"], [plain, stops])
    for _ in range(5):
        llm.engine.step()
    assert (lazy.num_decoded, eager.num_decoded) == (0, 5)
    first = lazy.take_text()
    assert lazy.num_decoded == 5 and lazy.take_text() == ""
    pieces = [first] + [piece for request, piece in llm.run([lazy, eager]) if request is lazy]
    assert "".join(pieces) == lazy.text == eager.text
    assert lazy.text == llm.generate("abc", plain)[0].text


def test_a_token_that_ends_a_request_is_no_text_though_it_is_decoded_late(tmp_path):
    llm = LLM(text_folder(tmp_path), dtype="float32", device="cpu")
    whole = llm.generate("abc", SamplingParams(max_tokens=12, **GREEDY))[0]
    last = whole.token_ids[7]
    at = whole.token_ids.index(last)
    params = SamplingParams(max_tokens=12, stop_token_ids=[last], **GREEDY)
    (output,) = llm.generate("abc", params)
    assert output.token_ids == whole.token_ids[: at + 1] and output.finish_reason == "stop"
    (shorter,) = llm.generate("abc", SamplingParams(max_tokens=max(at, 1), **GREEDY))
    assert output.text == (shorter.text if at else "")
