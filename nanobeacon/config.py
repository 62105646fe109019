"""What a checkpoint's JSON says about its model: defaults resolved, values checked, the
unsupported refused.

Three tables say it: FAMILIES (what differs between decoders), FIELDS (which numbers are read) and
ROPE_KINDS. It knows nothing about tensors (a checkpoint's are names here), devices or the hub, and
imports no torch.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .policies import EvictionSettings, check, check_whole

DTYPES = ("bfloat16", "float16", "float32")
NEEDED = object()  # the default of a field that has none
LFS_POINTER = b"version https://git-lfs"  # how a file begins that git-lfs has not fetched
LARGEST = 2**53  # numbers beyond it are no longer whole in a float
LONGEST = 1 << 24  # positions beyond it are no longer whole in float32, which RoPE computes in


@dataclass(frozen=True)
class Family:
    """How the decoders of one architecture differ from the others': one row of flags."""

    name: str  # model_type in config.json
    qkv_bias: bool = False  # q, k and v have biases whatever the file says
    may_bias_o: bool = True  # where attention_bias or the tensors say so
    may_bias_mlp: bool = False  # where mlp_bias or the tensors say so
    qk_norm: bool = False  # q and k are normed, head by head, before RoPE
    # where config.json has none; None: hidden_size / num_attention_heads
    head_dim: int | None = None
    window: str = "switched"  # what sliding_window means; one of WINDOWS


WINDOWS = (
    # on where use_sliding_window says so, in the layers from max_window_layers on: refused
    "switched",
    "on",  # on wherever it is there: refused
    "all layers",  # the same, in every layer: works for requests that stay within the window
)

FAMILIES = {
    "LlamaForCausalLM": Family("llama", may_bias_mlp=True, window="on"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, may_bias_o=False),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim=128),
    "MistralForCausalLM": Family("mistral", window="all layers"),
}


@dataclass(frozen=True)
class Field:
    """A value of config.json: its name there, its kind, what is possible, what it is where it
    is missing."""

    name: str
    kind: type = int  # int, float or bool
    default: Any = NEEDED
    least: float = 1
    most: float = LARGEST  # beyond any model, so that a hostile number neither loops nor allocates

    def of(self, raw: dict) -> Any:
        """The value in `raw`; missing or null: the default.

        ValueError for a value that is missing without a default, or that is not possible."""
        value = raw.get(self.name)
        if value is None and self.default is not NEEDED:
            return self.default
        if self.kind is bool:
            require(isinstance(value, bool), self.name, value, "true or false")
            return value
        number = isinstance(value, (int, self.kind)) and not isinstance(value, bool)
        possible = number and self.least <= value <= self.most  # NaN and infinity fail here
        upper = "" if self.most == LARGEST else f", at most {self.most}"
        require(possible, self.name, value, f"{self.kind.__name__} >= {self.least}{upper}")
        return self.kind(value)


# ModelConfig's field -> where it stands in config.json. What depends on another field, or on the
# family, is read by a function of its own.
FIELDS = {
    "num_layers": Field("num_hidden_layers", most=1000),
    "hidden_size": Field("hidden_size", most=1 << 20),
    "intermediate_size": Field("intermediate_size", most=1 << 22),
    "num_heads": Field("num_attention_heads", most=1 << 14),
    "vocab_size": Field("vocab_size", most=1 << 20),
    "rms_norm_eps": Field("rms_norm_eps", float, least=0),
    "tied": Field("tie_word_embeddings", bool, default=False),
}


@dataclass(frozen=True)
class RopeKind:
    """Which numbers a kind of RoPE takes from the file; what it does with them is `rope.py`'s."""

    needs: tuple[str, ...] = ()
    may_have: tuple[str, ...] = ()
    needs_original: bool = False  # original_max_position_embeddings must be said
    stretches: bool = False  # the context becomes the original one times the factor


