"""config.py: what a checkpoint's JSON means. Each test stands for a trap of real checkpoints; no weights."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanobeacon.config import (
    EngineConfig,
    RopeConfig,
    config_for_tensors,
    parse_config,
    read_config,
    share_of,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 4096}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def without(raw: dict, *names: str) -> dict:
    return {name: value for name, value in raw.items() if name not in names}


def write(folder, **files):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text)
    return folder


# Families, shapes


def test_every_field_of_a_plain_llama():
    config = parse_config(LLAMA)
    assert (config.family, config.num_layers, config.hidden_size, config.intermediate_size) == (
        "llama",
        2,
        64,
        128,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 2, 16, 100)
    assert (config.rms_norm_eps, config.max_position_embeddings, config.tied) == (1e-5, 4096, False)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False, False, False, False)
    assert config.rope == RopeConfig("default", 500000.0, original_max_position_embeddings=4096)
    assert (config.dtype, config.eos_token_ids, config.bos_token_id) == ("bfloat16", (2,), 1)


@pytest.mark.parametrize(
    "raw, family, qkv_bias, qk_norm",
    [(LLAMA, "llama", False, False), (QWEN2, "qwen2", True, False), (QWEN3, "qwen3", False, True)],
)
def test_family_decides_biases_and_norms_and_model_type_is_the_fallback(raw, family, qkv_bias, qk_norm):
    for spelling in (raw, without(raw, "architectures"), {**raw, "architectures": None}):
        config = parse_config(spelling)
        assert (config.family, config.qkv_bias, config.qk_norm) == (family, qkv_bias, qk_norm)


@pytest.mark.parametrize(
    "wrong",
    [
        {"architectures": ["PhiForCausalLM"]},  # although model_type says llama
        {"architectures": ["LlamaModel"]},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": 7},
        {"architectures": [], "model_type": "phi3"},
        {"architectures": None, "model_type": ["llama"]},
    ],
)
def test_unknown_architecture_is_an_error_that_lists_the_supported(wrong):
    with pytest.raises(ValueError, match="LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"):
        parse_config({**LLAMA, **wrong})


def test_head_dim_is_not_always_hidden_over_heads():
    assert parse_config({**QWEN3, "head_dim": 32}).head_dim == 32
    assert parse_config(QWEN3).head_dim == 128  # what Qwen3 means without the key
    assert parse_config({**QWEN2, "head_dim": None}).head_dim == 16
    assert parse_config({**QWEN3, "hidden_size": 66}).head_dim == 128  # 66 / 4 does not matter here


def test_key_value_heads_default_to_all_heads():
    assert parse_config(without(LLAMA, "num_key_value_heads")).num_kv_heads == 4


@pytest.mark.parametrize("name, value", [("dtype", "float16"), ("torch_dtype", "float16")])
def test_dtype_and_torch_dtype_are_the_same_key(name, value):
    assert parse_config({**without(LLAMA, "torch_dtype"), name: value}).dtype == value
    assert parse_config(without(LLAMA, "torch_dtype")).dtype is None


# What is wrong is refused by name


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, "64", 64.5, 0, -64, True, [64], float("nan")])
def test_sizes_must_be_positive_integers(name, value):
    with pytest.raises(ValueError, match=name):
        parse_config({**LLAMA, name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_attention_heads", "4"),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("head_dim", 15),
        ("head_dim", -2),
        ("head_dim", 16.0),
        ("hidden_size", 66),  # 16.5 for each head
        ("max_position_embeddings", None),
        ("max_position_embeddings", 10**400),
        ("rms_norm_eps", None),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", float("inf")),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", "true"),
        ("attention_bias", 1),
        ("mlp_bias", "no"),
        ("torch_dtype", "float8_e4m3fn"),
        ("torch_dtype", ["bfloat16"]),
        ("eos_token_id", -2),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, None]),
        ("bos_token_id", [1]),
        ("quantization_config", {"quant_method": "gptq"}),
        ("sliding_window", 1024),
        ("rope_theta", 0),
        ("rope_theta", "10000"),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling", "linear"),
        ("rope_parameters", ["default"]),
    ],
)
def test_a_wrong_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name.removeprefix("torch_")):
        parse_config({**LLAMA, name: value})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from([0, 1, 2, 4.0]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*LLAMA3_ROPE, "type"]), inner)
    ),
    max_leaves=5,
)
NAMES = [
    *QWEN3,
    *LLAMA3_ROPE,
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "use_sliding_window",
    "head_dim",
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([LLAMA, QWEN2, QWEN3]), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3))
def test_no_content_whatever_gives_another_error(raw, changes):
    try:
        parse_config({**raw, **changes})
    except ValueError:
        pass


# RoPE: either spelling, and the context that its scaling gives


def both_spellings(raw: dict, scaling: dict | None) -> list[dict]:
    """Older files (`type` and `rope_type`), files of transformers 5, and files that say it in both ways."""
    old = {**raw, "rope_scaling": scaling}
    new = {**without(raw, "rope_theta"), "rope_parameters": {**(scaling or {"rope_type": "default"})}}
    new["rope_parameters"]["rope_theta"] = raw["rope_theta"]
    typed = {("type" if name == "rope_type" else name): value for name, value in (scaling or {}).items()}
    return [old, {**raw, "rope_scaling": typed or {"type": "default"}}, new, {**new, "rope_scaling": scaling}]


@pytest.mark.parametrize(
    "scaling, context",
    [
        (None, 4096),
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "linear", "factor": 2.5}, 10240),
        ({"rope_type": "dynamic", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 4, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 1024}, 4096),
        (LLAMA3_ROPE, 4096),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, 4096),
    ],
)
def test_rope_is_the_same_in_every_spelling(scaling, context):
    configs = [parse_config(raw) for raw in both_spellings(LLAMA, scaling)]
    assert all(config == configs[0] for config in configs)
    rope, kind = configs[0].rope, (scaling or {}).get("rope_type", "default")
    assert (rope.kind, rope.theta, configs[0].max_position_embeddings) == (kind, 500000.0, context)
    expected = {"factor": 1.0, **without(scaling or {}, "rope_type", "original_max_position_embeddings")}
    assert all(getattr(rope, name) == value for name, value in expected.items())


def test_rope_theta_has_a_default_in_old_files():
    assert parse_config(without(LLAMA, "rope_theta")).rope.theta == 10000.0


@pytest.mark.parametrize(
    "scaling, name",
    [
        ({"type": "longrope", "factor": 4.0}, "longrope"),
        ({"type": "su"}, "default, linear, dynamic, llama3, yarn"),
        ({"rope_type": ["linear"]}, "rope_type"),
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": 0.5}, "factor"),
        ({"type": "linear", "factor": "2"}, "factor"),
        ({"type": "dynamic", "factor": float("nan")}, "factor"),
        *[(without(LLAMA3_ROPE, name), name) for name in LLAMA3_ROPE if name != "rope_type"],
        ({**LLAMA3_ROPE, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({**LLAMA3_ROPE, "original_max_position_embeddings": 8192.5}, "original_max_position_embeddings"),
        ({"type": "yarn"}, "factor"),
        ({"type": "yarn", "factor": 4.0, "attention_factor": -1.0}, "attention_factor"),
        ({"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}, "beta_fast"),
        ({"type": "yarn", "factor": 4.0, "truncate": "yes"}, "truncate"),
        ({"type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "all layers"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_scaling_that_we_cannot_compute_is_refused_never_dropped(spelling, scaling, name):
    with pytest.raises(ValueError, match=name):
        parse_config({**LLAMA, spelling: scaling})


def test_two_spellings_that_contradict_each_other_are_refused():
    yarn, linear = {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(ValueError, match="rope_scaling"):
        parse_config({**LLAMA, "rope_parameters": yarn, "rope_scaling": linear})


# Sliding windows


@pytest.mark.parametrize(
    "raw",
    [
        QWEN2,  # a size without use_sliding_window, as Qwen2 and Qwen3 have it
        {**QWEN3, "use_sliding_window": False},
        {**QWEN2, "use_sliding_window": True, "max_window_layers": 2},  # as many as there are: none slides
        {**QWEN2, "use_sliding_window": True},  # max_window_layers is 28
        {**QWEN2, "use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {**QWEN3, "use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 2},
        {**LLAMA, "sliding_window": None},
        {**LLAMA, "sliding_window": 4096, "use_sliding_window": False},
    ],
)
def test_a_sliding_window_that_is_off_is_ignored(raw):
    assert parse_config(raw) is not None


@pytest.mark.parametrize(
    "raw",
    [
        {**QWEN2, "use_sliding_window": True, "max_window_layers": 1},
        {**LLAMA, "sliding_window": 4096},
        {**QWEN3, "layer_types": ["full_attention", "sliding_attention"]},
        {**QWEN3, "sliding_window": None, "layer_types": ["full_attention", "linear_attention"]},
        {**QWEN3, "layer_types": ["full_attention"]},
    ],
)
def test_a_sliding_window_that_is_on_is_refused_by_name(raw):
    with pytest.raises(ValueError, match="sliding_window"):
        parse_config(raw)


MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}


@pytest.mark.parametrize("window, most", [(None, None), (1024, 1024), (1 << 20, None)])
def test_a_window_in_all_layers_works_for_requests_that_stay_within_it(window, most):
    config = parse_config({**MISTRAL, "sliding_window": window})
    assert (config.family, config.sliding_window) == ("mistral", window)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    EngineConfig(max_model_len=most).check_length(config)
    if most is not None:
        assert config.context == most
        with pytest.raises(ValueError, match=f"max_model_len={most + 1}: .*sliding_window is 1024"):
            EngineConfig(max_model_len=most + 1).check_length(config)


@pytest.mark.parametrize("wrong", [0, -1, "4096", 1.5])
def test_a_window_that_is_none_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match="sliding_window"):
        parse_config({**MISTRAL, "sliding_window": wrong})


def test_a_mistral_whose_layers_differ_is_refused():
    with pytest.raises(ValueError, match="sliding_window"):
        parse_config({**MISTRAL, "layer_types": ["full_attention", "sliding_attention"]})


# Numbers that no model has


@pytest.mark.parametrize(
    "name",
    [
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_attention_heads",
        "head_dim",
    ],
)
@pytest.mark.parametrize("value", [10**9, 2**52, 10**30])
def test_a_number_beyond_any_model_is_refused_before_it_allocates(name, value):
    with pytest.raises(ValueError, match=f"{name}.* at most"):
        parse_config({**LLAMA, name: value})


# Ids of -1 mean none


def test_ids_of_minus_one_mean_none():
    config = parse_config({**LLAMA, "bos_token_id": -1, "eos_token_id": [2, -1]}, {"eos_token_id": -1})
    assert config.bos_token_id is None and config.eos_token_ids == (2,)
    assert parse_config({**LLAMA, "eos_token_id": -1}).eos_token_ids == ()


def test_bitsandbytes_beside_plain_weights_is_decided_by_the_tensors():
    assert parse_config({**LLAMA, "quantization_config": {"quant_method": "bitsandbytes"}}) is not None
    for other in ({"quant_method": "awq"}, {"bits": 4}, "fp8"):
        with pytest.raises(ValueError, match="quantization_config"):
            parse_config({**LLAMA, "quantization_config": other})


# Shares of tensor-parallel ranks


def heads(num_heads: int, num_kv_heads: int, mlp: int):
    shape = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "intermediate_size": mlp}
    return parse_config(LLAMA | shape | {"head_dim": 16})


@pytest.mark.parametrize(
    "ranks, num_heads, num_kv_heads, share",
    [(1, 8, 4, (8, 4, 96)), (2, 8, 4, (4, 2, 48)), (4, 8, 2, (2, 1, 24)), (3, 9, 3, (3, 1, 32))],
)
def test_a_rank_has_its_part_of_heads_and_mlp_and_copies_of_key_value_heads(
    ranks, num_heads, num_kv_heads, share
):
    whole = heads(num_heads, num_kv_heads, 96)
    part = share_of(whole, ranks)
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == share
    assert (part.hidden_size, part.head_dim, part.vocab_size) == (64, 16, 100)


@pytest.mark.parametrize(
    "ranks, shape, named",
    [
        (2, (9, 3, 96), "num_attention_heads is 9"),
        (2, (6, 3, 96), "num_key_value_heads is 3"),
        (6, (12, 4, 96), "num_key_value_heads is 4"),
        (4, (8, 4, 90), "intermediate_size is 90"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_by_field_and_number_of_ranks(ranks, shape, named):
    with pytest.raises(ValueError, match=f"{named}; .*{ranks}"):
        share_of(heads(*shape), ranks)


# The file decides: head and biases


def names_of(*biases: str) -> set[str]:
    return {"model.embed_tokens.weight", *(f"model.layers.1.{bias}.bias" for bias in biases)}


def test_own_head_wins_over_tied_and_a_missing_untied_head_is_an_error():
    tied = parse_config({**LLAMA, "tie_word_embeddings": True})
    assert config_for_tensors(tied, names_of()).tied
    assert not config_for_tensors(tied, names_of() | {"lm_head.weight"}).tied  # Qwen3-0.6B's redundant copy
    with pytest.raises(ValueError, match="lm_head.weight"):
        config_for_tensors(parse_config(LLAMA), names_of())


@pytest.mark.parametrize(
    "raw, biases, expected",
    [
        (LLAMA, (), (False, False, False)),
        (LLAMA, ("self_attn.k_proj",), (True, False, False)),
        (LLAMA, ("self_attn.o_proj",), (False, True, False)),
        (LLAMA, ("mlp.up_proj",), (False, False, True)),
        ({**LLAMA, "attention_bias": True}, (), (True, True, False)),
        ({**LLAMA, "mlp_bias": True}, (), (False, False, True)),
        (QWEN2, (), (True, False, False)),
        (
            QWEN2,
            ("self_attn.o_proj", "mlp.up_proj"),
            (True, False, False),
        ),  # no place: unexpected to the loader
        ({**QWEN2, "attention_bias": True}, (), (True, False, False)),
        ({**QWEN3, "attention_bias": True}, ("mlp.up_proj",), (True, True, False)),
        (QWEN3, ("self_attn.q_norm",), (False, False, False)),
    ],
)
def test_the_tensors_of_the_file_decide_about_biases(raw, biases, expected):
    config = config_for_tensors(parse_config({**raw, "tie_word_embeddings": True}), names_of(*biases))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == expected


# Files


def test_eos_is_the_union_of_both_files(tmp_path):
    write(tmp_path, config={**LLAMA, "eos_token_id": 7}, generation_config={"eos_token_id": [9, 7]})
    assert read_config(tmp_path).eos_token_ids == (7, 9)
    write(tmp_path, config=without(LLAMA, "eos_token_id"), generation_config={"eos_token_id": 5})
    assert read_config(str(tmp_path)).eos_token_ids == (5,)
    write(tmp_path, generation_config={"eos_token_id": "</s>"})
    with pytest.raises(ValueError, match="eos_token_id"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "", "\x00", '{"a": 1,}', "[" * 100_000])
@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_malformed_json_names_its_file(tmp_path, name, content):
    write(tmp_path, **{"config": LLAMA, name: content})
    with pytest.raises(ValueError, match=rf"{tmp_path}/{name}\.json"):
        read_config(tmp_path)


def test_a_folder_without_config_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


def test_bytes_that_are_no_text_name_their_file(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_files_that_transformers_5_writes_are_read_as_it_means_them(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    sizes = {name: LLAMA[name] for name in [*LLAMA][2:9]}
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}
    theirs = getattr(transformers, f"{family}Config")(**sizes, rope_parameters=rope, tie_word_embeddings=True)
    theirs.architectures = [f"{family}ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert (ours.family, ours.tied, ours.rope.kind, ours.rope.theta) == (family.lower(), True, "yarn", 1e6)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.head_dim, ours.num_kv_heads, ours.vocab_size) == (head_dim, 2, 100)
    assert ours.rms_norm_eps == theirs.rms_norm_eps and ours.max_position_embeddings == 16384


@pytest.mark.real
def test_the_real_model():
    from tests.real_checkpoint import real_checkpoint

    config = read_config(real_checkpoint())
    assert (config.family, config.num_layers, config.hidden_size, config.intermediate_size) == (
        "llama",
        30,
        576,
        1536,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert (config.rope.kind, config.rope.theta, config.max_position_embeddings) == ("default", 1e5, 8192)
    assert (config.tied, config.dtype, config.eos_token_ids, config.bos_token_id) == (
        True,
        "bfloat16",
        (2,),
        1,
    )
