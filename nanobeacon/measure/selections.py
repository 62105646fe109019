"""Rival ways to find the beacons (Figures 6 and 7): from every past query, or as running
averages of them.

A reservoir as large as the context makes the engine keep all queries (`keep_history`); the evictor
here boils them down to a few before each eviction, while scoring and compaction stay the engine's.
Meant for studies, as such a history outgrows the cache that it helps to shrink. Knows queries;
nothing of problems or answers.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..cache import QueryBuffer
from ..engine import Engine
from ..eviction import Evicted, Evictor
from ..kernels import reference
from ..policies import Policy
from ..request import Request

ITERATIONS = 10  # of K-means, always
DECAYS = (0.9, 0.999)  # of the two moving averages


def keep_history(policy: Policy, length: int) -> Policy:
    """The policy with every query of `length` tokens kept: its reservoir never has to drop one."""
    return replace(policy, select="reservoir", beacons=length, buffer=None)


class SelectingEvictor(Evictor):
    """Asks at each eviction the recents and `count` queries made of the history by a row of
    SELECTIONS."""

    def __init__(self, engine: Engine, name: str, count: int) -> None:
        # 1. The engine's settings, with `count` beacons instead of as many as the history has
        kept = engine.config.eviction
        settings = replace(kept, policy=replace(kept.policy, beacons=count))

        # 2. A small query buffer beside the engine's, for what is chosen of it
        history = engine.queries
        model = engine.model
        queries = QueryBuffer(
            settings,
            model.config,
            len(history.buffer),
            history.buffer.dtype,
            history.buffer.device,
        )
        super().__init__(settings, engine.cache, queries, model.rope, model.kernels, engine.config.trace)
        self.name = name
        self.history = history.buffer
        self.row_bytes = queries.row_bytes  # that a request takes
        if name != "ema":  # averages alone could be kept without the history
            self.row_bytes += history.row_bytes

    def after_step(self, requests: list[Request]) -> Evicted:
        """Fill the rows of the requests whose eviction is due, then go on as the engine does."""
        _, due = self.due(requests)
        for request in due:
            self._choose(request)
        return super().after_step(requests)

    def _choose(self, request: Request) -> None:
        """Fill the request's row. Its positions stay -1: an average has none."""
        policy = self.settings.policy
        held = self.history[request.row]  # [L, H, N, D]

        # 1. The beacons, of each head for itself. A request's draws are the same whatever runs
        #    beside it
        seed = int(request.chance(self.name, request.num_computed) * 2**53)
        generator = torch.Generator(held.device).manual_seed(seed)
        past = held[:, :, : request.num_computed].flatten(0, 1)
        choose = SELECTIONS[self.name]
        chosen = choose(past.float(), policy.beacons, generator)
        row = self.queries.buffer[request.row]
        row[:, :, : policy.beacons] = chosen.unflatten(0, held.shape[:2]).to(row.dtype)

        # 2. The recents: the last slots of both, position modulo recents
        if policy.recents:
            row[:, :, policy.beacons :] = held[:, :, -policy.recents :]


def farthest(past: Tensor, count: int, generator: Generator) -> Tensor:
    """FPS over the whole history, which Continual FPS approximates: past [B, N, D] -> [B,
    count, D]."""
    lengths = torch.full((len(past),), past.shape[1], dtype=torch.int32, device=past.device)
    return _taken(past, reference.fps(past, lengths, count))


def centroids(past: Tensor, count: int, generator: Generator) -> Tensor:
    """The mean query of each cluster."""
    members = _members(past, _clusters(past, count, generator))
    return members @ past / members.sum(-1, keepdim=True).clamp(min=1)


def central(past: Tensor, count: int, generator: Generator) -> Tensor:
    """The query nearest to the centroid of each cluster."""
    unit = F.normalize(past, dim=-1)
    cosines = unit @ _clusters(past, count, generator).mT  # [B, N, count]
    return _taken(past, cosines.argmax(1))


def averages(past: Tensor, count: int, generator: Generator) -> Tensor:
    """Exponential moving averages over the history, one for each of DECAYS, their weights
    summing to 1."""
    ages = torch.arange(past.shape[1] - 1, -1, -1, device=past.device)
    weights = torch.stack([decay**ages for decay in DECAYS])
    return weights / weights.sum(-1, keepdim=True) @ past


SELECTIONS = {"history": farthest, "kmeans": centroids, "nearest": central, "ema": averages}


def _taken(past: Tensor, picks: Tensor) -> Tensor:
    """Queries of past [B, N, D] at picks int64 [B, count]: [B, count, D]."""
    return past.gather(1, picks[..., None].expand(-1, -1, past.shape[-1]))


def _members(past: Tensor, centres: Tensor) -> Tensor:
    """float [B, count, N]: 1 where a query belongs to a centre, the nearest by cosine."""
    nearest = (F.normalize(past, dim=-1) @ centres.mT).argmax(-1)
    return F.one_hot(nearest, centres.shape[1]).float().mT


def _clusters(past: Tensor, count: int, generator: Generator) -> Tensor:
    """Unit centres [B, count, D] by K-means on directions, from K-means++: far queries are
    likely starts."""
    # 1. Starts: the first query, then draws whose chance grows with the distance to all
    #    starts so far
    unit = F.normalize(past, dim=-1)
    centres = unit[:, :1]
    while centres.shape[1] < count:
        nearest = (unit @ centres.mT).amax(-1)
        distance = (1 - nearest).clamp(min=1e-9)
        pick = torch.multinomial(distance, 1, generator=generator)
        centres = torch.cat((centres, _taken(unit, pick)), 1)

    # 2. A fixed number of rounds; a centre without members stays where it is
    for _ in range(ITERATIONS):
        sums = _members(past, centres) @ unit
        empty = sums.norm(dim=-1, keepdim=True) == 0
        centres = torch.where(empty, centres, F.normalize(sums, dim=-1))
    return centres
