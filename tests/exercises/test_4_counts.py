"""Exercise 4. Everything is decided by counts (METHOD.md, "Budget and period").

Write `evictions(output_tokens, budget)`: how many evictions a request of so many output tokens sees, prompt
protected; and `peak(prompt_tokens, output_tokens, budget)`: the most tokens it caches at any moment. Mind
that the last token that is sampled is never fed, and that a request which ends does not evict.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny import prompt_of, tiny_folder

from nanobeacon import LLM, SamplingParams


def evictions(output_tokens: int, budget: int) -> int:
    raise NotImplementedError("yours to write")


def peak(prompt_tokens: int, output_tokens: int, budget: int) -> int:
    raise NotImplementedError("yours to write")


@pytest.mark.parametrize("output_tokens", [5, 40, 41, 42, 46, 47, 100])
def test_counts_are_foretold(tmp_path, output_tokens):
    llm = LLM(tiny_folder(tmp_path, "llama"), device="cpu", dtype="float32", budget=40, window=8)
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    llm.generate([prompt_of(12)], params)
    assert llm.stats.evictions == evictions(output_tokens, 40)
    assert llm.stats.peak_cached_tokens == peak(12, output_tokens, 40)
