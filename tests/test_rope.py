"""rope.py against transformers' own rotary embedding, kind by kind, in both spellings of the config."""

import pytest
import torch

from nanobeacon.config import RopeConfig, parse_config
from nanobeacon.rope import Rope

transformers = pytest.importorskip("transformers")
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb  # noqa: E402

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 8,
    "vocab_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {**LLAMA3, "original_max_position_embeddings": 1024},
    {**LLAMA3, "original_max_position_embeddings": 2048, "factor": 32.0, "high_freq_factor": 2.5},
    YARN,
    {**YARN, "original_max_position_embeddings": 1024},
    {**YARN, "truncate": False},
    {**YARN, "factor": 1.0},
    {**YARN, "factor": 40.0, "beta_fast": 16, "beta_slow": 2},
    {**YARN, "beta_fast": 2.0, "beta_slow": 2.0},
    {**YARN, "attention_factor": 0.7},
    {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    {**YARN, "mscale": 0.5},  # without mscale_all_dim it counts for nothing
]


def ours_and_theirs(scaling: dict, theta: float, spelling: str, head_dim: int = 128):
    """Our Rope and transformers', of the same config.json."""
    raw = {**SIZES, "head_dim": head_dim, "rope_theta": theta, "rope_scaling": {**scaling}}
    if spelling == "rope_parameters":
        raw = {**SIZES, "head_dim": head_dim, "rope_parameters": {**scaling, "rope_theta": theta}}
    config = parse_config({"architectures": ["LlamaForCausalLM"], **raw})
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**raw))
    return Rope(config.rope, head_dim, config.max_position_embeddings, torch.device("cpu")), theirs


def their_cos_sin(theirs, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers repeats the D/2 numbers; the first half is enough."""
    cos, sin = theirs(torch.zeros(1), positions[None])
    return cos[0].chunk(2, dim=-1)[0], sin[0].chunk(2, dim=-1)[0]


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("theta, head_dim", [(1e4, 64), (5e5, 128), (1e6, 128)])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_frequencies_and_attention_factor(scaling, theta, head_dim, spelling):
    ours, theirs = ours_and_theirs(scaling, theta, spelling, head_dim)
    assert ours.inv_freq.dtype == torch.float32
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-6)
    positions = torch.tensor([0, 1, 17, 1000, 4095])
    wanted = their_cos_sin(theirs, positions)
    # An angle of 4,095 radians has an ulp of 5e-4: equal frequencies, not a tolerance, make these equal
    torch.testing.assert_close(ours.cos_sin(positions, positions + 1), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scaling", SCALINGS[:2] + SCALINGS[3:], ids=str)
def test_lengths_matter_to_dynamic_only(scaling):
    ours, _ = ours_and_theirs(scaling, 1e4, "rope_scaling")
    positions = torch.arange(50)
    assert torch.equal(ours.cos_sin(positions)[0], ours.cos_sin(positions, positions + 10_000)[0])


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 6000, 16384])
def test_dynamic_prefill_of_a_length(length):
    """transformers takes one base for a whole prompt: that of its length."""
    ours, theirs = ours_and_theirs({"rope_type": "dynamic", "factor": 4.0}, 1e4, "rope_scaling")
    positions = torch.arange(length)
    wanted = their_cos_sin(theirs, positions)
    found = ours.cos_sin(positions, torch.full_like(positions, length))
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=2e-3)  # an ulp of 16,384 radians
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=2e-3)
    torch.testing.assert_close(ours._dynamic(torch.tensor(length)), theirs.inv_freq, rtol=1e-6, atol=0)


def test_dynamic_decode_steps_each_have_the_base_of_their_length():
    """A prompt of 4,090 tokens, then decoding over the border at 4,096, and back to a short prompt."""
    ours, theirs = ours_and_theirs({"rope_type": "dynamic", "factor": 2.0}, 1e4, "rope_parameters")
    steps = torch.arange(4090, 4110)
    wanted = [their_cos_sin(theirs, position[None])[0][0] for position in steps]
    found = ours.cos_sin(steps, torch.maximum(torch.tensor(4090), steps + 1))[0]
    torch.testing.assert_close(found, torch.stack(wanted), rtol=0, atol=1e-3)
    their_cos_sin(theirs, torch.arange(10))  # transformers resets its base here
    torch.testing.assert_close(ours._dynamic(torch.tensor(10)), theirs.inv_freq, rtol=1e-6, atol=0)
    assert not torch.equal(ours._dynamic(torch.tensor(4097)), ours.inv_freq)


def test_dynamic_without_lengths_is_a_bug_not_a_silent_default():
    ours, _ = ours_and_theirs({"rope_type": "dynamic", "factor": 2.0}, 1e4, "rope_parameters")
    with pytest.raises(AssertionError, match="lengths"):
        ours.cos_sin(torch.arange(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotate_is_the_rotate_half_convention_in_float32_rounded_once(dtype):
    ours, theirs = ours_and_theirs({"rope_type": "default"}, 1e4, "rope_scaling", head_dim=16)
    positions = torch.tensor([3, 900, 0])
    x = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)  # [T, H, D]
    cos, sin = theirs(torch.zeros(1), positions[None])
    query = x.float().transpose(0, 1)[None]  # [1, H, T, D]
    wanted = apply_rotary_pos_emb(query, query, cos, sin)[0][0].transpose(0, 1)
    cos, sin = (part[:, None] for part in ours.cos_sin(positions))
    found = ours.rotate(x, cos, sin)
    assert found.dtype == dtype and cos.dtype == torch.float32
    torch.testing.assert_close(found, wanted.to(dtype), rtol=1e-6, atol=1e-6)
    assert torch.equal(found[2], x[2])  # position 0 does not rotate


def test_positions_of_any_integer_type_and_shape():
    ours, _ = ours_and_theirs({"rope_type": "default"}, 1e4, "rope_scaling")
    positions = torch.tensor([[5, 70_000], [0, 1]], dtype=torch.int32)
    cos, sin = ours.cos_sin(positions)
    assert cos.shape == sin.shape == (2, 2, 64) and cos.dtype == torch.float32
    assert torch.equal(cos[0, 1], ours.cos_sin(torch.tensor(70_000))[0])


def test_yarn_without_an_attention_factor_computes_it_and_an_unknown_kind_is_refused():
    device = torch.device("cpu")
    yarn = RopeConfig("yarn", 1e4, factor=4.0, original_max_position_embeddings=1024)
    assert Rope(yarn, 64, 4096, device).attention_factor == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    with pytest.raises(ValueError, match="longrope"):
        Rope(RopeConfig("longrope", 1e4), 64, 4096, device)
