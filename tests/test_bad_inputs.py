"""A table of bad inputs with the message each gets: one line, exit status 2, and the others of a batch go
on."""

import json
import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import text_folder, tiny_folder

import generate
from nanobeacon import LLM, SamplingParams

# Command-line options -> what the one line must say (a regular expression).
OPTIONS = {
    "--temperature -1": r"temperature=-1.0: a number of at least 0",
    "--temperature nan": r"temperature=nan",
    "--temperature hot": r"--temperature: invalid float value: 'hot'",
    "--top-p -0.5": r"top_p=-0.5: a number from 0, the best token alone, to 1",
    "--top-p 1.5": r"top_p=1.5",
    "--top-k -2": r"top_k=-2: a whole number of at least -1",
    "--min-p 2": r"min_p=2.0: a number from 0 to 1",
    "--max-tokens 0": r"max_tokens=0: a whole number of at least 1",
    "--n 0": r"n=0: a whole number of at least 1",
    "--seed 1.5": r"--seed: invalid int value: '1.5'",
    "--budget 0": r"budget=0: a whole number of at least 1",
    "--budget -5": r"budget=-5",
    "--budget 36": r"budget=36: .* the smallest budget possible is 37",
    "--budget 64 --window 56": r"the smallest budget possible is 65",
    "--budget 64 --policy best": r"policy='best': possible are full, beacon,",
    "--budget 64 --policy full": r"budget=64: policy 'full' keeps everything",
    "--policy rkv": r"policy='rkv': acts only under a budget",
    "--window 16": r"window=16: acts only under a budget",
    "--budget 64 --window -1": r"window=-1: a whole number of at least 0",
    "--budget 64 --beacons 0 --recents 0": r"at least one query is needed",
    "--budget 64 --policy recent --beacons 8": r"beacons=8: policy 'recent' has no beacons",
    "--budget 64 --policy streaming --recents 4": r"policy 'streaming' has no recents",
    "--budget 64 --protect most": r"protect='most': 'prompt' or a whole number",
    "--budget 64 --protect -1": r"protect=-1",
    "--device tpu": r"device='tpu': ",
    "--device cuda:99": r"device='cuda:99': ",
    "--dtype int8": r"--dtype: invalid choice: 'int8' \(choose from '?auto'?, '?float32'?",
    "--prompt-file /no/such/file": r"not allowed with argument|--prompt-file /no/such/file",
    "--colour": r"unrecognized arguments: --colour",
    "--chat": r"not allowed with argument",
    "world": r"not allowed with argument",
    "--threads 0": r"--threads 0: 1 to \d+ are possible",
    "--stop=": r"stop=\[''\]: strings that are not empty",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("model"))


def fails(arguments, capsys):
    """The one line on stderr of a call that must end with 2."""
    try:
        status = generate.main(arguments)
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("generate.py: ")]
    assert status == 2, (status, err)
    assert not out and "Traceback" not in err
    assert len(lines) == 1, err
    return lines[0]


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options, folder, capsys):
    line = fails(["--model", str(folder), "--prompt", "x", *options.split()], capsys)
    assert re.search(OPTIONS[options], line), line


def edit(**changes):
    """A change of config.json; None removes the key."""

    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            config.pop(key, None)
            if value is not None:
                config[key] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


