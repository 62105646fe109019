"""checkpoint.py: from a folder or hub id to filled views. Folders are made here, the hub is monkeypatched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import prompt_of, tiny_folder, tiny_model

from nanobeacon import LLM, SamplingParams
from nanobeacon import checkpoint as module
from nanobeacon.checkpoint import Checkpoint, load_into
from nanobeacon.hub import resolve
from nanobeacon.parallel import Part

INDEX = "model.safetensors.index.json"


def random(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]], **changes: str) -> Path:
    """Write shards and their index; changes: entries of the index that differ (name with _ for .)."""
    weight_map = {}
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    weight_map |= {name.replace("_", "."): file for name, file in changes.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def views_for(tensors: dict[str, torch.Tensor], dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.full(tensor.shape, torch.nan, dtype=dtype) for name, tensor in tensors.items()}


# Loading


@pytest.mark.parametrize("block_bytes", [1, 100, 4 << 20])
def test_views_of_parts_get_the_rows_or_columns_of_their_part(tmp_path, monkeypatch, block_bytes):
    tensors = {"q": random(12, 5), "o": random(7, 12), "bias": random(12), "norm": random(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    views = {
        "q": torch.zeros(4, 5),
        "o": torch.zeros(7, 4),
        "bias": torch.zeros(4),
        "norm": torch.zeros(5),
    }
    parts = {"q": Part(0, 8, 12), "o": Part(1, 8, 12), "bias": Part(0, 8, 12)}
    load_into(views, Checkpoint(tmp_path), progress=False, parts=parts)
    assert torch.equal(views["q"], tensors["q"][8:])
    assert torch.equal(views["o"], tensors["o"][:, 8:])
    assert torch.equal(views["bias"], tensors["bias"][8:])
    assert torch.equal(views["norm"], tensors["norm"])


def test_a_part_of_a_tensor_with_another_shape_is_misshapen(tmp_path):
    save_file({"o": random(7, 12)}, tmp_path / "model.safetensors")
    wanted = r"misshapen: o \(7, 12\) instead of \(7, 8\)"
    with pytest.raises(ValueError, match=wanted):
        load_into({"o": torch.zeros(7, 4)}, Checkpoint(tmp_path), progress=False, parts={"o": Part(1, 4, 8)})


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_every_value_arrives_cast_to_the_dtype_of_its_view(tmp_path, stored, wanted, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)  # many blocks, the last one short, and rows beyond one
    tensors = {"a.weight": random(37, 11, dtype=stored), "a.bias": random(601, dtype=stored)}
    tensors |= {"wide.weight": random(3, 1500, dtype=stored), "cube.weight": random(7, 3, 5, dtype=stored)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    views = views_for(tensors, wanted)
    load_into(views, Checkpoint(tmp_path), progress=False)
    assert all(torch.equal(views[name], tensor.to(wanted)) for name, tensor in tensors.items())


def test_views_into_fused_and_strided_parameters(tmp_path):
    tensors = {"q": random(6, 8), "k": random(2, 8), "column": random(5, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    fused, wide = torch.nn.Parameter(torch.zeros(8, 8)), torch.zeros(5, 9)
    q, k = fused.split([6, 2])  # a parameter that wants gradients: loading is no operation on it
    load_into({"q": q, "k": k, "column": wide[:, 3:6]}, Checkpoint(tmp_path), progress=False)
    assert torch.equal(fused, torch.cat((tensors["q"], tensors["k"])))
    assert torch.equal(wide[:, 3:6], tensors["column"]) and not wide[:, :3].any() and not wide[:, 6:].any()


def test_shards_follow_the_index_and_other_files_are_ignored(tmp_path):
    first, second = {"a": random(4, 4), "b": random(3)}, {"c": random(2, 5)}
    sharded(tmp_path, {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second})
    for stray in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"a": torch.zeros(1), "stray": torch.zeros(1)}, tmp_path / stray)
    (tmp_path / "model-00003-of-00002.safetensors").write_bytes(b"broken")
    views = views_for(first | second)
    load_into(views, Checkpoint(tmp_path), progress=False)
    assert all(torch.equal(views[name], tensor) for name, tensor in (first | second).items())


def test_a_shard_may_lie_in_a_folder_below(tmp_path):
    (tmp_path / "weights").mkdir()
    checkpoint = Checkpoint(sharded(tmp_path, {"weights/one.safetensors": {"a": random(2)}}))
    assert checkpoint.tensors["a"].file == tmp_path / "weights/one.safetensors"


def test_old_inverse_frequencies_are_the_only_tensors_skipped(tmp_path):
    tensors = {"a": random(2, 2), "model.layers.0.self_attn.rotary_emb.inv_freq": random(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    views = {"a": torch.zeros(2, 2)}
    load_into(views, Checkpoint(tmp_path), progress=False)
    assert torch.equal(views["a"], tensors["a"])


def test_dtype_is_that_of_most_tensors(tmp_path):
    tensors = {"a": random(2, dtype=torch.float16), "b": random(3, dtype=torch.float16), "norm": random(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).dtype == "float16"


def test_progress_goes_to_stderr_and_can_be_silent(tmp_path, capsys):
    save_file({"a": random(8)}, tmp_path / "model.safetensors")
    load_into({"a": torch.zeros(8)}, Checkpoint(tmp_path), progress=False)
    assert capsys.readouterr() == ("", "")
    load_into({"a": torch.zeros(8)}, Checkpoint(tmp_path))
    out, err = capsys.readouterr()
    assert out == "" and "weights" in err and "100%" in err


# Complete, or one error before any data


def test_one_error_lists_everything_that_does_not_fit_and_nothing_is_copied(tmp_path):
    tensors = {"good": random(2), "short": random(3, 4), "model.extra.bias": random(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    views = {"good": torch.zeros(2), "short": torch.zeros(4, 3), "absent": torch.zeros(1)}
    with pytest.raises(ValueError) as caught:
        load_into(views, Checkpoint(tmp_path), progress=False)
    message = str(caught.value)
    assert "missing: absent" in message and "unexpected: model.extra.bias" in message and "\n" not in message
    assert "misshapen: short (3, 4) instead of (4, 3)" in message and str(tmp_path) in message
    assert not views["good"].any()


def test_a_bias_without_a_place_is_unexpected(tmp_path):
    name = "model.layers.0.self_attn.o_proj.bias"
    save_file({"a": random(2), name: random(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"unexpected: {name}"):
        load_into({"a": torch.zeros(2)}, Checkpoint(tmp_path), progress=False)


def test_long_lists_are_shortened_with_a_count(tmp_path):
    save_file({"a": random(1)}, tmp_path / "model.safetensors")
    views = {f"layer.{i:03}": torch.zeros(1) for i in range(100)} | {"a": torch.zeros(1)}
    with pytest.raises(ValueError, match="missing: layer.000, .*layer.007 and 92 more") as caught:
        load_into(views, Checkpoint(tmp_path), progress=False)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_tensors_that_are_not_float_are_called_quantised(tmp_path, dtype):
    save_file({"a": torch.zeros(4, dtype=dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="quantised: a "):
        load_into({"a": torch.zeros(4)}, Checkpoint(tmp_path), progress=False)


def test_a_file_cut_while_it_loads_is_an_error(tmp_path):
    save_file({"a": random(1000)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(ValueError, match="model.safetensors ended early"):
        load_into({"a": torch.zeros(1000)}, checkpoint, progress=False)


# Names as they are in the wild


ANCHOR = "layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    "prefix", ["model.", "", "module.model.", "_orig_mod.model.", "module._orig_mod.model."]
)
def test_names_with_a_prefix_of_their_own_or_none_are_the_models(tmp_path, prefix):
    names = ["embed_tokens.weight", ANCHOR, "norm.weight", "layers.1.mlp.up_proj.weight"]
    tensors = {f"{prefix}{name}": random(i + 1) for i, name in enumerate(names)}
    tensors[f"{prefix.removesuffix('model.')}lm_head.weight"] = random(9)
    save_file(tensors, tmp_path / "model.safetensors")
    found = Checkpoint(tmp_path).tensors
    assert set(found) == {"lm_head.weight", *(f"model.{name}" for name in names)}
    assert found["lm_head.weight"].shape == (9,)


def test_compiled_layers_inside_a_model_lose_the_mark(tmp_path):
    tensors = {"model.layers.0._orig_mod.input_layernorm.weight": random(2), "model.norm.weight": random(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert set(Checkpoint(tmp_path).tensors) == {f"model.{ANCHOR}", "model.norm.weight"}


def test_names_that_differ_in_a_prefix_only_are_refused(tmp_path):
    tensors = {f"model.{ANCHOR}": random(2), f"_orig_mod.model.{ANCHOR}": random(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="differ in a prefix"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "extra",
    [
        {"v_head.summary.weight": random(2)},
        {"score.weight": random(2), "model.layers.0.self_attn.k_scale": random(1)},
        {"model.layers.0.self_attn.masked_bias": random(1), "counter": torch.zeros(3, dtype=torch.int64)},
    ],
)
def test_what_no_part_of_the_model_wants_is_named_once_and_left_aside(tmp_path, caplog, extra):
    save_file({"a": random(2), **extra}, tmp_path / "model.safetensors")
    load_into({"a": torch.zeros(2)}, Checkpoint(tmp_path), progress=False)
    (line,) = [r.message for r in caplog.records]
    assert all(name in line for name in extra)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.bias"]
)
def test_what_would_change_the_computation_stays_an_error(tmp_path, name):
    save_file({"a": random(2), name: random(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"unexpected: {name}"):
        load_into({"a": torch.zeros(2)}, Checkpoint(tmp_path), progress=False)


# Two sets of weights, tied pairs: real folders, against transformers


def logits_of(folder, prompt) -> torch.Tensor:
    kept = []
    llm = LLM(folder, device="cpu", dtype="float32")
    llm.score([prompt], [[5]], on_logits=lambda i, index, logits: kept.append(logits.clone()))
    return kept[0]


def test_a_single_file_comes_before_an_index_that_does_not_name_it(tmp_path, caplog):
    """As transformers loads such a folder; and one whose old shards are gone."""
    old, new = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    old.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = [path for path in tmp_path.glob("model-*.safetensors")]
    assert len(shards) > 1
    save_file({k: v.contiguous() for k, v in new.state_dict().items() if k != "lm_head.weight"},
              tmp_path / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    prompt = prompt_of(7)
    loaded = type(new).from_pretrained(tmp_path).float().eval()
    with torch.no_grad():
        theirs = loaded(torch.tensor([prompt])).logits[0, -1]
        wanted = new(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(theirs, wanted)
    torch.testing.assert_close(logits_of(tmp_path, prompt), wanted, atol=1e-4, rtol=1e-4)
    assert [r.message for r in caplog.records if "left aside" in r.message and INDEX in r.message]
    for shard in shards:
        shard.unlink()
    torch.testing.assert_close(logits_of(tmp_path, prompt), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("saved", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_a_tied_pair_may_be_saved_under_either_name(tmp_path, saved):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    tensors.pop("lm_head.weight", None)
    both = ["model.embed_tokens.weight", "lm_head.weight"]
    for name in both if saved == "both" else [saved]:
        tensors[name] = embedding.clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompt = prompt_of(7)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits_of(tmp_path, prompt), wanted, atol=1e-4, rtol=1e-4)


def test_an_untied_model_without_its_embedding_stays_an_error(tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="missing: model.embed_tokens.weight"):
        logits_of(tmp_path, [5])


@pytest.mark.parametrize("window", [None, 64])
def test_mistral_is_what_transformers_computes(tmp_path, window):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    torch.manual_seed(0)
    config = MistralConfig(**sizes, **heads, sliding_window=window, eos_token_id=2, bos_token_id=1)
    model = MistralForCausalLM(config).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(tmp_path)
    if window is not None:
        with pytest.raises(ValueError, match="sliding_window is 64"):
            LLM(tmp_path, device="cpu", dtype="float32", max_model_len=65)
    llm = LLM(tmp_path, device="cpu", dtype="float32")
    assert llm.engine.max_model_len == (window or 512)
    prompt = prompt_of(50)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    kept = []
    llm.score([prompt], [[5]], on_logits=lambda i, index, logits: kept.append(logits.clone()))
    torch.testing.assert_close(kept[0].log_softmax(-1), wanted, atol=1e-4, rtol=1e-4)


# Folders that are not right


def test_an_index_that_names_a_missing_shard(tmp_path):
    sharded(tmp_path, {"one.safetensors": {"a": random(2)}}, b="two.safetensors", c="three.safetensors")
    with pytest.raises(ValueError, match="three.safetensors, two.safetensors.*missing"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "a/../../x", "/etc/x", "..\\x", "C:\\x", "\\\\host\\x", "C:x"]
)
def test_an_index_that_leaves_the_folder_is_refused(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"b": random(2)}, tmp_path / "x.safetensors")
    sharded(folder, {"one.safetensors": {"a": random(2)}}, b=name)
    with pytest.raises(ValueError, match="inside the folder"):
        Checkpoint(folder)


def test_links_of_the_hub_cache_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": random(2)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    assert Checkpoint(tmp_path / "snapshot").tensors["a"].shape == (2,)


def test_an_index_that_contradicts_its_shards(tmp_path):
    sharded(tmp_path, {"one.safetensors": {"a": random(2)}}, ghost="one.safetensors")
    views = {"a": torch.zeros(2), "ghost": torch.zeros(1)}
    with pytest.raises(ValueError, match="missing: ghost .*has it in one.safetensors"):
        load_into(views, Checkpoint(tmp_path), progress=False)
    load_into({"a": torch.zeros(2)}, Checkpoint(tmp_path), progress=False)  # what nobody needs may be lost
    sharded(
        tmp_path, {"one.safetensors": {"a": random(2)}, "two.safetensors": {"a": random(2), "b": random(1)}}
    )
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="two.safetensors.*'a'.*one file only"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "{", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'],
)
def test_a_malformed_index_names_its_file(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ValueError, match=INDEX):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_is_refused_and_the_error_says_why(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{name}.*pickle can run code"):
        Checkpoint(tmp_path)


def test_a_folder_without_weights(tmp_path):
    save_file({"a": random(2)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(ValueError, match="has no model.safetensors and no"):
        Checkpoint(tmp_path)


def header(content: str, data: int = 8) -> bytes:
    return len(content).to_bytes(8, "little") + content.encode() + bytes(data)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        b"\xff" * 100,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12\n",  # cloned without git lfs
        header("no json"),
        header('{"a": 1}'),
        header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', data=4),
        header('{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'),
        header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}', data=16),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("left", [3, 100, -1])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, left):
    tensors = {f"layer.{i}.weight": random(10, 10) for i in range(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:left])
    with pytest.raises(ValueError, match=r"model\.safetensors is no whole safetensors file"):
        Checkpoint(tmp_path)


# Memory

MEASURE = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from nanobeacon.checkpoint import Checkpoint, load_into

def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

def load(folder, dtype):
    checkpoint = Checkpoint(folder)
    views = {name: torch.empty(info.shape, dtype=dtype) for name, info in checkpoint.tensors.items()}
    load_into(views, checkpoint, progress=False)
    return sum(view.nbytes for view in views.values())

load(sys.argv[1], torch.float32)  # once in small: what loads lazily in torch is not the loader's
before = status("VmRSS:")
size = load(sys.argv[2], getattr(torch, sys.argv[3]))
print((status("VmHWM:") - before) / size)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of peak memory")
def test_loading_takes_less_than_a_tenth_beside_the_model(tmp_path):
    """The embedding is half of the model, as in small ones: read whole, it would be far more than a tenth."""
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    save_file({"a": random(64, 64)}, small / "model.safetensors")
    tensors = {f"{i}.weight": torch.ones(4000, 1000, dtype=torch.bfloat16) for i in range(6)}
    last = {"embedding": torch.ones(24000, 1000, dtype=torch.bfloat16)}  # read when all else is in memory
    sharded(large, {"one.safetensors": tensors, "two.safetensors": last})  # 96 MB
    command = [sys.executable, "-c", MEASURE, str(small), str(large), "float16"]
    finished = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert 0.95 < float(finished.stdout) < 1.1


def test_rows_left_in_the_file_are_those_of_the_tensor(tmp_path):
    ids = torch.tensor([3, 0, 39, 3])
    for dtype in (torch.bfloat16, torch.float32):
        tensors = {"odd": random(3, 5).to(dtype), "embedding": random(40, 8).to(dtype)}
        save_file(tensors, tmp_path / "model.safetensors")
        rows = Checkpoint(tmp_path).rows("embedding", dtype)(ids)
        assert rows.dtype == dtype and torch.equal(rows, tensors["embedding"][ids])
        assert Checkpoint(tmp_path).rows("embedding", torch.float16) is None
        rows = Checkpoint(tmp_path).rows("embedding", dtype)
        os.truncate(tmp_path / "model.safetensors", 400)
        with pytest.raises(ValueError, match="cut short"):
            rows(ids)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """In place: same file, same size. The clock of a file's times ticks in milliseconds."""
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(content)


