"""`Evictor`: when a query buffer is reduced, when a cache is evicted, and how (METHOD.md).

Counts decide, so the host knows the schedule without asking the device. Knows nothing of models, sampling
or scheduling. What a slot is worth is `ranking.py`'s business; what a policy asks is data in `policies.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import KVCache, QueryBuffer
from .parallel import Group, Heads
from .policies import EvictionSettings
from .ranking import Due, Ranker
from .request import Request
from .rope import Rope
from .staging import to_device

AHEAD = 32  # tokens of a given output that one step may feed: their logits are all held at once
SCRATCH = 512 << 20  # bytes that one group of requests may use for scores
SCORE_SCRATCH = 40  # bytes of it for each slot, layer and KV head: scores, ranks, and their order in sorting


@dataclass(frozen=True)
class EvictionEvent:
    """One eviction of one request, as `trace=True` records it."""

    position: int  # logical position of the newest cached token when it ran
    kept: Tensor  # int32 [L, K, S]: positions kept, ascending, the protected ones included
    beacons: Tensor  # int32 [L, H, n]: positions of the queries left in the buffer, -1 where a slot is empty


@dataclass(frozen=True)
class Choice:
    """What stays of the caches that one eviction takes together."""

    due: Due
    keep: Tensor  # int32 [B, L, K, kept], slots in order of age
    best_scores: Tensor | None  # float32 [B, L, K, kept - window]: what a policy's own score gave the best


class Evictor:
    """Keeps every request within its budget after each step. settings None: a full cache, nothing to do.

    heads: which of the model's KV heads the cache has, None for all of them."""

    def __init__(
        self, settings: EvictionSettings | None, cache: KVCache, queries: QueryBuffer, rope: Rope, kernels,
        trace: bool = False, heads: Heads | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.cache = cache
        self.queries = queries
        self.kernels = kernels
        self.trace = trace
        self.heads = heads or Heads(Group(), cache.keys.shape[1])
        self.ranker = None
        if settings is not None:
            self.ranker = Ranker(settings, cache, queries, rope, kernels, self.heads)
        self.evictions = 0

    # ------------------------------------------------------------------------------------------ when

    def tokens_until_reduction(self, request: Request) -> int:
        """Tokens that a request can take before its buffer must be reduced; 0: now.

        A row is reduced when it is full and, once, at the freeze, where the beacons are settled. Past the
        freeze only recents come in, for which the row has room until the eviction.
        """
        before_freeze = self.settings.freeze - request.evictable
        room = self.settings.policy.observed - request.buffer_count
        if before_freeze > 0:
            return min(before_freeze, room)
        if before_freeze == 0 and request.buffer_count > self.settings.policy.beacons:
            return 0
        return self.settings.budget  # longer than any period

    def due(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """(those whose buffer is reduced now, those whose cache is evicted now), from counts alone."""
        if self.settings is None:
            return [], []
        reduce = []
        if self.settings.reduces:
            reduce = [r for r in requests if self.tokens_until_reduction(r) == 0]
        evict = [r for r in requests if r.evictable == self.settings.budget]
        return reduce, evict

    def ahead(self, request: Request) -> int:
        """Tokens that a decoding request can take before anything of it is due, AHEAD at most."""
        if self.settings is None:
            return AHEAD
        until_eviction = self.settings.budget - request.evictable
        if not self.settings.reduces:
            return min(AHEAD, until_eviction)
        return min(AHEAD, until_eviction, self.tokens_until_reduction(request))

    # ------------------------------------------------------------------------------------------- how

    def after_step(self, requests: list[Request]) -> bool:
        """Reduce and evict what is due among the requests that go on after a step; whether anything was.

        One whose eviction fails, in a policy's own `score` or for lack of memory, ends in error, alone."""
        reduce, evict = self.due(requests)
        self._reduce(reduce)
        for group in self._groups(evict):
            self._evict_or_end(group)
        return bool(reduce or evict)

    def _groups(self, requests: list[Request]) -> list[list[Request]]:
        """Requests that are evicted together: as many as SCRATCH has room for."""
        if not requests:
            return []
        layers, num_kv_heads = self.cache.keys.shape[:2]
        longest = max(r.cached_length for r in requests)
        bytes_each = SCORE_SCRATCH * layers * num_kv_heads * longest
        size = max(1, SCRATCH // bytes_each)
        return [requests[first : first + size] for first in range(0, len(requests), size)]

    def _reduce(self, requests: list[Request]) -> None:
        """buffer = FPS(buffer, beacons), all layers and heads of all requests at once."""
        if not requests:
            return
        numbers = [[r.row for r in requests], [r.buffer_count for r in requests]]
        rows, counts = to_device(numbers, self.queries.buffer.device)
        self._reduce_rows(requests, rows, counts)

    def _reduce_rows(self, requests: list[Request], rows: Tensor, counts: Tensor) -> None:
        """The same, with what the device has to know: rows and the queries that they hold, int32 [B]."""
        beacons = self.settings.policy.beacons
        self.kernels.reduce(self.queries.buffer, self.queries.positions, rows, counts, beacons)
        for request in requests:
            request.buffer_count = min(request.buffer_count, beacons)

    def _evict_or_end(self, requests: list[Request]) -> None:
        """One eviction of requests that are all at their budget.

        Choosing changes nothing, so where it fails each request of a group is tried alone, in less memory.
        One that fails alone ends, and so do all whose caches were left half moved. Where
        several processes compute together, only a wrong answer of the policy's (ValueError), which is wrong
        in all of them, ends a request alone."""
        failure = None
        try:
            choice = self._selection(requests)
        except Exception as error:
            if self.heads.group.size > 1 and not isinstance(error, ValueError):
                raise
            failure = _described(error)
        # Only here has the failed try let go of its memory
        if failure is not None and len(requests) > 1:
            for request in requests:
                self._evict_or_end([request])
            return
        if failure is None:
            try:
                self._move(choice)
            except Exception as error:
                if self.heads.group.size > 1:
                    raise
                failure = _described(error)
        if failure is not None:
            for request in requests:
                request.finish_reason = "error"
                request.error = f"its cache could not be evicted: {failure}"

    def _staged(self, requests: list[Request]) -> Due:
        """What the device has to know of these requests, in one copy."""
        settings = self.settings
        cache = self.cache
        device = cache.keys.device
        numbers = [
            [r.row for r in requests],
            [r.cached_length for r in requests],
            [len(r.prompt_token_ids) for r in requests],
            [r.protected for r in requests],
            [r.buffer_count for r in requests],
        ]
        if self.queries.capacity:
            for stage in settings.policy.scores:
                numbers.append([slot for r in requests for slot in self.ranker.domain(r, stage)])
                numbers.append([at for r in requests for at in self.ranker.rotations(r, stage)])
        rows, lengths, prompt_lengths, first_evictable, counts, *asked = to_device(numbers, device)
        longest = max(r.cached_length for r in requests)
        num_pages = -(-longest // cache.page_size)
        # The candidates are what is not protected and not among the newest `window`.
        index = torch.arange(settings.budget - settings.window, device=device)
        return Due(
            requests=requests,
            rows=rows,
            cached_lengths=lengths,
            prompt_lengths=prompt_lengths,
            first_evictable=first_evictable,
            buffer_counts=counts,
            domains=[domains.view(-1, 2) for domains in asked[0::2]],
            query_positions=[at.view(len(requests), -1) for at in asked[1::2]],
            page_table=cache.page_table[:, :num_pages].index_select(0, rows),
            candidates=first_evictable[:, None] + index,
            longest=longest,
        )

    def _selection(self, requests: list[Request]) -> Choice:
        """Rank what may go and settle what stays. Changes nothing."""
        settings = self.settings
        # 1. What each candidate is worth, in every layer and KV head.
        due = self._staged(requests)
        ranks = self.ranker.ranks(due)
        # 2. The best, as many as the window leaves room for; of equal ones the older. Back in order of age.
        order = ranks.sort(stable=True, dim=-1, descending=True).indices
        best = order[..., : settings.kept - settings.window].int().sort(-1).values
        # 3. The window stays too.
        newest = torch.arange(ranks.shape[-1], settings.budget, dtype=torch.int32, device=ranks.device)
        chosen = torch.cat((best, newest.expand(*ranks.shape[:3], -1)), dim=-1)
        keep = chosen + due.first_evictable[:, None, None, None]
        best_scores = ranks.gather(-1, best.long()) if settings.policy.score is not None else None
        return Choice(due, keep, best_scores)

    def _move(self, choice: Choice) -> None:
        """Leave only what stays; the caches, their lengths and the query buffers change here."""
        settings = self.settings
        cache = self.cache
        requests = choice.due.requests
        # 4. Move what stays together, right behind the protected tokens.
        self.kernels.compact(
            cache.keys,
            cache.values,
            cache.positions,
            choice.due.page_table,
            choice.keep,
            choice.due.first_evictable,
        )
        for request in requests:
            request.cached_length = request.protected + settings.kept
        if choice.best_scores is not None:
            self._remember_scores(requests, choice.best_scores)
        # 5. Beacons and recents together are the next period's beacons.
        if settings.reduces:
            self._reduce_rows(requests, choice.due.rows, choice.due.buffer_counts)
        if self.trace:
            for request in requests:
                request.trace.append(self._event(request))
        self.evictions += len(requests)

    def _remember_scores(self, requests: list[Request], kept_scores: Tensor) -> None:
        """For `Slots.previous`: scores [B, L, K, kept - window], in the order of the slots."""
        for request, scores in zip(requests, kept_scores, strict=True):
            request.kept_scores = scores

    def _event(self, request: Request) -> EvictionEvent:
        """What one eviction has left of a request, for its trace."""
        pages = torch.tensor(request.pages, device=self.cache.keys.device)
        kept = self.cache.positions[:, :, pages].flatten(2)[..., : request.cached_length]
        left = request.buffer_count if self.settings.reduces else self.settings.policy.observed
        beacons = self.queries.positions[request.row, ..., :left]
        # Of all heads of the model, whoever holds them
        kept = self.heads.of_all(kept, dim=1)
        beacons = self.heads.group.gather(beacons, dim=1)
        return EvictionEvent(request.num_computed - 1, kept.cpu(), beacons.clone().cpu())


def _described(error: Exception) -> str:
    """A ValueError is written for people; of others the kind says most."""
    return str(error) if isinstance(error, ValueError) else repr(error)