def tensors(change):
    def apply(folder):
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return apply


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def lost_shard(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {NORM: "model-9.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


NORM = "model.norm.weight"
EXTRA = "model.layers.0.extra.weight"
# What is done to the checkpoint -> what the one line must say.
CHECKPOINTS = {
    "no config": (lambda f: (f / "config.json").unlink(), r"config.json"),
    "config is no JSON": (write("config.json", "{"), r"config.json"),
    "config is a list": (write("config.json", "[]"), r"config.json"),
    "other architecture": (
        edit(architectures=["GPT2LMHeadModel"], model_type="gpt2"),
        r"GPT2.*LlamaForCausalLM",
    ),
    "no hidden size": (edit(hidden_size=None), r"hidden_size"),
    "hidden size is text": (edit(hidden_size="48"), r"hidden_size"),
    "heads do not divide": (edit(num_key_value_heads=3), r"num_key_value_heads"),
    "odd head dim": (edit(head_dim=15), r"head_dim"),
    "unknown RoPE": (edit(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), r"spiral.*llama3"),
    "quantised": (edit(quantization_config={"bits": 4}), r"quantization_config"),
    "sliding window": (
        edit(
            architectures=["Qwen2ForCausalLM"],
            model_type="qwen2",
            use_sliding_window=True,
            sliding_window=64,
            max_window_layers=0,
        ),
        r"sliding",
    ),  # fmt: skip
    "wrong activation": (edit(hidden_act="gelu"), r"hidden_act"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"model.safetensors"),
    "only pickles": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), r"pickle"),
    "weights cut short": (cut, r"model.safetensors"),
    "tensor missing": (tensors(lambda s: s.pop(NORM)), r"model.norm.weight"),
    "tensor too many": (tensors(lambda s: s.update({EXTRA: torch.zeros(2)})), r"unexpected: model.*extra"),
    "wrong shape": (tensors(lambda s: s.update({NORM: torch.ones(7)})), r"model.norm.weight.*7"),
    "index leaves the folder": (
        write("model.safetensors.index.json", json.dumps({"weight_map": {NORM: "../model.safetensors"}})),
        r"weight_map",
    ),
    "shard missing": (
        lost_shard,
        r"model-9.safetensors",
    ),
    "tokenizer broken": (write("tokenizer.json", "{}"), r"tokenizer"),
    "tokenizer gone": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer.json"),
    "template broken": (write("chat_template.jinja", "{% for %}"), r"chat template"),
}


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_checkpoints(what, tmp_path, capsys):
    change, message = CHECKPOINTS[what]
    change(text_folder(tmp_path))
    line = fails(["--model", str(tmp_path), "--prompt", "x"], capsys)
    assert re.search(message, line), line


def test_a_model_that_is_nowhere(capsys):
    assert "no/such/folder" in fails(["--model", "/no/such/folder", "--prompt", "x"], capsys)


# LLM's own arguments -> what the ValueError must say.
ARGUMENTS = {
    "max_num_seqs": (0, r"max_num_seqs=0"),
    "max_model_len": (4096, r"max_model_len=4096: the model's positions allow 2048"),
    "page_size": (0, r"page_size=0"),
    "num_pages": (0, r"num_pages=0"),
    "gpu_memory": (1.5, r"gpu_memory=1.5"),
    "chunk": (0, r"chunk=0"),
    "cuda_graphs": ("yes", r"cuda_graphs='yes'"),
    "seed": ("a", r"seed='a'"),
    "load": ("fast", r"load='fast'"),
    "dtype": (torch.int8, r"dtype="),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name, folder):
    value, message = ARGUMENTS[name]
    with pytest.raises(ValueError, match=message):
        LLM(folder, device="cpu", **{name: value})


def test_unknown_arguments_are_errors(folder):
    with pytest.raises(TypeError, match="colour"):
        LLM(folder, colour="red")
    with pytest.raises(TypeError, match="colour"):
        SamplingParams(colour="red")


PROMPTS = {
    "token too large": ([3, 320], r"token id 320: possible are whole numbers from 0 to 319"),
    "token negative": ([-1], r"token id -1"),
    "token is text": (["a"], r"token id 'a'"),
    "token is a fraction": ([1.5], r"token id 1.5"),
    "token is a truth": ([True], r"token id True"),
    "too long": ([3] * 2048, r"2048 prompt tokens and 1 new ones .* 2048 together"),
    "does not fit": ([3] * 200, r"209 tokens .* 160 slots"),
}


@pytest.mark.parametrize("what", PROMPTS)
def test_prompts_fail_alone(what, folder):
    prompt, message = PROMPTS[what]
    llm = LLM(folder, device="cpu", num_pages=None if what == "too long" else 10)
    params = SamplingParams(max_tokens=1 if what == "too long" else 10, temperature=0.0, ignore_eos=True)
    good, bad, also_good = llm.generate([[3, 4], prompt, [5]], params)
    assert bad.finish_reason == "error" and re.search(message, bad.error), bad.error
    assert good.finish_reason == also_good.finish_reason == "length"
    assert good.error is None and len(good.token_ids) == params.max_tokens


