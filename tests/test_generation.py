"""generation.py: what generation_config.json says, what of it is applied, and what is named instead."""

import json

import pytest
import torch
from tiny import prompt_of, tiny_folder, tiny_model

from nanobeacon import LLM, SamplingParams
from nanobeacon.generation import generation_defaults


@pytest.mark.parametrize(
    "content, expected",
    [
        (None, {"temperature": 0.0}),
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}),
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "min_p": 0.1,
                "eos_token_id": [1],
            },
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
        ),
        (
            {"do_sample": True, "top_k": 0, "min_p": None},
            {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        ),
    ],
)
def test_what_a_file_says_about_sampling_is_taken_and_the_rest_is_neutral(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert generation_defaults(tmp_path) == expected


@pytest.mark.parametrize(
    "content, name",
    [
        ('{"do_sample": "yes"}', "do_sample"),
        ('{"do_sample": true, "temperature": "hot"}', "temperature"),
        ('{"do_sample": true, "top_k": -2}', "top_k"),
        ('{"repetition_penalty": 0}', "repetition_penalty"),
        ('{"max_new_tokens": 0}', "max_new_tokens"),
        ('{"min_new_tokens": "3"}', "min_new_tokens"),
        ('{"do_sample": true, "top_p": NaN}', "top_p"),
        ('{"do_sample": true', "generation_config.json"),
    ],
)
def test_malformed_sampling_defaults_are_refused_by_name(tmp_path, content, name):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=name):
        generation_defaults(tmp_path)


def write(folder, **content):
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_penalty_and_lengths_are_taken_whether_the_file_samples_or_not(tmp_path):
    write(tmp_path, repetition_penalty=1.05, min_new_tokens=2, max_new_tokens=9)
    expected = {"temperature": 0.0, "repetition_penalty": 1.05, "min_tokens": 2, "max_tokens": 9}
    assert generation_defaults(tmp_path) == expected
    write(tmp_path, do_sample=True, repetition_penalty=1.0, max_new_tokens=None)
    assert {"repetition_penalty", "max_tokens"}.isdisjoint(generation_defaults(tmp_path))


@pytest.mark.parametrize(
    "content, named",
    [
        ({"num_beams": 4, "do_sample": True, "top_p": 0.9}, ["num_beams=4"]),
        ({"no_repeat_ngram_size": 3, "bad_words_ids": [[1]]}, ["bad_words_ids", "no_repeat_ngram_size=3"]),
        ({"suppress_tokens": [5], "a_thing_of_tomorrow": "x"}, ["a_thing_of_tomorrow", "suppress_tokens"]),
    ],
)
def test_one_line_names_what_is_not_applied(tmp_path, caplog, content, named):
    generation_defaults(write(tmp_path, **content))
    (line,) = [r.message for r in caplog.records]
    assert all(name in line for name in named) and "top_p" not in line and "\n" not in line


@pytest.mark.parametrize(
    "content",
    [
        {"num_beams": 1, "transformers_version": "5.0", "_from_model_config": True, "pad_token_id": 0},
        {"bad_words_ids": None, "length_penalty": 1.0, "use_cache": True, "suppress_tokens": []},
        {"temperature": 0.6, "top_k": 20},  # of a file that does not sample: what greedy means anyway
    ],
)
def test_what_changes_nothing_needs_no_word(tmp_path, caplog, content):
    generation_defaults(write(tmp_path, **content))
    assert not caplog.records


@pytest.mark.parametrize("spelling", [{"top_p": 0}, {"top_k": 1}, {"top_p": 0.0, "top_k": 5}])
def test_a_nucleus_of_nothing_is_the_best_token_and_makes_no_call_fail(tmp_path, spelling):
    folder = tiny_folder(tmp_path, "llama")
    greedy = LLM(folder, device="cpu", dtype="float32").generate(
        [prompt_of(5)], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    )
    write(folder, do_sample=True, temperature=2.0, **spelling)
    llm = LLM(folder, device="cpu", dtype="float32")
    for params in (SamplingParams(max_tokens=8, ignore_eos=True),):
        assert llm.generate([prompt_of(5)], params)[0].token_ids == greedy[0].token_ids


@pytest.mark.parametrize("off", [0, -1, None])
def test_candidates_are_all_of_them_in_three_spellings(tmp_path, off):
    folder = write(tiny_folder(tmp_path, "llama"), do_sample=True, top_k=off)
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, top_k=off)
    drawn = LLM(folder, device="cpu", dtype="float32").generate([prompt_of(5)], params)[0].token_ids
    plain = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, temperature=1.0, top_k=0)
    assert drawn == LLM(folder, device="cpu", dtype="float32").generate([prompt_of(5)], plain)[0].token_ids


def test_the_files_length_is_a_default_that_is_cut_to_what_fits(tmp_path):
    folder = write(tiny_folder(tmp_path, "llama", max_position_embeddings=64), max_new_tokens=40)
    llm = LLM(folder, device="cpu", dtype="float32")
    lengths = []
    for prompt, asked in ((10, None), (50, None), (10, 50)):
        (output,) = llm.generate([prompt_of(prompt)], SamplingParams(max_tokens=asked, ignore_eos=True))
        lengths.append(len(output.token_ids))
    assert lengths == [40, 14, 50]


def test_penalty_and_minimum_are_those_of_transformers(tmp_path):
    """Greedy, as generation_config.json of Qwen2.5-Instruct has it, against transformers' own generate."""
    model = tiny_model("qwen2")
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.min_new_tokens = 12
    model.generation_config.max_new_tokens = 30
    model.generation_config.eos_token_id = 2
    model.save_pretrained(tmp_path)
    prompt = prompt_of(9)
    with torch.no_grad():
        theirs = model.generate(torch.tensor([prompt]), do_sample=False, pad_token_id=0)[0, 9:].tolist()
    assert LLM(tmp_path, device="cpu", dtype="float32").generate([prompt])[0].token_ids == theirs
