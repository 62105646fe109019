"""What a checkpoint's JSON says about its model: defaults resolved, values checked, the unsupported refused.

It knows nothing about tensors (a checkpoint's are names here), devices or the hub, and imports no torch."""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from .policies import EvictionSettings, check, check_whole

FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
MOST_LAYERS = 10_000  # no model has as many; a hostile number must not build layers for ever
DTYPES = ("bfloat16", "float16", "float32")
# RoPE kind -> the numbers it takes from the file; those of REQUIRED must be there
REQUIRED = ("factor", "low_freq_factor", "high_freq_factor")
ROPE_KINDS = {"default": "", "linear": "factor", "dynamic": "factor", "llama3": " ".join(REQUIRED)}
ROPE_KINDS |= {"yarn": "factor attention_factor mscale mscale_all_dim beta_fast beta_slow"}


@dataclass(frozen=True)
class RopeConfig:
    kind: str  # one of ROPE_KINDS
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # context before scaling (dynamic, llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None: from factor and mscales
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    family: str  # one of FAMILIES' values
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int  # tokens a request may have, RoPE scaling counted in
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    dtype: str | None = None  # one of DTYPES, or None where the file does not say
    eos_token_ids: tuple[int, ...] = ()  # without the tokenizer's
    bos_token_id: int | None = None


def read_json(path: Path, optional: bool = False) -> dict:
    """The JSON object in a file, {} for an optional one that is missing. ValueError names the file."""
    if optional and not path.exists():
        return {}
    try:
        if isinstance(content := json.loads(path.read_text(encoding="utf-8")), dict):
            return content
    except (OSError, ValueError, RecursionError) as error:
        kind = "" if isinstance(error, OSError) else " as JSON"
        raise ValueError(f"{path} cannot be read{kind}: {error}") from None
    raise ValueError(f"{path} must hold a JSON object, not {content!r:.80}")


def read_config(folder: str | Path) -> ModelConfig:
    """`parse_config` of a folder's config.json and, where there is one, generation_config.json."""
    generation = read_json(Path(folder, "generation_config.json"), optional=True)
    return parse_config(read_json(Path(folder, "config.json")), generation)


def parse_config(raw: dict, generation: dict | None = None) -> ModelConfig:
    """From the content of the two files. ValueError names field, value and what is possible."""
    named = raw.get("architectures") or [name for name in FAMILIES if FAMILIES[name] == raw.get("model_type")]
    known = [name for name in FAMILIES if isinstance(named, list) and name in named]
    require(len(known) == 1, "architectures", raw.get("architectures"), f"one of {', '.join(FAMILIES)}")
    family, get = FAMILIES[known[0]], partial(field, raw)
    layers, hidden, heads = get("num_hidden_layers"), get("hidden_size"), get("num_attention_heads")
    require(layers <= MOST_LAYERS, "num_hidden_layers", layers, f"at most {MOST_LAYERS}")
    kv_heads = get("num_key_value_heads", default=heads)
    require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of {heads} attention heads")
    head_dim = get("head_dim", default=128 if family == "qwen3" else hidden / heads)  # maybe a fraction
    require(head_dim % 2 == 0, "head_dim (or hidden_size / num_attention_heads)", head_dim, "an even integer")
    dtype, quantization = raw.get("dtype") or raw.get("torch_dtype"), raw.get("quantization_config")
    require(dtype in (None, *DTYPES), "dtype", dtype, f"one of {', '.join(DTYPES)}")
    require(quantization is None, "quantization_config", quantization, "absent: bf16, fp16 or fp32 only")
    require(raw.get("hidden_act", "silu") == "silu", "hidden_act", raw.get("hidden_act"), "silu")
    # Qwen's window is off unless switched on, and begins at max_window_layers; layer_types overrules both
    window, types = raw.get("sliding_window"), raw.get("layer_types")
    slides = get("use_sliding_window", bool, family == "llama") and window is not None
    slides = slides and (family == "llama" or get("max_window_layers", default=28, least=0) < layers)
    if isinstance(types, list) and types:
        slides = len(types) != layers or any(kind != "full_attention" for kind in types)
    require(not slides, "sliding_window", (window, types), "off in all layers")
    rope, context = _rope(raw, get("max_position_embeddings"))
    # From here on in the order of ModelConfig's fields
    sizes = (layers, hidden, get("intermediate_size"), heads, kv_heads, int(head_dim), get("vocab_size"))
    eps, tied = get("rms_norm_eps", float, least=0), get("tie_word_embeddings", bool, False)
    bias, mlp_bias = get("attention_bias", bool, False), family == "llama" and get("mlp_bias", bool, False)
    bias = (bias or family == "qwen2", bias and family != "qwen2", mlp_bias)
    eos = [ids for file in (raw, generation or {}) if (ids := file.get("eos_token_id")) is not None]
    eos = [one for ids in eos for one in (ids if isinstance(ids, list) else [ids])]
    eos = tuple(sorted({field({"eos_token_id": one}, "eos_token_id", least=0) for one in eos}))
    bos = get("bos_token_id", default=None, least=0)
    return ModelConfig(family, *sizes, eps, context, tied, *bias, family == "qwen3", rope, dtype, eos, bos)