def test_an_overwritten_file_is_noticed_a_replaced_one_is_harmless(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {"embedding": random(40, 8)}
    ids = torch.tensor([3, 39])
    save_file(tensors, path)
    checkpoint = Checkpoint(tmp_path)
    rows = checkpoint.rows("embedding", torch.float32)
    # 1. Another file under the same name, or none: what is open stays whole.
    save_file({"embedding": random(40, 8)}, tmp_path / "new")
    (tmp_path / "new").rename(path)
    assert torch.equal(rows(ids), tensors["embedding"][ids])
    path.unlink()
    assert torch.equal(rows(ids), tensors["embedding"][ids])
    # 2. Written to in place: an error, before a wrong row is used.
    save_file(tensors, path)
    checkpoint = Checkpoint(tmp_path)
    rows = checkpoint.rows("embedding", torch.float32)
    overwrite(path, path.stat().st_size - 4, bytes(4))
    for use in (
        lambda: rows(ids),
        lambda: checkpoint.rows("embedding", torch.float32),
        lambda: load_into({"embedding": torch.zeros(40, 8)}, checkpoint, progress=False),
    ):
        with pytest.raises(ValueError, match=r"model\.safetensors was changed while its model is in use"):
            use()


def test_an_overwritten_checkpoint_ends_requests_and_never_changes_a_token(tmp_path):
    """A tied embedding's rows stay in the file where weights are packed; all else is in memory."""
    tiny_model("llama").half().save_pretrained(tmp_path)
    llm = LLM(tmp_path, device="cpu")
    if llm.engine.model.rows is None:
        pytest.skip("this machine packs no weights")
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    (before,) = llm.generate([[5, 6, 7]], params)
    assert len(before.token_ids) == 5
    path = tmp_path / "model.safetensors"
    overwrite(path, path.stat().st_size // 2, b"\x01\x02")
    with pytest.raises(ValueError, match="was changed while its model is in use"):
        llm.generate([[5, 6, 7]], params)
    llm.engine.scheduler.check()
    assert llm.engine.pool.used_count == 0


# From a name to a folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """snapshot_download replaced: its calls are kept; `.answer` is what it returns, or raises."""

    class Hub:
        answer, calls = tmp_path, []

        def snapshot_download(self, repository, **options):
            self.calls.append((repository, options))
            if isinstance(self.answer, Exception):
                raise self.answer
            return str(self.answer)

    import huggingface_hub

    hub = Hub()
    hub.calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_a_folder_stays_as_it_is_and_never_asks_the_hub(tmp_path, hub, monkeypatch):
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("some/model") == Path("some/model")  # a folder wins over a repository of the same name
    assert resolve(tmp_path) == tmp_path and resolve("~/some") == tmp_path / "some"
    assert hub.calls == []


def downloaded(options: dict, files: list[str]) -> list[str]:
    from huggingface_hub.utils import filter_repo_objects

    return [*filter_repo_objects(files, **options)]


def test_only_the_needed_files_are_downloaded(hub, tmp_path):
    small = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ]
    weights = ["model.safetensors", "model-00001-of-00002.safetensors", INDEX]
    others = [
        "consolidated.safetensors",
        "adapter_model.safetensors",
        "pytorch_model.bin",
        "original/tokenizer.model",
    ]
    others += [
        "README.md",
        "onnx/model.onnx",
        "model.onnx",
        "training_args.bin",
        "fp16/model.safetensors",
        "model.gguf",
    ]
    assert resolve("owner/model") == tmp_path
    assert resolve("gpt2", config_only=True) == tmp_path
    (first, options), (second, without_weights) = hub.calls
    assert (first, second) == ("owner/model", "gpt2")
    assert downloaded(options, small + weights + others) == small + weights
    assert downloaded(without_weights, small + weights + others) == small


def http_error(kind: str, text: str = "401 Client Error.\n\nRepository Not Found"):
    """An error of huggingface_hub without the response that its constructor wants."""
    from huggingface_hub import errors

    error = getattr(errors, kind).__new__(getattr(errors, kind))
    error.args = (text,)
    return error


@pytest.mark.parametrize(
    "kind, words",
    [
        ("GatedRepoError", "gated.*hf auth login"),
        ("RepositoryNotFoundError", "no repository of the hub"),
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("HFValidationError", "no valid repository id"),
        ("HfHubHTTPError", "HfHubHTTPError: 401 Client Error. Repository Not Found"),
    ],
)
def test_a_repository_that_cannot_be_had_is_a_value_error_of_one_line(hub, kind, words):
    hub.answer = http_error(kind)
    with pytest.raises(ValueError, match=f"'owner/model' is .*{words}") as caught:
        resolve("owner/model")
    assert "\n" not in str(caught.value) and type(caught.value) is ValueError


def test_an_error_of_the_network_is_a_value_error_too(hub):
    hub.answer = ConnectionResetError("peer went away")
    with pytest.raises(ValueError, match="ConnectionResetError: peer went away"):
        resolve("owner/model")


@pytest.mark.parametrize("name", ["owner/--model", "own er/model", "a" * 200, "nul\x00"])
def test_names_that_the_hub_library_refuses(name):
    """Its real check, which runs before any network."""
    with pytest.raises(ValueError, match="no valid repository id"):
        resolve(name)


def test_without_network_and_cache_the_real_library_says_so(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="no folder and not wholly in the hub's cache"):
        resolve("owner/model")


def test_without_network_the_cache_of_the_real_library_serves(monkeypatch, tmp_path):
    from huggingface_hub import constants

    commit = "0" * 40
    repository = tmp_path / "models--owner--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    save_file({"a": random(2)}, snapshot / "model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = resolve("owner/model")
    assert folder.samefile(snapshot) and [*Checkpoint(folder).tensors] == ["a"]


@pytest.mark.parametrize(
    "name", ["./model", "../model", "/no/such/model", "~/no/such/model", "a/b/c", "", Path("owner/model")]
)
def test_what_can_only_be_a_folder_must_exist(hub, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        resolve(name)
    assert hub.calls == []


def test_a_folder_of_the_hubs_cache_is_its_snapshot(tmp_path, hub):
    repository = tmp_path / "models--owner--model"
    for commit in ("1" * 40, "2" * 40):
        (repository / "snapshots" / commit).mkdir(parents=True)
    with pytest.raises(ValueError, match="number of snapshots is 2"):
        resolve(repository)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("2" * 40 + "\n")
    assert resolve(str(repository)) == repository / "snapshots" / ("2" * 40)
    (repository / "refs" / "main").write_text("3" * 40)  # gone
    (repository / "snapshots" / ("2" * 40)).rmdir()
    assert resolve(repository) == repository / "snapshots" / ("1" * 40)
    (tmp_path / "models--x").mkdir()
    assert resolve(tmp_path / "models--x") == tmp_path / "models--x"  # a folder of that name, no cache


@pytest.mark.parametrize("revision", ["main", "v1.0", "0123abc", "refs-pr-1"])
def test_a_revision_is_asked_for(hub, tmp_path, revision):
    assert resolve(f"owner/model@{revision}") == tmp_path
    assert hub.calls[0][0] == "owner/model" and hub.calls[0][1]["revision"] == revision
    hub.answer = http_error("RevisionNotFoundError")
    with pytest.raises(ValueError, match=f"without a revision '{revision}'"):
        resolve(f"owner/model@{revision}")


@pytest.mark.parametrize(
    "address, instead",
    [
        ("https://hub.example/Qwen/Qwen3-4B", "'Qwen/Qwen3-4B'"),
        ("http://hub.example/Qwen/Qwen3-4B/tree/v2?x=1", "'Qwen/Qwen3-4B@v2'"),
        ("https://hub.example/", "owner/name"),
    ],
)
def test_a_web_address_is_answered_with_what_to_write(hub, address, instead):
    with pytest.raises(ValueError, match=f"web address; .*{instead}"):
        resolve(address)
    assert hub.calls == []


def test_a_file_instead_of_a_folder(hub, tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match="model.gguf' is no folder"):
        resolve(str(tmp_path / "model.gguf"))
    assert hub.calls == []


@pytest.mark.real
def test_the_real_model():
    from tests.real_checkpoint import real_checkpoint

    folder = real_checkpoint()
    tensors = load_file(folder / "model.safetensors")
    views = views_for(tensors, torch.bfloat16)
    load_into(views, Checkpoint(folder), progress=False)
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors.items())
    assert len(tensors) == 272 and "lm_head.weight" not in tensors


def test_what_lies_there_instead_of_a_model_is_named(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n"
    folder = tiny_folder(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(pointer)
    with pytest.raises(ValueError, match="git lfs pull"):
        LLM(folder, device="cpu")
    (folder / "config.json").write_bytes(pointer)
    with pytest.raises(ValueError, match="git lfs pull"):
        LLM(folder, device="cpu")
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="adapter"):
        LLM(folder, device="cpu")


def test_a_byte_order_mark_in_a_config_is_no_part_of_it(tmp_path):
    folder = tiny_folder(tmp_path, "llama")
    content = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + content)
    assert LLM(folder, device="cpu", dtype="float32").model_config.family == "llama"
