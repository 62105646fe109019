"""Exercise 5. A model that repeats itself: forbid every token that would complete three tokens seen before.

Write a logits processor: f(token_ids, logits) changes the row `logits` in place. `token_ids` are prompt and
output so far.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny import prompt_of, tiny_folder

from nanobeacon import LLM, SamplingParams


def no_trigram_twice(token_ids: list[int], logits: torch.Tensor) -> None:
    raise NotImplementedError("yours to write")


def test_no_three_tokens_come_again(tmp_path):
    llm = LLM(tiny_folder(tmp_path, "llama"), device="cpu", dtype="float32")

    def processor(token_ids, logits):
        return no_trigram_twice(token_ids, logits)

    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, logits_processor=processor)
    (output,) = llm.generate([prompt_of(6)], params)
    assert output.error is None
    tokens = output.prompt_token_ids + output.token_ids
    trigrams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    assert len(set(trigrams)) == len(trigrams)
