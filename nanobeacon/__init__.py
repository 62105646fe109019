"""nanobeacon: a minimal LLM inference engine whose paged KV cache stays within a budget by
BeaconKV eviction.

Imports lazily, so that the parts without torch (scheduler, pages, policies, config) stay so."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["LLM", "Output", "Policy", "SamplingParams", "Stage"]
_HOMES = {
    "LLM": "llm",
    "Output": "llm",
    "SamplingParams": "request",
    "Policy": "policies",
    "Stage": "policies",
}


def __getattr__(name: str) -> Any:
    """A public name, imported from its home when somebody first asks for it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
