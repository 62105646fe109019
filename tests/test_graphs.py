"""Padding and bucketing of recorded decode steps, on a CPU: the recording's stand-in runs the same tensors
again."""

import pytest
import torch
from tiny import prompt_of, tiny_folder

from nanobeacon import LLM, SamplingParams
from nanobeacon.graphs import DecodeGraphs, buckets


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 9, 16, 17, 192])
def test_every_batch_size_has_a_bucket(most):
    sizes = buckets(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] == 1
    assert all(any(b >= n for b in sizes) for n in range(1, most + 1))


@pytest.mark.parametrize("policy", [None, "beacon", "recent", "initial", "random-query", "streaming"])
def test_recorded_steps_give_the_same_tokens(tmp_path, policy):
    folder = tiny_folder(tmp_path, "qwen3")
    options = (
        dict(policy=policy, budget=48) | ({} if policy == "streaming" else dict(window=16)) if policy else {}
    )
    prompts = [prompt_of(n) for n in (3, 17, 40, 8, 9)]
    params = [SamplingParams(max_tokens=m, temperature=0.0, ignore_eos=True) for m in (70, 20, 64, 5, 33)]
    outputs, recorded = [], []
    for with_graphs in (False, True):
        llm = LLM(folder, dtype="float32", device="cpu", max_num_seqs=4, page_size=8, **options)
        engine = llm.engine
        if with_graphs:

            def record(forward):
                recorded.append(forward())
                return forward

            most = engine.max_model_len
            engine.forward_decode = DecodeGraphs(engine.model, engine.cache, engine.queries, 4, most, record)
            engine.cache.keys[:, :, 0].fill_(float("nan"))  # what padded rows read never reaches a real one
        outputs.append([o.token_ids for o in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1]
    assert [len(h) for h in recorded] == [1, 2, 4][-len(recorded) :] or len(recorded) == 3


def test_impossible_recordings_fall_back_with_one_line(tmp_path, caplog):
    llm = LLM(tiny_folder(tmp_path, "llama"), dtype="float32", device="cpu")
    engine = llm.engine

    def record(forward):
        raise RuntimeError("no graphs on this device")

    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    wanted = llm.generate([prompt_of(5)], params)[0].token_ids
    engine.forward_decode = DecodeGraphs(engine.model, engine.cache, engine.queries, 16, 2048, record)
    assert llm.generate([prompt_of(5)], params)[0].token_ids == wanted
    assert sum("no graphs on this device" in r.message for r in caplog.records) == 1
    assert torch.isfinite(engine.model.embedding).all()
