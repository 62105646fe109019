"""`Evictor`: when a query buffer is reduced, when a cache is evicted; score, select, compact (section 3).

Counts decide, so the host knows the schedule without asking the device. Knows nothing of models, sampling or
scheduling; what a policy asks and how it pools is data in `policies.py`."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KVCache, QueryBuffer
from .kernels import reference
from .policies import EvictionSettings
from .request import Request
from .rope import Rope

AHEAD = 32  # tokens of a given output that one step may feed: their logits are all held at once
SCRATCH = 512 << 20  # bytes that one group of requests may use for rotated queries and scores


@dataclass(frozen=True)
class EvictionEvent:
    """One eviction of one request, as `trace=True` records it."""

    position: int  # logical position of the newest cached token when it ran
    kept: Tensor  # int32 [L, K, S]: positions kept, ascending, the protected ones included
    beacons: Tensor  # int32 [L, H, n]: positions of the queries left in the buffer, -1 where a slot is empty


class Evictor:
    """Keeps every request within its budget after each step. settings None: a full cache, nothing to do."""

    def __init__(
        self, settings: EvictionSettings | None, cache: KVCache, queries: QueryBuffer, rope: Rope, kernels,
        trace: bool = False,
    ) -> None:  # fmt: skip
        self.settings, self.cache, self.queries = settings, cache, queries
        self.rope, self.kernels, self.trace = rope, kernels, trace
        self.evictions = 0

    def due(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """(those whose buffer is reduced now, those whose cache is evicted now), from counts alone."""
        if (settings := self.settings) is None:
            return [], []
        reduce = []
        for r in requests if settings.reduces else ():
            full = r.evictable < settings.freeze and r.buffer_count >= self.queries.capacity
            if full or (r.evictable == settings.freeze and r.buffer_count > settings.policy.beacons):
                reduce.append(r)
        return reduce, [r for r in requests if r.evictable == settings.budget]

    def ahead(self, request: Request) -> int:
        """Tokens that a decoding request can take before anything of it is due, AHEAD at most."""
        if (settings := self.settings) is None:
            return AHEAD
        left = [AHEAD, settings.budget - request.evictable]
        if settings.reduces and request.evictable < settings.freeze:
            left += [settings.freeze - request.evictable, self.queries.capacity - request.buffer_count]
        return min(left)

    def after_step(self, requests: list[Request]) -> bool:
        """Reduce and evict what is due among the requests that go on after a step; whether anything was."""
        reduce, evict = self.due(requests)
        self._reduce(reduce)
        # Requests that go together, each with its rotated queries and scores
        layers, kv_heads = self.cache.keys.shape[:2]
        longest = max((r.cached_length for r in evict), default=1)
        size = max(1, SCRATCH // (12 * self.queries.buffer[0].numel() + 16 * layers * kv_heads * longest))
        for first in range(0, len(evict), size):
            self._evict(evict[first : first + size])
        return bool(reduce or evict)

    def _reduce(self, requests: list[Request]) -> None:
        if not requests:
            return
        device, beacons = self.queries.buffer.device, self.settings.policy.beacons
        rows = torch.tensor([r.row for r in requests], device=device)
        counts = torch.tensor([r.buffer_count for r in requests], dtype=torch.int32, device=device)
        self.kernels.reduce(self.queries.buffer, self.queries.positions, rows, counts, beacons)
        for request in requests:
            request.buffer_count = min(request.buffer_count, beacons)

    def _evict(self, requests: list[Request]) -> None:
        settings, device = self.settings, self.cache.keys.device
        rows = torch.tensor([r.row for r in requests], device=device)
        longest = max(r.cached_length for r in requests)
        page_table = self.cache.page_table[rows, : -(-longest // self.cache.page_size)]
        start = torch.tensor([r.protected for r in requests], dtype=torch.int32, device=device)
        evictable = settings.budget - settings.window
        index = start[:, None].long() + torch.arange(evictable, device=device)
        ranks = self._ranks(requests, rows, page_table, index, longest)
        order = ranks.sort(stable=True, dim=-1, descending=True).indices
        best = order[..., : settings.kept - settings.window].sort(-1).values
        newest = torch.arange(evictable, settings.budget, device=device).expand(*ranks.shape[:3], -1)
        keep = torch.cat((best, newest), dim=-1).int() + start[:, None, None, None]
        cache = self.cache
        self.kernels.compact(cache.keys, cache.values, cache.positions, page_table, keep.contiguous(), start)
        for request in requests:
            request.cached_length = request.protected + settings.kept
        if settings.reduces:
            self._reduce(requests)
        for request in requests if self.trace else ():
            request.trace.append(self._event(request))
        self.evictions += len(requests)

    def _ranks(
        self, requests: list[Request], rows: Tensor, page_table: Tensor, index: Tensor, longest: int
    ) -> Tensor:
        """float32 [B, L, K, n]: what is worth keeping among each request's slots `index` [B, n]."""
        shape = (len(requests), *self.cache.keys.shape[:2], index.shape[1])
        if self.settings.policy.ranking == "newest":
            return torch.arange(index.shape[1], device=index.device, dtype=torch.float32).expand(shape)
        if self.settings.policy.ranking == "random":
            seeds = [int(r.chance("random eviction", r.num_computed) * 2**53) for r in requests]
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            return torch.stack([torch.rand(shape[1:], generator=g) for g in generators]).to(index.device)
        scored = self._scores(requests, rows, page_table, longest)
        return scored.gather(3, index[:, None, None].expand(shape))

    def _scores(self, requests: list[Request], rows: Tensor, page_table: Tensor, longest: int) -> Tensor:
        """Scores of every slot [B, L, K, longest] by the policy's queries, smoothed, with R-KV's part."""
        policy, cache, device = self.settings.policy, self.cache, self.cache.keys.device
        at = torch.tensor([self._rotations(r) for r in requests], device=device)
        prompts = torch.tensor([len(r.prompt_token_ids) for r in requests], device=device)
        cos, sin = self.rope.cos_sin(at.clamp(min=0), torch.maximum(prompts[:, None], at + 1))
        queries = self.rope.rotate(self.queries.buffer[rows], cos[:, None, None], sin[:, None, None])
        at = at.int()[:, None, None].expand(queries.shape[:-1]).contiguous()
        lengths = torch.tensor([r.cached_length for r in requests], dtype=torch.int32, device=device)
        domains = torch.tensor([self._domain(r) for r in requests], dtype=torch.int32, device=device)
        scored = self.kernels.scores(
            queries.contiguous(), at, cache.keys, cache.positions, page_table, lengths, domains,
            queries.shape[-1] ** -0.5, longest, policy.group, policy.pool,
        )  # fmt: skip
        if policy.smoothing == "avg":  # slots outside the domain count as zero weight
            scored = F.avg_pool1d(scored.clamp(min=0).flatten(0, 1), 7, 1, 3).view_as(scored)
        elif policy.smoothing == "max":
            scored = F.max_pool1d(scored.flatten(0, 1), 7, 1, 3).view_as(scored)
        if policy.attention_share is not None:
            redundant = reference.redundancy(cache.keys, page_table, domains, longest)
            scored = policy.attention_share * scored - (1 - policy.attention_share) * redundant
        return scored

    def _rotations(self, request: Request) -> list[int]:
        """For each slot of a buffer row the position that its query is rotated to, -1 where it is empty.
        Beacons stand at the newest position; recents at their own, and see no key newer than themselves."""
        settings, policy, newest = self.settings, self.settings.policy, request.num_computed - 1
        at = [-1] * self.queries.capacity
        if settings.reduces:
            beacons = request.buffer_count - settings.recents
            at[:beacons] = [newest] * beacons
            at[beacons : request.buffer_count] = range(newest - settings.recents + 1, newest + 1)
            return at
        seen = {"first": request.evictable, "reservoir": newest + 1}.get(policy.select, 0)
        filled = min(seen, policy.beacons)
        at[:filled] = [newest] * filled
        for position in range(max(0, newest + 1 - policy.recents), newest + 1):
            at[policy.beacons + position % policy.recents] = position
        return at

    def _domain(self, request: Request) -> tuple[int, int]:
        """Slots [start, end) that the policy's softmax runs over."""
        policy, length = self.settings.policy, request.cached_length
        if policy.domain == "evictable":
            return request.protected, length - self.settings.window
        return 0, length - (policy.recents if policy.domain == "before-recents" else 0)

    def _event(self, request: Request) -> EvictionEvent:
        pages = torch.tensor(request.pages, device=self.cache.keys.device)
        kept = self.cache.positions[:, :, pages].flatten(2)[..., : request.cached_length]
        left = request.buffer_count if self.settings.reduces else self.queries.capacity
        beacons = self.queries.positions[request.row, ..., :left]
        return EvictionEvent(request.num_computed - 1, kept.cpu(), beacons.clone().cpu())
