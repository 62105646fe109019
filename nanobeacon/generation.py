"""What generation_config.json says about sampling: defaults for what a user leaves open.

A user's own numbers win over these, and these over `SamplingParams`' neutral ones. What the file
says and nothing here carries out is named in the log: an answer may differ because of it.

Knows the file's names and those of `SamplingParams`; nothing of models or tokens.
"""

import logging
from pathlib import Path
from typing import Any

from .config import Field, named_in_errors, read_json

log = logging.getLogger("nanobeacon")

# What is read of a file that samples (do_sample): SamplingParams' field -> the file's.
SAMPLED = {
    "temperature": Field("temperature", float, default=1.0, least=0),
    # transformers means 50 where it is missing; here it is off
    "top_k": Field("top_k", default=0, least=-1),
    "top_p": Field("top_p", float, default=1.0, least=0, most=1),
    "min_p": Field("min_p", float, default=0.0, least=0, most=1),
}
# What is read of every file; max_tokens is what the engine reserves for a request that names none.
ALWAYS = {
    "repetition_penalty": Field("repetition_penalty", float, default=1.0, least=1e-6),
    "min_tokens": Field("min_new_tokens", default=0, least=0),
    "max_tokens": Field("max_new_tokens", default=None),
}
# What needs no word: read elsewhere, without a meaning here, or about how the file was made.
SILENT = ("do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "use_cache")
# What changes nothing at these values, besides null, False and what is empty.
IDLE = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "length_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0,
    "no_repeat_ngram_size": 0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "max_length": 20,
    "min_length": 0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "return_dict_in_generate": False,
}


def generation_defaults(folder: str | Path) -> dict[str, Any]:
    """Values for `SamplingParams.with_defaults`; temperature 0 where the file does not sample.

    One line in the log names what the file says and is not applied. ValueError names file
    and field."""
    path = Path(folder, "generation_config.json")
    raw = read_json(path, optional=True)
    with named_in_errors(path):
        return _defaults(raw)


def _defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """The same, of the file's content."""
    # 1. A file that does not say do_sample means greedy, whatever temperature stands in it.
    found: dict[str, Any] = {"temperature": 0.0}
    if Field("do_sample", bool, default=False).of(raw):
        found = {name: field.of(raw) for name, field in SAMPLED.items()}
    # 2. What counts either way, where the file says more than the default.
    for name, field in ALWAYS.items():
        value = field.of(raw)
        if value != field.default:
            found[name] = value
    # 3. What it says in vain.
    unused = _unused(raw)
    if unused:
        log.warning("generation_config.json: not applied here: %s", ", ".join(unused))
    return found


def _unused(raw: dict[str, Any]) -> list[str]:
    """`name=value` of what would change the output and is not applied."""
    applied = {field.name for field in [*SAMPLED.values(), *ALWAYS.values()]}
    unused = []
    for name, value in raw.items():
        known = name in applied or name in SILENT or name.startswith("_")
        empty = value is None or value is False or value in ([], {}, "")
        idle = empty or value == IDLE.get(name)  # of the same value as where it is missing
        if not known and not idle:
            unused.append(f"{name}={value!r:.60}")
    return sorted(unused)
