"""Policies made of stages (METHOD.md, "Stages"), as measured (RESULTS.md, "Policies that were tried").

`python bench.py fidelity --policies beacon,nanobeacon.measure.tried:beacons_first_96` names one. None of them
is a row of `policies.py`; knows nothing of how a policy is carried out.
"""

from dataclasses import replace

from nanobeacon.policies import Policy, Stage

# The same 32 rows of the query buffer, split another way.
beacon_24_8 = Policy("beacon-24-8", beacons=24, recents=8)

# What the newest 32 queries attend to, averaged over the heads of a KV head and over neighbouring slots.
NEIGHBOURHOOD = Stage(latest=32, domain="evictable", group="mean", pool="sum", smoothing="avg")

neighbourhood = Policy("neighbourhood", select="none", beacons=0, recents=0, stages=(NEIGHBOURHOOD,))


def _beacons_first(name: str, slots: int | float) -> Policy:
    """The first `slots` free slots by beacons, the rest by the neighbourhood."""
    return replace(beacon_24_8, name=name, stages=(Stage(slots), NEIGHBOURHOOD))


beacons_first_64 = _beacons_first("beacons-first-64", 64)
beacons_first_96 = _beacons_first("beacons-first-96", 96)
beacons_first_128 = _beacons_first("beacons-first-128", 128)
beacons_first_half = _beacons_first("beacons-first-half", 0.5)
