"""Exercise 6. Completions of one prompt share its full pages; what straddles the prompt's end is private.

Write `pages(prompt_tokens, output_tokens, n, page_size, budget)`: the pages in use once all n completions
run, under a budget, for which everything is reserved at admission (`Scheduler.tokens_held` says how much).
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny import prompt_of, tiny_folder

from nanobeacon import LLM, SamplingParams


def pages(prompt_tokens: int, output_tokens: int, n: int, page_size: int, budget: int) -> int:
    raise NotImplementedError("yours to write")


@pytest.mark.parametrize("prompt_tokens", [7, 8, 9, 30])
@pytest.mark.parametrize("output_tokens", [20, 100])
@pytest.mark.parametrize("n", [1, 3])
def test_pages_are_foretold(tmp_path, prompt_tokens, output_tokens, n):
    folder = tiny_folder(tmp_path, "llama")
    llm = LLM(folder, device="cpu", dtype="float32", page_size=8, budget=40, window=8, prefix_cache=False)
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, n=n)
    requests = llm.submit([prompt_of(prompt_tokens)], params)
    llm.engine.step()
    assert llm.engine.pool.used_count == pages(prompt_tokens, output_tokens, n, 8, 40)
    for request in requests:
        llm.engine.abort(request)
