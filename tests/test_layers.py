"""Linear maps on a CPU: packed weights, and weights in blocks, against the plain product."""

import pytest
import torch
from tiny import tiny_model

from nanobeacon import LLM, SamplingParams
from nanobeacon.models import packing
from nanobeacon.models.layers import Linear, weight
from nanobeacon.models.packing import (
    BlockedLinear,
    PackedLinear,
    blocked,
    blocking_pays,
    packed,
    packing_pays,
)

CPU = torch.device("cpu")
needs_fbgemm = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this build of torch has no fbgemm"
)


def filled(*shape, scale=0.05):
    parameter = weight(*shape, dtype=torch.bfloat16, device=CPU)
    return parameter.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale)


def logits_of(llm: LLM) -> torch.Tensor:
    """All that a model says to two prompts, one of them longer, and what is given behind them."""
    rows = []
    prompts = [[5, 7, 9], list(range(3, 43))]
    llm.score(prompts, [[11] * 6] * 2, on_logits=lambda request, index, row: rows.append(row.clone()))
    return torch.stack(rows)


def exact(x, matrix, bias):
    return x.double() @ matrix.double().T + (0 if bias is None else bias.double())


@needs_fbgemm
@pytest.mark.parametrize("block", [1 << 22, 4096])  # one block of rows, many
@pytest.mark.parametrize(
    "outputs, inputs", [(48, 32), (100, 512), (33, 576), (40, 1024), (40, 896), (7, 1100)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_matrix_is_the_same_map(monkeypatch, block, outputs, inputs, biased):
    monkeypatch.setattr(packing, "BLOCK", block)
    matrix, bias = filled(outputs, inputs), filled(outputs, scale=1.0) if biased else None
    linear, before = Linear(matrix, bias), matrix.clone()
    fast = packed(linear)
    assert linear.weight is None and torch.equal(matrix, before)  # a tied embedding goes on reading it
    for rows in (1, 2, 7, 40):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        wanted = exact(x, before, bias)
        got = fast(x)
        assert got.dtype == torch.float32 and got.shape == (rows, outputs)
        assert (got - wanted).abs().max() < 2e-6 * wanted.abs().max()


@needs_fbgemm
def test_inputs_past_a_multiple_of_512_stay_apart_only_where_that_is_smaller(monkeypatch):
    monkeypatch.setattr(packing, "BLOCK", 4096)
    for inputs, apart in ((512, 0), (576, 64), (768, 256), (896, 0), (64, 0), (1088, 64)):
        linear = packed(Linear(filled(64, inputs)))
        assert (0 if linear.rest is None else len(linear.rest)) == apart


@needs_fbgemm
def test_tiny_weights_move_by_less_than_float16_can_show():
    matrix = filled(16, 64, scale=1e-6)
    linear = packed(Linear(matrix.clone()))
    assert (linear(torch.eye(64)) - matrix.float().T).abs().max() <= 2**-25


@pytest.mark.parametrize("value", [1e5, float("nan"), float("inf")])
def test_a_matrix_beyond_float16_becomes_float32(value):
    matrix = filled(16, 64)
    matrix[3, 5] = value
    linear = packed(Linear(matrix))
    assert type(linear) is Linear and torch.equal(linear.weight, matrix.float()) | (value != value)
    assert torch.isfinite(linear(torch.eye(64))).all() == (value == 1e5)


needs_instructions = pytest.mark.skipif(
    not blocking_pays(torch.bfloat16, CPU), reason="this CPU has no bf16 instructions, or torch no oneDNN"
)


@needs_instructions
@pytest.mark.parametrize("outputs, inputs", [(48, 32), (33, 576), (7, 1100), (1, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_matrix_in_blocks_is_the_same_map(outputs, inputs, biased):
    matrix, bias = filled(outputs, inputs), filled(outputs, scale=1.0) if biased else None
    linear, before = Linear(matrix, bias), matrix.clone()
    fast = blocked(linear)
    assert linear.weight is None and torch.equal(matrix, before)  # a tied embedding goes on reading it
    for rows in (1, 2, 7, 40):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16()
        wanted = exact(x, before, bias)
        got = fast(x)
        assert got.dtype == torch.bfloat16 and got.shape == (rows, outputs)
        assert (got - wanted).abs().max() < 2**-8 * wanted.abs().max()  # the rounding of the result


@needs_instructions
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_blocks_says_what_a_plain_one_says(tmp_path, monkeypatch, family, tied):
    tiny_model(family, tie_word_embeddings=tied).bfloat16().save_pretrained(tmp_path)
    rows = {}
    for name, pays in (("blocked", True), ("plain", False)):
        monkeypatch.setattr(packing, "blocking_pays", lambda dtype, device, pays=pays: pays)
        llm = LLM(str(tmp_path), dtype="bfloat16", device="cpu")
        assert isinstance(llm.engine.model.head, BlockedLinear) == pays
        assert (llm.engine.model.embedding is None) == (pays and tied)
        rows[name] = logits_of(llm)
    plain, in_blocks = rows["plain"], rows["blocked"]
    assert (in_blocks - plain).abs().max() < 0.03 * plain.abs().max()


def test_only_bf16_with_instructions_for_it_is_kept_in_blocks(monkeypatch):
    for has_instructions in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has_instructions: has)
        with_onednn = has_instructions and torch.backends.mkldnn.is_available()
        assert blocking_pays(torch.bfloat16, CPU) == with_onednn
        assert not blocking_pays(torch.float32, CPU) and not blocking_pays(torch.float16, CPU)
        assert not blocking_pays(torch.bfloat16, torch.device("cuda"))


def test_float32_is_not_packed_nor_anything_on_a_gpu():
    assert not packing_pays(torch.float32, CPU) and not packing_pays(torch.bfloat16, torch.device("cuda"))


@needs_fbgemm
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_says_what_a_plain_one_says(tmp_path, monkeypatch, family, tied):
    """bf16 weights in both: float32 activations differ from bf16 ones by their rounding, no more."""
    tiny_model(family, tie_word_embeddings=tied).bfloat16().save_pretrained(tmp_path)
    rows = {}
    for name, pays in (("packed", True), ("plain", False), ("float32", None)):
        monkeypatch.setattr(packing, "packing_pays", lambda dtype, device, pays=pays: bool(pays))
        monkeypatch.setattr(packing, "blocking_pays", lambda dtype, device: False)
        llm = LLM(str(tmp_path), dtype="float32" if pays is None else "bfloat16", device="cpu")
        assert isinstance(llm.engine.model.head, PackedLinear) == bool(pays)
        assert (
            (llm.engine.model.embedding is None) == (llm.engine.model.rows is not None) == bool(pays and tied)
        )
        rows[name] = logits_of(llm)
        assert llm.generate([[5, 7, 9]], SamplingParams(max_tokens=4))[0].error is None
    plain, packed, wanted = (rows[name] for name in ("plain", "packed", "float32"))
    size = wanted.abs().max()
    assert (packed - plain).abs().max() < 0.05 * size
    assert (packed - wanted).norm() <= 1.05 * (plain - wanted).norm()


@needs_fbgemm
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("has_instructions", [False, True])
def test_a_float16_checkpoint_keeps_its_bits_on_every_cpu(tmp_path, monkeypatch, family, has_instructions):
    """Its logits are those of transformers in float32 but for the cache's rounding: nearer than bf16 is."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    model = tiny_model(family).half()
    model.save_pretrained(tmp_path)
    prompt = torch.arange(3, 40)
    with torch.no_grad():
        wanted = model.float()(prompt[None]).logits[0, -1]
        rounded = model.bfloat16().float()(prompt[None]).logits[0, -1]
    kept = []
    llm = LLM(tmp_path, device="cpu")
    assert llm.engine.cache.keys.dtype == torch.bfloat16 and isinstance(llm.engine.model.head, PackedLinear)
    llm.score([prompt.tolist()], [[5]], on_logits=lambda i, index, logits: kept.append(logits.clone()))
    ours = (kept[0] - wanted).abs().max()
    assert ours < (rounded - wanted).abs().max() and ours < 0.02 * wanted.abs().max()


def test_where_nothing_can_be_packed_float16_is_rounded_and_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tiny_model("llama").half().save_pretrained(tmp_path)
    llm = LLM(tmp_path, device="cpu")
    assert llm.engine.model.embedding.dtype == torch.bfloat16
    assert [r.message for r in caplog.records if r.message == "float16 on a CPU: computing in bfloat16"]
