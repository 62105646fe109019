"""Hostile and broken checkpoints: whatever stands in a folder, it works or gets one clear error that names
the file, soon and in bounded memory; no pickle is read and no code of a checkpoint is run.

Seeded and bounded: the same examples in every run.
"""

import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import text_folder

from nanobeacon import LLM, SamplingParams
from nanobeacon.checkpoint import Checkpoint, check_fit
from nanobeacon.config import read_config
from nanobeacon.hub import INDEX
from nanobeacon.models.decoder import Decoder

WEIGHTS = "model.safetensors"
MEMORY = 2 << 30  # bytes that hostile files may make this process take at most, beside what it has
SECONDS = 20  # far from for ever, also on a machine that has other things to do
fuzz = settings(derandomize=True, deadline=None, max_examples=60, database=None)


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """An allocation beyond MEMORY fails, and its error is none of those that are expected."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def folder(whole, tmp_path_factory):
    """A copy that examples may spoil; each begins with `restore`."""
    return tmp_path_factory.mktemp("hostile")


def restore(whole: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)


def error_of(folder: Path, **options) -> str | None:
    """The one error that loading a folder and running it gives; None if it works."""
    began = time.monotonic()
    said = None
    try:
        llm = LLM(folder, device="cpu", dtype="float32", num_pages=16, max_num_seqs=2, **options)
        llm.generate(["ab"], SamplingParams(max_tokens=2))
    except ValueError as error:
        said = str(error)
        assert said and len(said) < 3000
    assert time.monotonic() - began < SECONDS
    return said


def refused(folder: Path, *names: str, **options) -> str:
    """The error of a folder that must not work; it names a file."""
    said = error_of(folder, **options)
    assert said is not None
    assert any(name in said for name in names), said
    return said


# ---------------------------------------------------------------------------------------------- config.json


HOSTILE_VALUES = [
    None, True, -1, 0, 1, 3, 2.5, 1e-300, 1e300, float("nan"), float("inf"), 10**9, 2**53, 2**64, 10**400,
    "", "8", "\ud800", [], [[]], [-1], {}, {"a": {}}, {"rope_type": "yarn", "factor": 2**52},
]  # fmt: skip
NAMES = [
    "architectures", "model_type", "dtype", "hidden_act", "quantization_config", "num_hidden_layers",
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "sliding_window",
    "layer_types", "use_sliding_window", "max_window_layers", "rope_theta", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "attention_bias", "mlp_bias", "eos_token_id", "bos_token_id",
]  # fmt: skip
GENERATION = ["do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"]
GENERATION += ["min_new_tokens", "eos_token_id", "a field of nobody's"]


def change(path: Path, changes: dict) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_config_json_takes_a_value_or_refuses_it(whole, folder, name):
    """Refused by the file's name, or taken: then the tensors, or the machine's memory, have their say."""
    restore(whole, folder)
    for value in HOSTILE_VALUES:
        change(folder / "config.json", json.loads((whole / "config.json").read_text()) | {name: value})
        try:
            read_config(folder)
        except ValueError as error:
            assert str(error).startswith(f"{folder / 'config.json'}: "), error
        else:
            error_of(folder)


LARGEST = {
    "num_hidden_layers": 1000,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 20,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 24,
}


@pytest.mark.parametrize("name", [*LARGEST, "all"])
def test_sizes_that_the_file_does_not_have_take_no_memory(whole, folder, name):
    restore(whole, folder)
    change(folder / "config.json", LARGEST if name == "all" else {name: LARGEST[name]})
    if name == "max_position_embeddings":
        assert error_of(folder) is None
    else:
        assert "do not fit the model" in refused(folder, str(folder))
    if name == "all":
        said = error_of(folder, load="dummy")
        assert re.search(r"weights take \d.* bytes, and cpu has", said)


@pytest.mark.parametrize("name", GENERATION)
def test_every_field_of_generation_config_json_takes_a_value_or_refuses_it(whole, folder, name):
    restore(whole, folder)
    path = folder / "generation_config.json"
    for value in HOSTILE_VALUES:
        path.write_text(json.dumps({"do_sample": True} | {name: value}))
        said = error_of(folder)
        assert said is None or str(path) in said, said


# ----------------------------------------------------------------------------------------------- safetensors


def cut_at(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def parts_of(path: Path) -> tuple[dict, bytes]:
    """Header and data of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_parts(path: Path, header: str, data: bytes, claimed: int | None = None) -> None:
    """A safetensors file whose header may claim another length."""
    encoded = header.encode()
    length = len(encoded) if claimed is None else claimed
    path.write_bytes(length.to_bytes(8, "little") + encoded + data)


