"""Whole folders as people have them, through `LLM`: what their files disagree about, and what is said."""

import json
import logging
from dataclasses import replace

import pytest
from tiny import text_folder

from nanobeacon import LLM, SamplingParams

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("text"))


def change(folder, tmp_path, name: str, **values) -> str:
    """A copy of a folder in which one JSON file has other values."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))
    return str(tmp_path)


def noise(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=200, temperature=1.0, seed=seed, ignore_eos=True)


def open_llm(path) -> LLM:
    return LLM(str(path), device="cpu", dtype="float32", max_num_seqs=2)


def test_an_end_that_only_added_tokens_decoder_knows_is_sampled_and_ends(folder, tmp_path):
    end = {"259": {"content": "<|im_end|>", "special": True}}  # right behind the byte tokens
    llm = open_llm(change(folder, tmp_path, "tokenizer_config.json", added_tokens_decoder=end))
    plain = open_llm(folder)
    assert (llm.engine.vocabulary, plain.engine.vocabulary) == (260, 259)
    assert llm._ids("<|im_end|>") == [1, 259]
    settings = {"eos_token": "<|im_end|>", "added_tokens_decoder": end}
    ending = open_llm(change(folder, tmp_path, "tokenizer_config.json", **settings))
    free = llm.generate("hello", noise(0))[0]
    at = free.token_ids.index(259)  # this noise holds one
    out = ending.generate("hello", replace(noise(0), ignore_eos=False))[0]
    assert (out.token_ids, out.finish_reason) == (free.token_ids[: at + 1], "stop")
    assert "<|im_end|>" not in free.text


@pytest.mark.parametrize(
    "file, values, words",
    [
        (
            "tokenizer_config.json",
            {"eos_token": "<|nowhere|>"},
            ["'<|nowhere|>' is no token", "other ends count"],
        ),
        ("config.json", {"eos_token_id": 310}, ["310 is beyond the 259 tokens", "other ends count"]),
        ("config.json", {"eos_token_id": [2, 310]}, ["310 is beyond", "other ends count"]),
    ],
)
def test_an_end_that_is_none_is_said_in_one_line(folder, tmp_path, caplog, file, values, words):
    with caplog.at_level(logging.WARNING, "nanobeacon"):
        open_llm(change(folder, tmp_path, file, **values))
    assert len(caplog.messages) == 1 and all(word in caplog.messages[0] for word in words)


@pytest.mark.parametrize("ids", [None, 310, [300, 310]])
def test_a_model_without_any_known_end_is_named(tmp_path, caplog, ids):
    folder = text_folder(tmp_path, eos=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ids}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    with caplog.at_level(logging.WARNING, "nanobeacon"):
        open_llm(folder)
    assert len(caplog.messages) == 1 and "no known end" in caplog.messages[0]


def test_a_folder_whose_end_is_right_says_nothing(folder, caplog):
    with caplog.at_level(logging.WARNING, "nanobeacon"):
        open_llm(folder)
    assert not caplog.messages


def test_chat_leaves_thinking_to_the_template_and_continues_an_answer(folder, tmp_path):
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ enable_thinking | default('own') }}"
    llm = open_llm(change(folder, tmp_path, "tokenizer_config.json", chat_template=template))
    decode = llm.tokenizer.decode
    assert decode(llm.chat_prompt(USER)) == "hi|own"
    assert decode(llm.chat_prompt(USER, False)) == "hi|False"
    begun = [*USER, {"role": "assistant", "content": "well"}]
    out = llm.chat(begun, SamplingParams(max_tokens=2), continue_final=True)[0]
    assert decode(out.prompt_token_ids) == "hi|well"


@pytest.mark.parametrize("seed, at, text", [(2, 52, "<pad>"), (1, 148, "<bos>")])
def test_a_stop_string_that_is_a_special_token_stops_on_its_id(folder, seed, at, text):
    llm = open_llm(folder)
    free = llm.generate("hello", noise(seed))[0]
    assert llm.tokenizer.backend.id_to_token(free.token_ids[at]) == text
    out = llm.generate("hello", replace(noise(seed), stop=text))[0]
    assert (out.token_ids, out.finish_reason) == (free.token_ids[: at + 1], "stop")
    assert out.text == llm.generate("hello", replace(noise(seed), max_tokens=at))[0].text
