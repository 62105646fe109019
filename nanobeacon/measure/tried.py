"""Policies that were measured and are no rows of `policies.py` (RESULTS.md, "Policies that were tried").

`python bench.py fidelity --policies beacon,nanobeacon.measure.tried:beacons_first_96` names one;
`python -m nanobeacon.measure.tried MODEL > learnt.py` writes another, learnt:policy. Knows nothing of
how a policy is carried out.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nanobeacon import LLM, SamplingParams
from nanobeacon.policies import NEIGHBOURHOOD, Policy, Stage
from nanobeacon.ranking import Slots

# ------------------------------------------------------------------- other stages (METHOD.md, "Stages")

# The same 32 rows of the query buffer, split another way.
beacon_24_8 = Policy("beacon-24-8", beacons=24, recents=8)

neighbourhood = Policy("neighbourhood", select="none", beacons=0, recents=0, stages=(NEIGHBOURHOOD,))


def _beacons_first(name: str, slots: int | float) -> Policy:
    """The first `slots` free slots by beacons, the rest by the neighbourhood."""
    return replace(beacon_24_8, name=name, stages=(Stage(slots), NEIGHBOURHOOD))


beacons_first_64 = _beacons_first("beacons-first-64", 64)
beacons_first_96 = _beacons_first("beacons-first-96", 96)
beacons_first_128 = _beacons_first("beacons-first-128", 128)

# ------------------------------------------------------------------- beacon's score, changed

DECAY = 0.5  # of what is left of a score from one eviction to the next


def _remembered(slots: Slots) -> Tensor:
    """What beacons and recents say now, or what is left of what they said before.

    The attention is a logarithm; a slot that was not ranked before has a weight of 0."""
    return torch.maximum(slots.attention.exp(), DECAY * slots.previous)


def _weighed(slots: Slots) -> Tensor:
    """The attention times the length of the value that it brings."""
    return slots.attention.exp() * slots.value_norms


remembered = Policy("remembered", score=_remembered)
weighed = Policy("weighed", score=_weighed)

# ------------------------------------------------------------------- a share of each head's own

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # that a head may give to its beacons
# What the newest queries attend to, as it is
ATTENDED = replace(NEIGHBOURHOOD, smoothing=None)
TEXT = "Explain step by step how a refrigerator works, then list what can break in one and how to tell."


def by_shares(shares: list[list[float]]) -> Policy:
    """beacon-half with a share of its own for each layer and KV head; shares [L][K]."""
    stages = (Stage(), NEIGHBOURHOOD)
    return replace(beacon_24_8, name="by-shares", stages=stages, score=_ranked_by(torch.tensor(shares)))


def _ranked_by(shares: Tensor) -> Callable[[Slots], Tensor]:
    """The score of by_shares; shares [L, K]."""

    def ranks(slots: Slots) -> Tensor:
        by_beacons, by_neighbourhood = slots.attention[:2]
        return _ranks(by_beacons, by_neighbourhood, shares, slots.free)

    return ranks


def _ranks(by_beacons: Tensor, by_neighbourhood: Tensor, shares: Tensor, free: int) -> Tensor:
    """[B, L, K, n]: of each head first its share of the free slots by beacons, then the others by
    the neighbourhood."""
    order = by_beacons.sort(stable=True, descending=True, dim=-1).indices
    place = order.argsort(dim=-1)  # of each slot in that order
    counts = (shares * free).long().to(place.device)
    return by_neighbourhood.masked_fill(place < counts[..., None], torch.inf)


class _Hindsight:
    """Chooses as beacon-half does. At each eviction it looks back: of the slots that each share
    would have kept at the last one, had it half as many to keep, how much of the attention of now
    falls on them?"""

    def __init__(self) -> None:
        # of one request: whether each share would have kept what was kept, bool [SHARES, L, K, free]
        self.would_keep: Tensor | None = None
        self.attended = 0.0  # what falls on these, summed over evictions: [SHARES, L, K]

    def __call__(self, slots: Slots) -> Tensor:
        by_beacons, by_neighbourhood, attended = slots.attention
        # 1. What the last eviction left stands first now, in the same order.
        if self.would_keep is not None:
            now = attended[0, ..., : self.would_keep.shape[-1]]
            self.attended = self.attended + (now * self.would_keep).sum(-1)
        # 2. What stays.
        half = torch.full(by_beacons.shape[1:3], 0.5)
        ranks = _ranks(by_beacons, by_neighbourhood, half, slots.free)
        kept = ranks.sort(stable=True, descending=True, dim=-1).indices[..., : slots.free]
        kept = kept.sort(dim=-1).values
        # 3. What would have stayed of that.
        fewer = slots.free // 2
        would_keep = []
        for share in SHARES:
            other = _ranks(by_beacons, by_neighbourhood, torch.full_like(half, share), fewer)
            order = other.sort(stable=True, descending=True, dim=-1).indices
            place = order.argsort(dim=-1)
            would_keep.append((place < fewer).gather(-1, kept)[0])
        self.would_keep = torch.stack(would_keep)
        return ranks


def learn(folder: str, prompt: str | list[int], tokens: int = 2000, budget: int = 512) -> list[list[float]]:
    """For each layer and KV head the share with the most attention in hindsight, [L][K], over a text
    of so many tokens that the model writes."""
    hindsight = _Hindsight()
    stages = (Stage(), NEIGHBOURHOOD, ATTENDED)
    policy = replace(beacon_24_8, name="hindsight", stages=stages, score=hindsight)
    llm = LLM(folder, policy=policy, budget=budget, max_num_seqs=1)
    params = SamplingParams(max_tokens=tokens, temperature=0.6, top_p=0.95, seed=0, ignore_eos=True)
    if isinstance(prompt, str) and llm.tokenizer.chat_template is not None:
        prompt = llm.chat_prompt([{"role": "user", "content": prompt}])
    (output,) = llm.generate([prompt], params)
    if output.error:
        raise ValueError(output.error)
    best = hindsight.attended.argmax(0)
    return torch.tensor(SHARES)[best.cpu()].tolist()


if __name__ == "__main__":
    learnt = learn(sys.argv[1], TEXT)
    print(f"from nanobeacon.measure.tried import by_shares\n\npolicy = by_shares({learnt})")