@fuzz
@given(st.data())
def test_weights_cut_at_any_byte_are_refused_by_name(whole, folder, data):
    restore_weights(whole, folder)
    path = folder / WEIGHTS
    length = data.draw(st.integers(0, path.stat().st_size - 1))
    cut_at(path, length)
    refused_weights(folder)


@fuzz
@given(claimed=st.integers(0, 2**64 - 1) | st.integers(0, 5000))
def test_a_header_length_that_lies_is_refused_by_name(whole, folder, claimed):
    restore_weights(whole, folder)
    header, data = parts_of(folder / WEIGHTS)
    write_parts(folder / WEIGHTS, json.dumps(header), data, claimed)
    if claimed != len(json.dumps(header)):
        refused_weights(folder)


NUMBERS = st.integers(-2, 2**64) | st.integers(0, 200_000)


@fuzz
@given(st.data())
def test_offsets_shapes_and_dtypes_that_lie_are_refused(whole, folder, data):
    """Overlapping, beyond the file, of another size than the shape has, of no dtype, of a wrong type."""
    restore_weights(whole, folder)
    header, content = parts_of(folder / WEIGHTS)
    name = data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    entry = header[name]
    original = json.dumps(entry)
    what = data.draw(st.sampled_from(["data_offsets", "shape", "dtype", "another's", "type", "missing"]))
    if what == "data_offsets":
        entry["data_offsets"] = [data.draw(NUMBERS), data.draw(NUMBERS)]
    elif what == "shape":
        entry["shape"] = data.draw(st.lists(NUMBERS, max_size=3))
    elif what == "dtype":
        entry["dtype"] = data.draw(st.sampled_from(["F16", "F64", "I8", "F8_E4M3", "BOOL", "X", ""]))
    elif what == "another's":
        other = data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
        entry["data_offsets"] = header[other]["data_offsets"]
    elif what == "type":
        header[name] = data.draw(st.sampled_from([None, [], "x", 5]))
    else:
        del header[name]
    write_parts(folder / WEIGHTS, json.dumps(header), content)
    if what in ("type", "missing") or json.dumps(entry) != original:
        refused_weights(folder)


def test_a_tensor_that_is_named_twice_is_refused(whole, folder):
    """Two readers of such a header could take different ones."""
    restore_weights(whole, folder)
    header, content = parts_of(folder / WEIGHTS)
    name = next(name for name in header if name != "__metadata__")
    twice = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}" + "}"
    write_parts(folder / WEIGHTS, twice, content)
    assert "twice" in refused_weights(folder) or "duplicate" in refused_weights(folder)


def restore_weights(whole: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in (WEIGHTS, "config.json"):
        shutil.copy(whole / name, folder / name)
    (folder / INDEX).unlink(missing_ok=True)


def refused_weights(folder: Path) -> str:
    """The error of reading and filling a model's tensors; it names the file, or the tensors that do not
    fit."""
    began = time.monotonic()
    outline = Decoder(read_config(folder), torch.float32, torch.device("meta"), 16)
    with pytest.raises(ValueError) as found:
        check_fit(outline.weights(), Checkpoint(folder), {})
    assert time.monotonic() - began < SECONDS
    said = str(found.value)
    assert WEIGHTS in said or f"the tensors of {folder}" in said, said
    return said


# ------------------------------------------------------------------------------------------------- the index


FILES = st.sampled_from(
    [
        "/etc/passwd",
        "../model.safetensors",
        "a/../../b",
        "C:\\x",
        "..\\x",
        "",
        ".",
        "\0",
        "\ud800",
        "x" * 5000,
    ]
    + ["config.json", "gone.safetensors", "model.safetensors/"]
)
VALUES = FILES | st.none() | st.integers() | st.lists(st.integers(), max_size=1) | st.just({})


@fuzz
@given(weight_map=st.none() | st.dictionaries(st.text(max_size=5), VALUES, max_size=3) | st.just([]))
def test_an_index_of_any_content_is_refused_by_name(whole, folder, weight_map):
    restore_weights(whole, folder)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError) as found:
        Checkpoint(folder)
    assert INDEX in str(found.value) or "config.json is no whole safetensors file" in str(found.value)