ROPE_KINDS = {
    "default": RopeKind(),
    "linear": RopeKind(needs=("factor",), stretches=True),
    "dynamic": RopeKind(needs=("factor",), stretches=True),
    "llama3": RopeKind(needs=("factor", "low_freq_factor", "high_freq_factor"), needs_original=True),
    "yarn": RopeKind(
        needs=("factor",),
        may_have=("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
        stretches=True,
    ),
}


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. The fields after `theta` belong to scaled kinds."""

    kind: str  # one of ROPE_KINDS
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # context before scaling (dynamic, llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    # yarn: multiplies cos and sin; None: from factor and mscales
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """What the engine must know of a model; sizes as in config.json, all settled."""

    family: str  # the name of one of FAMILIES
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
    sliding_window: int | None = None  # requests must not become longer than that

    @property
    def context(self) -> int:
        """Tokens that a request may have, prompt and output: the positions, or the window
        that slides."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)


def read_json(path: Path, optional: bool = False) -> dict:
    """The JSON object in a file, {} for an optional one that is missing. ValueError names
    the file."""
    if optional and not path.exists():
        return {}
    if path.exists() and not path.is_file():
        # a pipe would be waited for without end
        raise ValueError(f"{path} cannot be read: it is no file")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        kind = "" if isinstance(error, OSError) else " as JSON"
        raise ValueError(f"{path} cannot be read{kind}: {error}{known_cause(path)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {content!r:.80}")
    return content


def known_cause(path: Path) -> str:
    """What lies there instead of a config, where that is known."""
    # git-lfs leaves a text in the place of a large file that nobody has fetched.
    if path.is_file():
        with open(path, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                return "; it is a pointer of git-lfs: fetch the files with git lfs pull"
    elif path.with_name("adapter_config.json").is_file():
        return "; the folder holds an adapter (LoRA): merge it into its base model first"
    return ""


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """What is wrong with a file's content is said with the file's name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_config(folder: str | Path) -> ModelConfig:
    """`parse_config` of a folder's config.json and, where there is one, generation_config.json.

    ValueError names the file and the field."""
    path = Path(folder, "config.json")
    generation_path = Path(folder, "generation_config.json")
    generation = read_json(generation_path, optional=True)
    with named_in_errors(generation_path):  # an error below would bear the name of config.json
        _eos_token_ids(generation)
    raw = read_json(path)
    with named_in_errors(path):
        return parse_config(raw, generation)


def parse_config(raw: dict, generation: dict | None = None) -> ModelConfig:
    """From the content of the two files. ValueError names field, value and what is possible.

    What it takes from generation_config.json is the ends of an answer, which either file may name;
    how answers are sampled is read elsewhere (`generation.py`)."""
    # 1. Whose decoder it is, and that it is one we compute: float weights, SiLU.
    family = _family(raw)
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    require(dtype in (None, *DTYPES), "dtype", dtype, f"one of {', '.join(DTYPES)}")
    require(raw.get("hidden_act", "silu") == "silu", "hidden_act", raw.get("hidden_act"), "silu")
    _refuse_quantization(raw)
    # 2. Sizes.
    sizes = {name: field.of(raw) for name, field in FIELDS.items()}
    num_heads = sizes["num_heads"]
    num_kv_heads = Field("num_key_value_heads", default=num_heads, most=num_heads).of(raw)
    divides = num_heads % num_kv_heads == 0
    require(divides, "num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} attention heads")
    head_dim = _head_dim(raw, family, sizes["hidden_size"], num_heads)
    # 3. Positions.
    context = Field("max_position_embeddings", most=LONGEST).of(raw)
    window = _sliding_window(raw, family, sizes["num_layers"])
    rope, context = _rope(raw, context)
    # 4. Biases: what the file says, where the family has a place for it.
    attention_bias = Field("attention_bias", bool, default=False).of(raw)
    mlp_bias = family.may_bias_mlp and Field("mlp_bias", bool, default=False).of(raw)
    return ModelConfig(
        family=family.name,
        **sizes,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=family.may_bias_o and attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        rope=rope,
        dtype=dtype,
        eos_token_ids=_eos_token_ids(raw, generation or {}),
        bos_token_id=_token_id(raw, "bos_token_id"),
        sliding_window=window,
    )


def config_for_tensors(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The config as a checkpoint's tensor names have it: own head, biases. ValueError for a
    missing head."""
    # 1. The head: tensors overrule what config.json says of tying.
    (family,) = [family for family in FAMILIES.values() if family.name == config.family]
    own_head = "lm_head.weight" in names
    require(own_head or config.tied, "tie_word_embeddings", False, "true, as there is no lm_head.weight")
    # 2. Biases, by the names of the matrices that have one: `….q_proj.bias` is q's. One for which
    #    the family has no place stays unexpected, and the loader says so.
    biased = set()
    for name in names:
        if name.endswith("_proj.bias"):
            matrix = name.split(".")[-2]
            biased.add(matrix.removesuffix("_proj"))
    has_qkv_bias = not biased.isdisjoint(("q", "k", "v"))
    has_o_bias = family.may_bias_o and "o" in biased
    has_mlp_bias = family.may_bias_mlp and not biased.isdisjoint(("gate", "up", "down"))
    return replace(
        config,
        tied=not own_head,
        qkv_bias=config.qkv_bias or has_qkv_bias,
        o_bias=config.o_bias or has_o_bias,
        mlp_bias=config.mlp_bias or has_mlp_bias,
    )


def share_of(config: ModelConfig, ranks: int) -> ModelConfig:
    """What one of `ranks` tensor-parallel ranks holds of a model: its part of the heads
    and of the MLP.

    The vocabulary stays whole. KV heads are split; where they are fewer than the ranks,
    neighbouring ranks hold copies of one. ValueError names the first field that does not divide."""
    # Fewer KV heads than ranks: as many neighbours have a copy of one as there are ranks to a head.
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
    """ValueError naming a field of a file, its value and what is possible."""
    if not condition:
        raise ValueError(f"{name} is {value!r:.200}; it must be {wanted}")


def _family(raw: dict) -> Family:
    """By `architectures`; older files have only model_type.

    A file may name several classes if exactly one of them is known here."""
    named = raw.get("architectures")
    if not named:
        model_type = raw.get("model_type")
        named = [name for name, family in FAMILIES.items() if family.name == model_type]
    known = []
    if isinstance(named, list):
        known = [name for name in FAMILIES if name in named]
    require(len(known) == 1, "architectures", raw.get("architectures"), f"one of {', '.join(FAMILIES)}")
    return FAMILIES[known[0]]


def _refuse_quantization(raw: dict) -> None:
    """Quantised weights are refused. bitsandbytes quantises while it loads, so that its entry also
    stands beside plain weights: there the tensors decide."""
    found = raw.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else None
    possible = found is None or method == "bitsandbytes"
    require(possible, "quantization_config", found, "absent: bf16, fp16 or fp32 only")


def _head_dim(raw: dict, family: Family, hidden_size: int, num_heads: int) -> int:
    """The file's, else the family's own, else an equal share of the hidden size.

    RoPE turns pairs of dimensions, so that an odd number is not possible."""
    share = hidden_size / num_heads  # maybe a fraction, which is then refused
    head_dim = Field("head_dim", default=family.head_dim or share, most=1 << 14).of(raw)
    require(head_dim % 2 == 0, "head_dim (or hidden_size / num_attention_heads)", head_dim, "an even integer")
    return int(head_dim)


def _sliding_window(raw: dict, family: Family, num_layers: int) -> int | None:
    """How far back every layer sees, None for all the way. ValueError where only some layers
    are bounded."""
    window = raw.get("sliding_window")
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and kinds:  # these overrule all else
        full = len(kinds) == num_layers and all(kind == "full_attention" for kind in kinds)
        require(full, "sliding_window", (window, kinds), "off in all layers")
        return None
    # Where no list says it layer by layer, a window counts if it is on, in all layers or
    # from one on.
    switched_on = Field("use_sliding_window", bool, default=family.window != "switched").of(raw)
    if window is None or not switched_on:
        return None
    if family.window == "all layers":
        return Field("sliding_window").of(raw)
    first = 0 if family.window == "on" else Field("max_window_layers", default=28, least=0).of(raw)
    require(first >= num_layers, "sliding_window", window, "off in all layers")
    return None


def _token_id(raw: dict, name: str) -> int | None:
    """A token id; -1 means none, as in files of some converters."""
    found = Field(name, default=None, least=-1).of(raw)
    return None if found == -1 else found


def _eos_token_ids(*files: dict) -> tuple[int, ...]:
    """The union of what the files say: an id or a list of them; in ascending order.

    Chat models often name the end of a turn in one file and the end of a text in the other."""
    found = set()
    for file in files:
        ids = file.get("eos_token_id")
        if ids is None:
            continue
        each = ids if isinstance(ids, list) else [ids]
        for one in each:
            require(one is not None, "eos_token_id", ids, "token ids")
            found.add(_token_id({"eos_token_id": one}, "eos_token_id"))
    return tuple(sorted(found - {None}))


def _rope(raw: dict, context: int) -> tuple[RopeConfig, int]:
    """RoPE of either spelling, and what its scaling makes of `context`, which is
    max_position_embeddings."""
    values = _rope_values(raw)
    # 1. The kind, and that all of a head is rotated.
    part = values["partial_rotary_factor"]
    require(part in (None, 1), "partial_rotary_factor", part, "1")
    name = values.get("rope_type") or values.get("type") or "default"
    require(name in tuple(ROPE_KINDS), "rope_type", name, f"one of {', '.join(ROPE_KINDS)}")
    kind = ROPE_KINDS[name]
    # 2. Its numbers.
    rope = RopeConfig(
        kind=name,
        theta=Field("rope_theta", float, default=10000.0, least=2).of(values),
        truncate=Field("truncate", bool, default=True).of(values),
    )
    numbers = {number: Field(number, float, least=1e-6).of(values) for number in kind.needs}
    for number in kind.may_have:
        numbers[number] = Field(number, float, default=getattr(rope, number), least=1e-6).of(values)
    rope = replace(rope, **numbers)
    bands_in_order = rope.low_freq_factor < rope.high_freq_factor and rope.beta_slow <= rope.beta_fast
    fits = rope.factor >= 1 and bands_in_order
    wanted = "of factor >= 1, low_freq_factor < high_freq_factor, beta_slow <= beta_fast"
    require(fits, "RoPE", rope, wanted)
    # 3. The context before scaling, and after it.
    original_default = NEEDED if kind.needs_original else context
    original = Field("original_max_position_embeddings", default=original_default).of(values)
    stretched = max(context, int(original * rope.factor)) if kind.stretches else context
    require(stretched <= LONGEST, "RoPE's factor", rope.factor, f"such that at most {LONGEST} tokens fit")
    if name == "dynamic":  # as in transformers, its base grows from max_position_embeddings on
        original = context
    return replace(rope, original_max_position_embeddings=original), stretched


def _rope_values(raw: dict) -> dict:
    """rope_scaling (older files) or rope_parameters (since transformers 5), over what stands
    beside them.

    A field that none of them has may be None, which `Field.of` takes for a missing one."""
    old = raw.get("rope_scaling") or {}
    new = raw.get("rope_parameters") or {}
    # 1. Each is one object. One of objects has a RoPE for each kind of layer.
    for name, spelling in (("rope_scaling", old), ("rope_parameters", new)):
        flat = isinstance(spelling, dict)
        flat = flat and not any(isinstance(value, dict) for value in spelling.values())
        require(flat, name, spelling, "one object for all layers")
    # 2. A file that has both, for readers of both kinds, must mean the same.
    agree = not new or old.items() <= new.items()
    require(agree, "rope_scaling", old, f"part of rope_parameters {new}")
    # 3. What they do not say may stand beside them.
    beside = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    return {name: raw.get(name) for name in beside} | old | new


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs, checked option by option; what each means stands at `LLM`.

    Whatever can be checked without a model is checked when one of these is made, so that a wrong
    option is said before anything is read."""

    seed: int | None = None
    max_num_seqs: int = 16
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    gpu_memory: float = 0.9
    chunk: int = 512
    cuda_graphs: bool = True
    overlap: bool | None = None
    eviction: EvictionSettings | None = None
    trace: bool = False
    prefix_cache: bool = True
    usual_max_tokens: int | None = None  # the checkpoint's, for requests that leave it open

    def __post_init__(self) -> None:
        """ValueError for a value that no engine can have; what needs the model is
        `check_length`'s."""
        may_be_open = ("seed", "max_model_len", "num_pages")
        for name in ("seed", "max_num_seqs", "max_model_len", "page_size", "num_pages", "chunk"):
            value = getattr(self, name)
            if value is None and name in may_be_open:
                continue
            check_whole(name, value, least=None if name == "seed" else 1)
        memory = self.gpu_memory
        right = isinstance(memory, int | float) and not isinstance(memory, bool) and 0 < memory <= 1
        check(right, "gpu_memory", memory, "a share above 0 and up to 1 is possible")
        for name in ("cuda_graphs", "trace", "prefix_cache"):
            value = getattr(self, name)
            check(isinstance(value, bool), name, value, "True or False is possible")
        overlap = self.overlap
        possible = "True, False or None is possible"
        check(overlap is None or isinstance(overlap, bool), "overlap", overlap, possible)

    def check_length(self, model: ModelConfig) -> None:
        """max_model_len can only lower what the model's context allows."""
        allowed = f"the model's positions allow {model.context}, RoPE scaling counted in"
        if model.context < model.max_position_embeddings:
            allowed = f"the model's sliding_window is {model.context}, and only requests within it work"
        check((self.max_model_len or 0) <= model.context, "max_model_len", self.max_model_len, allowed)
