"""The embedded tiny reasoner: a model of 0.6 M parameters that has to go back to facts while it works.

`task.py` poses and grades problems, `train.py` makes a checkpoint, `checkpoint/` is the shipped one: an
ordinary Qwen3 folder that the engine (or transformers) loads like any other. `solve.py` and `demo.py` run it
on the engine's public API; nothing here knows the cache or how a policy works.
"""

from pathlib import Path


def folder() -> Path:
    """The shipped checkpoint: config, safetensors, tokenizer and generation defaults."""
    return Path(__file__).parent / "checkpoint"