def test_an_empty_prompt_is_the_bos_or_an_error(folder, tmp_path):
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    assert LLM(folder, device="cpu").generate([""], params)[0].prompt_token_ids == [1]
    without = tiny_folder(tmp_path, "qwen2", bos_token_id=None)
    bad, good = LLM(without, device="cpu").generate([[], [5]], params)
    assert "empty" in bad.error and good.finish_reason == "length"


# Text of any kind: control characters, lone surrogates, private and unassigned characters.
ANY_TEXT = st.text(st.characters(codec=None), max_size=30) | st.sampled_from(
    [
        "\ud800",
        "a\udfffb",
        "\x00" * 9,
        "\x1b[2J\r\n",
        "\u202e\u200b",
        "\U0010ffff",
        "<bos><eos><pad>",
        "e\u0301" * 9,
    ]
)
ANY_ID = (
    st.integers(-3, 330) | st.integers() | st.sampled_from([2**63, -(2**63), 10**5000, None, "3", 1.0, True])
)


@pytest.fixture(scope="module")
def small(folder):
    return LLM(folder, device="cpu", num_pages=10, max_num_seqs=4)


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(texts=st.lists(ANY_TEXT, min_size=1, max_size=3))
def test_texts_of_any_kind_are_answered_or_refused_by_value(small, texts):
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    try:
        outputs = small.generate(texts, params)
    except ValueError as error:
        assert "UTF-8" in str(error) and any("\ud800" <= c <= "\udfff" for text in texts for c in text)
    else:
        assert [len(o.token_ids) for o in outputs] == [2] * len(texts)
        assert all(o.text.encode() is not None for o in outputs)
    assert small.engine.pool.used_count == 0


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(prompt=st.lists(ANY_ID, min_size=1, max_size=4))
def test_ids_of_any_kind_are_answered_or_refused_alone(small, prompt):
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    right = all(type(i) is int and 0 <= i < 320 for i in prompt)
    good, asked = small.generate([[5], prompt], params)
    assert good.finish_reason == "length"
    assert asked.finish_reason == ("length" if right else "error")
    assert right or "possible are whole numbers from 0 to 319" in asked.error


@pytest.mark.parametrize("character", ["a", "字", "\x00 b"])
def test_a_million_characters_are_refused_alone_and_soon(small, character):
    began = time.monotonic()
    text = (character * 1_000_000)[:1_000_000]
    good, long = small.generate(["ab", text], SamplingParams(max_tokens=2, ignore_eos=True))
    assert good.finish_reason == "length"
    assert long.finish_reason == "error" and "2048 together are possible" in long.error
    assert time.monotonic() - began < 60  # about one second: far from for ever


@pytest.mark.parametrize(
    "call",
    ["prompts", "prompt", "chat", "no messages", "params", "one params", "count", "stop", "stream n"]
    + ["stream params", "stream prompt", "on_logits", "another's", "score empty", "score count"],
)
def test_calls_that_mean_nothing_raise_before_anything_runs(call, folder, tmp_path):
    llm = LLM(folder, device="cpu")
    calls = {
        "prompts": lambda: llm.generate([3.5]),
        "prompt": lambda: llm.generate(5),
        "chat": lambda: llm.chat(5),
        "one params": lambda: llm.generate(["a"], 3),
        "stream params": lambda: llm.stream("a", {"n": 1}),
        "stream prompt": lambda: llm.stream(None),
        "on_logits": lambda: llm.score(["a"], ["b"], on_logits=3),
        "another's": lambda: list(llm.run(LLM(folder, device="cpu").submit(["a"]))),
        "no messages": lambda: llm.chat([]),
        "params": lambda: llm.generate(["a"], {"temperature": 1}),
        "count": lambda: llm.generate(["a", "b"], [SamplingParams()]),
        "stop": lambda: LLM(tiny_folder(tmp_path, "llama"), device="cpu").generate(
            [[3]], SamplingParams(stop="x")
        ),
        "stream n": lambda: llm.stream("a", SamplingParams(n=2)),
        "score empty": lambda: llm.score(["a"], [[]]),
        "score count": lambda: llm.score(["a"], []),
    }
    with pytest.raises(ValueError):
        calls[call]()
    assert llm.engine.scheduler.plan() is None


def test_the_table_is_long_enough():
    assert len(OPTIONS) + len(CHECKPOINTS) + len(ARGUMENTS) + len(PROMPTS) >= 40
