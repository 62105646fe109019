"""`Evictor`: when a query buffer is reduced, when a cache is evicted, and how (METHOD.md).

Counts decide, so the host knows the schedule without asking the device. Knows nothing of models,
sampling or scheduling. What a slot is worth is `ranking.py`'s business; what a policy asks is data in
`policies.py`.

After a step (`after_step`):

1. Rows of the query buffer that are full, or at the freeze, are reduced to their beacons.
2. Requests at their budget are evicted, all of them together: staged, ranked, chosen, moved.

Shapes: B requests, L layers, H query heads, K KV heads.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cache import KVCache, QueryBuffer
from .parallel import Group, Heads
from .policies import EvictionSettings
from .ranking import Due, Ranker
from .request import Request
from .rope import Rope
from .staging import send

AHEAD = 32  # tokens of a given output that one step may feed: their logits are all held at once
SCRATCH = 512 << 20  # bytes that requests which evict together may use for scores
# Bytes of it for each slot, layer and KV head: scores, ranks, and their order in sorting.
SCORE_SCRATCH = 40


@dataclass(frozen=True)
class EvictionEvent:
    """One eviction of one request, as `trace=True` records it."""

    position: int  # logical position of the newest cached token when it ran
    kept: Tensor  # int32 [L, K, S]: positions kept, ascending, the protected ones included
    # int32 [L, H, n]: positions of the queries left in the buffer, -1 where a slot is empty
    beacons: Tensor


@dataclass
class Evicted:
    """What became of the requests that were at their budget after a step."""

    # whose cache was evicted -> what its trace gets of it, None without a trace
    events: dict[Request, EvictionEvent | None] = field(default_factory=dict)
    failures: dict[Request, str] = field(default_factory=dict)  # whose was not -> why
    at_work: bool = False  # whether anything was due, were it a reduction


@dataclass(frozen=True)
class Choice:
    """What stays of the caches that one eviction takes together."""

    due: Due
    keep: Tensor  # int32 [B, L, K, kept], slots in order of age
    # float32 [B, L, K, kept - window]: what a policy's own score gave the best
    best_scores: Tensor | None


class Evictor:
    """Keeps every request within its budget after each step. settings None: a full cache,
    nothing to do.

    heads: which of the model's KV heads the cache has, None for all of them."""

    def __init__(
        self,
        settings: EvictionSettings | None,
        cache: KVCache,
        queries: QueryBuffer,
        rope: Rope,
        kernels,
        trace: bool = False,
        heads: Heads | None = None,
    ) -> None:
        self.settings = settings
        self.cache = cache
        self.queries = queries
        self.kernels = kernels
        self.trace = trace
        self.heads = heads or Heads(Group(), cache.keys.shape[1])
        self.ranker = None
        if settings is not None:
            self.ranker = Ranker(settings, cache, queries, rope, kernels, self.heads)

    # ------------------------------------------------------------------------------- when

    def tokens_until_reduction(self, request: Request) -> int:
        """Tokens that a request can take before its buffer must be reduced; 0: now.

        A row is reduced when it is full and, once, at the freeze, where the beacons are settled.
        Past the freeze only recents come in, for which the row has room until the eviction.
        """
        before_freeze = self.settings.freeze - request.evictable
        room = self.settings.policy.observed - request.buffer_count
        # 1. Before the freeze: until the row is full, or the freeze is there.
        if before_freeze > 0:
            return min(before_freeze, room)
        # 2. At the freeze: now, unless that has been done.
        if before_freeze == 0 and request.buffer_count > self.settings.policy.beacons:
            return 0
        # 3. Past it: not before the eviction, so longer than any period.
        return self.settings.budget

    def due(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """(those whose buffer is reduced now, those whose cache is evicted now), from
        counts alone."""
        if self.settings is None:
            return [], []
        reduce = []
        if self.settings.reduces:
            # Asked after every step: a row that is neither full nor at the freeze need not say more.
            full = self.settings.policy.observed
            freeze = self.settings.freeze
            possible = []
            for request in requests:
                evictable = request.cached_length - request.protected
                if evictable == freeze or request.buffer_count >= full:
                    possible.append(request)
            reduce = [r for r in possible if self.tokens_until_reduction(r) == 0]
        budget = self.settings.budget
        evict = [r for r in requests if r.cached_length - r.protected == budget]
        return reduce, evict

    def ahead(self, request: Request) -> int:
        """Tokens that a decoding request can take before anything of it is due, AHEAD at most."""
        if self.settings is None:
            return AHEAD
        until_eviction = self.settings.budget - request.evictable
        if not self.settings.reduces:
            return min(AHEAD, until_eviction)
        return min(AHEAD, until_eviction, self.tokens_until_reduction(request))

    # -------------------------------------------------------------------------------- how

    def after_step(self, requests: list[Request]) -> Evicted:
        """Reduce and evict what is due among the requests that go on after a step.

        One whose eviction fails, in a policy's own `score` or for lack of memory, has no cache to
        go on with; the others have theirs."""
        reduce, evict = self.due(requests)
        self._reduce(reduce)
        evicted = Evicted(at_work=bool(reduce or evict))
        for together in self._batches(evict):
            self._evict(together, evicted)
        return evicted

    def _batches(self, requests: list[Request]) -> list[list[Request]]:
        """Requests that are evicted together: as many as SCRATCH has room for."""
        if not requests:
            return []
        layers, num_kv_heads = self.cache.keys.shape[:2]
        longest = max(r.cached_length for r in requests)
        bytes_each = SCORE_SCRATCH * layers * num_kv_heads * longest
        size = max(1, SCRATCH // bytes_each)
        starts = range(0, len(requests), size)
        return [requests[first : first + size] for first in starts]

    def _reduce(self, requests: list[Request]) -> None:
        """buffer = FPS(buffer, beacons), all layers and heads of all requests at once."""
        if not requests:
            return
        columns = {
            "rows": [r.row for r in requests],
            "counts": [r.buffer_count for r in requests],
        }
        sent = send(columns, self.queries.buffer.device, int32=columns)
        self._reduce_rows(requests, sent["rows"], sent["counts"])

    def _reduce_rows(self, requests: list[Request], rows: Tensor, counts: Tensor) -> None:
        """The same, with what the device has to know: rows and the queries that they
        hold, int32 [B]. A ring of newest queries, which lies behind these, stays as it is."""
        policy = self.settings.policy
        queries = self.queries.buffer[:, :, :, : policy.observed]
        positions = self.queries.positions[:, :, :, : policy.observed]
        self.kernels.reduce(queries, positions, rows, counts, policy.beacons)
        for request in requests:
            request.buffer_count = min(request.buffer_count, policy.beacons)

    def _evict(self, requests: list[Request], evicted: Evicted) -> None:
        """One eviction of requests that are all at their budget; what becomes of it goes
        to `evicted`.

        Choosing changes nothing, so where it fails each request is tried alone, in less memory. One
        that fails alone has failed, and so have all whose caches were left half moved. Where
        several processes compute together, only a wrong answer of the policy's (ValueError), which
        is wrong in all of them, is a request's own."""
        several_processes = self.heads.group.size > 1
        failure = None
        # 1. Choose what stays.
        try:
            choice = self._selection(requests)
        except Exception as error:
            if several_processes and not isinstance(error, ValueError):
                raise
            failure = _described(error)
        # 2. One by one, where that failed; only here has the failed try let go of its memory.
        if failure is not None and len(requests) > 1:
            for request in requests:
                self._evict([request], evicted)
            return
        # 3. Move what stays.
        if failure is None:
            try:
                evicted.events.update(self._move(choice))
            except Exception as error:
                if several_processes:
                    raise
                failure = _described(error)
        # 4. Who has no cache to go on with.
        if failure is not None:
            for request in requests:
                evicted.failures[request] = f"its cache could not be evicted: {failure}"

    def _staged(self, requests: list[Request]) -> Due:
        """What the device has to know of these requests, in one copy."""
        settings = self.settings
        cache = self.cache
        device = cache.keys.device
        # 1. What each request says of itself, …
        columns: dict[str, list[int]] = {
            "rows": [r.row for r in requests],
            "cached_lengths": [r.cached_length for r in requests],
            "prompt_lengths": [len(r.prompt_token_ids) for r in requests],
            "first_evictable": [r.protected for r in requests],
            "buffer_counts": [r.buffer_count for r in requests],
        }
        # 2. … and, for each stage, its softmax's slots and where the queries are rotated to: two
        #    numbers, and one number for each query that it asks.
        stages = settings.policy.scores if self.queries.capacity else ()
        for i, stage in enumerate(stages):
            columns[f"domains {i}"] = [slot for r in requests for slot in self.ranker.domain(r, stage)]
            columns[f"rotations {i}"] = [at for r in requests for at in self.ranker.rotations(r, stage)]
        # 3. On the device.
        sent = send(columns, device, int32=columns)
        rows = sent["rows"]
        first_evictable = sent["first_evictable"]
        domains = [sent[f"domains {i}"] for i in range(len(stages))]
        rotations = [sent[f"rotations {i}"] for i in range(len(stages))]
        # 4. The candidates are what is not protected and not among the newest `window`.
        longest = max(r.cached_length for r in requests)
        num_pages = -(-longest // cache.page_size)
        index = torch.arange(settings.budget - settings.window, device=device)
        return Due(
            requests=requests,
            rows=rows,
            cached_lengths=sent["cached_lengths"],
            prompt_lengths=sent["prompt_lengths"],
            first_evictable=first_evictable,
            buffer_counts=sent["buffer_counts"],
            domains=[slots.view(len(requests), 2) for slots in domains],
            query_positions=[at.view(len(requests), -1) for at in rotations],
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
        # 2. The best, as many as the window leaves room for; of equal ones the older. Then back in
        #    order of age, int32 [B, L, K, kept - window], counted from the first evictable slot.
        order = ranks.sort(stable=True, dim=-1, descending=True).indices
        free = settings.kept - settings.window
        best = order[..., :free].int().sort(-1).values
        # 3. The window, which lies behind the candidates, stays too.
        candidates = ranks.shape[-1]
        newest = torch.arange(candidates, settings.budget, dtype=torch.int32, device=ranks.device)
        window = newest.expand(*ranks.shape[:3], -1)
        chosen = torch.cat((best, window), dim=-1)
        keep = chosen + due.first_evictable[:, None, None, None]
        # 4. What a score of the user's own gave them, for `Slots.previous` of the next eviction.
        best_scores = None
        if settings.policy.score is not None:
            best_scores = ranks.gather(-1, best.long())
        return Choice(due, keep, best_scores)

    def _move(self, choice: Choice) -> dict[Request, EvictionEvent | None]:
        """Leave only what stays; the caches, their lengths and the query buffers change here. What
        each request's trace gets of it."""
        settings = self.settings
        cache = self.cache
        requests = choice.due.requests
        # 1. Move what stays together, right behind the protected tokens.
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
        # 2. FPS reduces beacons and recents together to what the next period begins with.
        if settings.reduces:
            self._reduce_rows(requests, choice.due.rows, choice.due.buffer_counts)
        return {request: self._event(request) if self.trace else None for request in requests}

    def _remember_scores(self, requests: list[Request], kept_scores: Tensor) -> None:
        """For `Slots.previous`: scores [B, L, K, kept - window], in the order of the slots."""
        for request, scores in zip(requests, kept_scores, strict=True):
            request.kept_scores = scores

    def _event(self, request: Request) -> EvictionEvent:
        """What one eviction has left of a request, for its trace."""
        pages = torch.tensor(request.pages, device=self.cache.keys.device)
        kept = self.cache.positions[:, :, pages].flatten(2)[..., : request.cached_length]
        left = self.settings.policy.observed
        if self.settings.reduces:
            left = request.buffer_count
        beacons = self.queries.positions[request.row, ..., :left]
        # Of all heads of the model, whoever holds them
        kept = self.heads.of_all(kept, dim=1)
        beacons = self.heads.group.gather(beacons, dim=1)
        return EvictionEvent(request.num_computed - 1, kept.cpu(), beacons.clone().cpu())


def _described(error: Exception) -> str:
    """A ValueError is written for people; of others the kind says most."""
    return str(error) if isinstance(error, ValueError) else repr(error)
