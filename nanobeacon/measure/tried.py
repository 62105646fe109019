"""Policies that were measured and are no rows of `policies.py` (RESULTS.md, "Policies that were tried").

`python bench.py fidelity --policies beacon,nanobeacon.measure.tried:beacons_first_96` names one. Knows
nothing of how a policy is carried out.
"""

from dataclasses import replace

import torch
from torch import Tensor

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