def config_for_tensors(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The config as a checkpoint's tensor names have it: own head, biases. ValueError for a missing head."""
    own_head = "lm_head.weight" in names
    require(own_head or config.tied, "tie_word_embeddings", False, "true, as there is no lm_head.weight")
    biased = {name.split(".")[-2].removesuffix("_proj") for name in names if name.endswith("_proj.bias")}
    qkv_bias = config.qkv_bias or not biased.isdisjoint("qkv")
    o_bias = config.o_bias or (config.family != "qwen2" and "o" in biased)
    mlp_bias = config.mlp_bias or (config.family == "llama" and not biased.isdisjoint(("gate", "up", "down")))
    return replace(config, tied=not own_head, qkv_bias=qkv_bias, o_bias=o_bias, mlp_bias=mlp_bias)


def share_of(config: ModelConfig, ranks: int) -> ModelConfig:
    """What one of `ranks` tensor-parallel ranks holds of a model: its part of the heads and of the MLP.

    The vocabulary stays whole. KV heads are split; where they are fewer than the ranks, neighbouring ranks
    hold copies of one. ValueError names the first field that does not divide."""
    if config.num_kv_heads >= ranks:
        kv_heads_fit = config.num_kv_heads % ranks == 0
    else:
        kv_heads_fit = ranks % config.num_kv_heads == 0
    multiple = f"a multiple of the {ranks} tensor-parallel ranks"
    require(config.num_heads % ranks == 0, "num_attention_heads", config.num_heads, multiple)
    require(kv_heads_fit, "num_key_value_heads", config.num_kv_heads, f"{multiple}, or a divisor of {ranks}")
    require(config.intermediate_size % ranks == 0, "intermediate_size", config.intermediate_size, multiple)
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=max(1, config.num_kv_heads // ranks),
        intermediate_size=config.intermediate_size // ranks,
    )


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r:.200}; it must be {wanted}")


def field(raw: dict, name: str, kind: type = int, default=..., least: float = 1):
    """raw[name] as int, float or bool; missing or null: the default. ValueError without one, or if wrong."""
    value = raw.get(name)
    if value is None and default is not ...:
        return default
    right = isinstance(value, (int, kind)) and isinstance(value, bool) == (kind is bool)  # a bool is an int
    right = right and (kind is bool or least <= value <= 2**53)  # NaN and infinity fail here
    require(right, name, value, "true or false" if kind is bool else f"{kind.__name__} >= {least}")
    return kind(value)


def _rope(raw: dict, context: int) -> tuple[RopeConfig, int]:
    """RoPE of either spelling, and what its scaling makes of `context`, which is max_position_embeddings."""
    old, new = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    for name, spelling in (("rope_scaling", old), ("rope_parameters", new)):
        flat = isinstance(spelling, dict) and not any(isinstance(value, dict) for value in spelling.values())
        require(flat, name, spelling, "one object for all layers")
    require(not new or old.items() <= new.items(), "rope_scaling", old, f"part of rope_parameters {new}")
    top = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    get = partial(field, values := {name: raw.get(name) for name in top} | old | new)
    part, kind = values["partial_rotary_factor"], values.get("rope_type") or values.get("type") or "default"
    require(part in (None, 1), "partial_rotary_factor", part, "1")
    require(kind in tuple(ROPE_KINDS), "rope_type", kind, f"one of {', '.join(ROPE_KINDS)}")
    rope = RopeConfig(kind, get("rope_theta", float, 10000.0, 2), truncate=get("truncate", bool, True))
    numbers = {name: ... if name in REQUIRED else getattr(rope, name) for name in ROPE_KINDS[kind].split()}
    rope = replace(rope, **{name: get(name, float, default, 1e-6) for name, default in numbers.items()})
    right = rope.low_freq_factor < rope.high_freq_factor and rope.beta_slow <= rope.beta_fast
    wanted = "of factor >= 1, low_freq_factor < high_freq_factor, beta_slow <= beta_fast"
    require(right and rope.factor >= 1, "RoPE", rope, wanted)
    original = get("original_max_position_embeddings", default=... if kind == "llama3" else context)
    # As in transformers, the base of dynamic grows from max_position_embeddings on, whatever the original
    rope = replace(rope, original_max_position_embeddings=context if kind == "dynamic" else original)
    return rope, context if kind in ("default", "llama3") else max(context, int(original * rope.factor))


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs, checked option by option; what each means stands at `LLM`."""

    seed: int | None = None
    max_num_seqs: int = 16
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    gpu_memory: float = 0.9
    chunk: int = 512
    cuda_graphs: bool = True
    eviction: EvictionSettings | None = None
    trace: bool = False
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("seed", "max_num_seqs", "max_model_len", "page_size", "num_pages", "chunk"):
            value = getattr(self, name)
            if value is not None or name not in ("seed", "max_model_len", "num_pages"):
                check_whole(name, value, least=None if name == "seed" else 1)
        memory = self.gpu_memory
        right = isinstance(memory, int | float) and not isinstance(memory, bool) and 0 < memory <= 1
        check(right, "gpu_memory", memory, "a share above 0 and up to 1 is possible")
        for name in ("cuda_graphs", "trace", "prefix_cache"):
            value = getattr(self, name)
            check(isinstance(value, bool), name, value, "True or False is possible")

    def check_length(self, context: int) -> None:
        """max_model_len can only lower what the model's positions allow."""
        allowed = f"the model's positions allow {context}, RoPE scaling counted in"
        check((self.max_model_len or 0) <= context, "max_model_len", self.max_model_len, allowed)
