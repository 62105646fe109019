"""Exercise 1. Attention sinks: many heads look at the very first tokens whatever comes later.

Write a score that keeps the 4 oldest of the candidates, whatever they are, and gives the other places to the
newest. `slots.positions` is [B, L, K, n], oldest first; the higher a score, the more a slot is worth keeping.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny import prompt_of, tiny_folder

from nanobeacon import LLM, Policy, SamplingParams


def score(slots) -> torch.Tensor:
    """float [B, L, K, n]"""
    raise NotImplementedError("yours to write")


def test_the_first_four_and_the_newest_stay(tmp_path):
    mine = Policy("sinks", score=lambda slots: score(slots), select="none", beacons=0, recents=0, window=8)
    folder = tiny_folder(tmp_path, "llama")
    llm = LLM(folder, device="cpu", dtype="float32", budget=40, policy=mine, trace=True)
    params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([prompt_of(10)], params)
    assert output.error is None
    for event in output.trace:
        # 10 tokens of the prompt, 4 sinks, and the 31 newest of the 35 that an eviction keeps
        newest = event.position
        expected = [*range(14), *range(newest - 30, newest + 1)]
        assert event.kept[0, 0].tolist() == expected
