"""Exercise 2. A token that was important once may be again: let its old score decay instead of vanishing.

Write a score that is the attention of the policy's queries (`slots.attention`, log weights: the logarithm of
a weight) turned into weights, plus half of what the slot had at the last eviction (`slots.previous`).
"""

import torch


def score(slots) -> torch.Tensor:
    """float [B, L, K, n]"""
    raise NotImplementedError("yours to write")


class Slots:
    attention = torch.tensor([0.5, 0.25, 0.01, 0.2]).log().view(1, 1, 1, 4)
    previous = torch.tensor([0.0, 0.1, 0.9, 0.0]).view(1, 1, 1, 4)


def test_half_of_the_old_score_is_added():
    expected = torch.tensor([0.5, 0.3, 0.46, 0.2]).view(1, 1, 1, 4)
    torch.testing.assert_close(score(Slots()), expected)