@fuzz
@given(st.data())
def test_stale_entries_of_an_index_harm_nobody_who_does_not_need_them(whole, folder, data):
    restore_weights(whole, folder)
    names = sorted(parts_of(folder / WEIGHTS)[0].keys() - {"__metadata__"})
    listed = data.draw(st.lists(st.sampled_from(names), min_size=1)) + ["stale.weight"]
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(listed, WEIGHTS)}))
    assert set(names) == Checkpoint(folder).tensors.keys()


# ------------------------------------------------------------------------------------------------- tokenizer


TEXT_FILES = ["tokenizer.json", "tokenizer_config.json", "config.json"]


@fuzz
@given(st.data())
def test_a_json_file_cut_at_any_byte_is_refused_by_name(whole, folder, data):
    restore(whole, folder)
    name = data.draw(st.sampled_from(TEXT_FILES))
    cut_at(folder / name, data.draw(st.integers(0, (folder / name).stat().st_size - 2)))
    refused(folder, str(folder / name))


def places(content, path=()) -> list[tuple]:
    """The path to every value inside an object of JSON."""
    found = [path] if path else []
    inside = content.items() if isinstance(content, dict) else enumerate(content)
    if isinstance(content, dict | list):
        for key, value in list(inside)[:12]:
            found += places(value, (*path, key)) if isinstance(value, dict | list) else [(*path, key)]
    return found


@settings(fuzz, max_examples=150)
@given(st.data())
def test_a_tokenizer_file_with_a_wrong_value_anywhere_works_or_is_refused_by_name(whole, folder, data):
    restore(whole, folder)
    path = folder / data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    content = json.loads(path.read_text())
    *above, last = data.draw(st.sampled_from(places(content)))
    inner = content
    for key in above:
        inner = inner[key]
    inner[last] = data.draw(st.sampled_from([None, True, -1, 0, 2**40, "x", "", [], [None], {}, {"a": 1}]))
    path.write_text(json.dumps(content))
    said = error_of(folder)
    assert said is None or str(path) in said, said


# ----------------------------------------------------------------------------- no pickle, no code, no waiting


def test_no_pickle_is_opened_and_no_code_of_a_folder_is_run(whole, folder, tmp_path):
    """Beside good weights lie pickles and modules that a config asks for: nobody looks at them."""
    restore(whole, folder)
    marker = tmp_path / "was run"
    code = f"open({str(marker)!r}, 'w').close()"
    for name in ("modeling_evil.py", "tokenization_evil.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(code)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(code)))
    (folder / "training_args.pt").write_bytes(pickle.dumps(Evil(code)))
    auto_map = {"AutoConfig": "modeling_evil.A", "AutoModelForCausalLM": "modeling_evil.B"}
    change(folder / "config.json", {"auto_map": auto_map, "trust_remote_code": True})
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_evil.T", None]}, "tokenizer_class": "T"}
    change(folder / "tokenizer_config.json", tokenizer)
    program = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import nanobeacon
llm = nanobeacon.LLM(sys.argv[1], device="cpu")
llm.generate(["ab"], nanobeacon.SamplingParams(max_tokens=2))
print("\\n".join(name for name in opened if name.startswith(sys.argv[1])))
"""
    finished = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    opened = {Path(line).name for line in finished.stdout.splitlines()}
    assert {"config.json", WEIGHTS} <= opened  # the hook sees
    assert not [name for name in opened if Path(name).suffix in (".bin", ".pt", ".py", ".pyc")]
    assert not marker.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert marker.exists()  # it would have been


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)


@pytest.mark.parametrize("name", [*TEXT_FILES, "generation_config.json", WEIGHTS, INDEX])
def test_a_pipe_instead_of_a_file_is_not_waited_for(whole, folder, name):
    restore(whole, folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(folder, name)
