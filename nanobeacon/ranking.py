"""What is worth keeping: a rank for every slot that an eviction may choose from
(METHOD.md, "Eviction").

Four kinds of rank, as the policy says: by the attention of its queries, by age, by chance, or by a
function of the user's own (`Policy.score`), which sees a `Slots`. Knows caches, query buffers and
policies; nothing of budgets being reached, of what is then kept, or of compaction.

Shapes: B requests, L layers, H query heads, K KV heads, C rows of a query buffer, D head dim,
S slots of the longest request, n candidates: the evictable slots of each request but its
newest `window`.

Where a group computes a model together, H and K are a member's own heads. Since each KV head is
evicted from by itself, members have nothing to tell each other, with two exceptions: a policy that
pools all heads of a layer (rpc) takes the mean over members too, and query heads of a KV head with
copies are put together first.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KVCache, QueryBuffer
from .observation import EMPTY
from .parallel import Heads
from .policies import EvictionSettings, Stage
from .request import Request
from .rope import Rope

SMOOTHED = 7  # neighbouring slots that a policy with smoothing takes together


@dataclass(frozen=True)
class Due:
    """The requests that one eviction takes together, and where their slots are."""

    requests: list[Request]
    rows: Tensor  # int32 [B], of the query buffer
    cached_lengths: Tensor  # int32 [B]
    prompt_lengths: Tensor  # int32 [B]
    first_evictable: Tensor  # int32 [B]: the first slot that is not protected
    buffer_counts: Tensor  # int32 [B]: queries in a row that is reduced
    # of each stage, int32 [B, 2]: slots [start, end) that its softmax runs over
    domains: list[Tensor]
    # of each stage, int32 [B, N], N of its `slots_asked`: where queries are rotated to, -1: not asked
    query_positions: list[Tensor]
    page_table: Tensor  # int32 [B, pages of the longest]
    candidates: Tensor  # int64 [B, n], slots
    longest: int  # S


class Slots:
    """What the cache knows of the candidates, for a `Policy.score`. All tensors are [B, L, K, n],
    oldest slot first; what a function does not ask for is not computed."""

    def __init__(self, due: Due, cache: KVCache, attention: Tensor | None, free: int) -> None:
        # float32: the policy's own score by its queries, None if it asks none; of a policy with
        # stages one for each, [stages, B, L, K, n]
        self.attention = attention
        self.free = free  # how many of the n stay
        self._due = due
        self._cache = cache

    @cached_property
    def positions(self) -> Tensor:
        """int64: positions in the request's text, prompt included."""
        return self._gathered(self._cache.positions).long()

    @cached_property
    def key_norms(self) -> Tensor:
        """float32: lengths of the keys, rotated (which changes no length)."""
        return self._norms(self._cache.keys)

    @cached_property
    def value_norms(self) -> Tensor:
        """float32: lengths of the values."""
        return self._norms(self._cache.values)

    @cached_property
    def previous(self) -> Tensor:
        """float32: what this function gave each slot at the request's last eviction; 0 where it
        gave nothing yet, to newer tokens and to those that stayed as part of the window."""
        layers, num_kv_heads = self._cache.keys.shape[:2]
        count = self._due.candidates.shape[1]
        shape = (len(self._due.requests), layers, num_kv_heads, count)
        found = torch.zeros(shape, dtype=torch.float32, device=self._cache.keys.device)
        for row, request in enumerate(self._due.requests):
            scores = request.kept_scores
            if scores is not None:
                # What was kept stands first among the candidates, in the same order.
                num_kept = scores.shape[-1]
                found[row, ..., :num_kept] = scores
        return found

    def _flat_slots(self) -> Tensor:
        """int64 [B, n]: candidates as page * P + offset."""
        page_size = self._cache.page_size
        pages = self._due.page_table.long().gather(1, self._due.candidates // page_size)
        return pages * page_size + self._due.candidates % page_size

    def _gathered(self, per_slot: Tensor) -> Tensor:
        """[L, K, pages, P] -> [B, L, K, n]."""
        return per_slot.flatten(2)[:, :, self._flat_slots()].permute(2, 0, 1, 3)

    def _norms(self, vectors: Tensor) -> Tensor:
        """[L, K, pages, P, D] -> [B, L, K, n]; the vectors of one layer are held at a time."""
        slots = self._flat_slots()
        norms = [layer.flatten(1, 2)[:, slots].float().norm(dim=-1) for layer in vectors]
        return torch.stack(norms).permute(2, 0, 1, 3)


class Ranker:
    """Ranks the candidates of an eviction as one policy wants it."""

    def __init__(
        self,
        settings: EvictionSettings,
        cache: KVCache,
        queries: QueryBuffer,
        rope: Rope,
        kernels,
        heads: Heads,
    ) -> None:
        self.settings = settings
        self.cache = cache
        self.queries = queries
        self.rope = rope
        self.kernels = kernels
        self.heads = heads

    def ranks(self, due: Due) -> Tensor:
        """float32 [B, L, K, n]: the higher, the more worth keeping.

        ValueError for an answer of `Policy.score` that is no tensor of this shape.
        """
        policy = self.settings.policy
        layers, num_kv_heads = self.cache.keys.shape[:2]
        # The four kinds; what `policy.score` says goes before all else.
        shape = (len(due.requests), layers, num_kv_heads, due.candidates.shape[1])
        if policy.score is not None:
            return self._own_score(due, shape)
        if policy.ranking == "newest":
            ages = torch.arange(shape[-1], device=due.candidates.device, dtype=torch.float32)
            return ages.expand(shape)
        if policy.ranking == "random":
            return self._by_chance(due, shape)
        return self._by_stages(due, shape)

    def _own_score(self, due: Due, shape: tuple[int, ...]) -> Tensor:
        """The user's function, its answer checked; not a number counts as the lowest rank."""
        policy = self.settings.policy
        attention = None
        if policy.stages:
            stages = range(len(policy.stages))
            attention = torch.stack([self._attention(due, shape, number) for number in stages])
        elif self.queries.capacity:
            attention = self._attention(due, shape, number=0)
        free = self.settings.kept - self.settings.window
        scored = policy.score(Slots(due, self.cache, attention, free))
        if not isinstance(scored, Tensor) or scored.shape != shape:
            found = list(scored.shape) if isinstance(scored, Tensor) else type(scored).__name__
            wanted = f"a tensor {list(shape)} is needed"
            raise ValueError(f"policy {policy.name!r}: score returned {found}; {wanted}")
        return scored.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)

    def _by_chance(self, due: Due, shape: tuple[int, ...]) -> Tensor:
        """Uniform numbers, drawn from each request's seed and position alone; for all heads of the
        model, so that a head's do not depend on who holds it."""
        _, layers, _, candidates = shape
        drawn = []
        for request in due.requests:
            # A number in [0, 1) of 53 bits, made whole again.
            seed = int(request.chance("random eviction", request.num_computed) * 2**53)
            generator = torch.Generator().manual_seed(seed)
            of_all = torch.rand(layers, self.heads.count, candidates, generator=generator)
            drawn.append(self.heads.mine(of_all, dim=1))
        return torch.stack(drawn).to(due.candidates.device)

    def _by_stages(self, due: Due, shape: tuple[int, ...]) -> Tensor:
        """The last stage's scores; what an earlier stage has taken stands above them all.

        A policy without stages has one, which ranks every slot."""
        free = self.settings.kept - self.settings.window
        taken = torch.zeros(shape, dtype=torch.bool, device=due.candidates.device)
        num_taken = 0
        for number, stage in enumerate(self.settings.policy.scores):
            # 1. How this stage ranks what is left.
            ranks = self._attention(due, shape, number)
            if num_taken:
                ranks = ranks.masked_fill(taken, torch.inf)
            # 2. It takes its share; of equal ones the older. Who takes the rest need not say which.
            num_taken += stage.slots_of(free, free - num_taken)
            if num_taken == free:
                break
            order = ranks.sort(stable=True, dim=-1, descending=True).indices
            taken = taken.scatter(-1, order[..., :num_taken], True)
        return ranks

    def _attention(self, due: Due, shape: tuple[int, ...], number: int) -> Tensor:
        """Scores of the candidates by the queries that stage `number` asks."""
        policy = self.settings.policy
        stage = policy.scores[number]
        # 1. What the queries say of every slot.
        scored = self._scores(due, number)
        # 2. Smoothing over neighbours; slots outside the domain count as zero weight.
        if stage.smoothing == "avg":
            weights = scored.clamp(min=0).flatten(0, 1)
            scored = F.avg_pool1d(weights, SMOOTHED, stride=1, padding=SMOOTHED // 2)
        elif stage.smoothing == "max":
            scored = F.max_pool1d(scored.flatten(0, 1), SMOOTHED, stride=1, padding=SMOOTHED // 2)
        scored = scored.view(shape[0], shape[1], shape[2], due.longest)
        # 3. R-KV's part: keys that resemble others are worth less.
        share = policy.attention_share
        if share is not None:
            redundant = self.kernels.redundancy(
                self.cache.keys, due.page_table, due.domains[0], due.longest
            )  # fmt: skip
            scored = share * scored - (1 - share) * redundant
        # 4. Of all slots those that may go: [B, L, K, S] -> [B, L, K, n].
        return scored.gather(3, due.candidates[:, None, None].expand(shape))

    def _scores(self, due: Due, number: int) -> Tensor:
        """float32 [B, L, K, S]: the queries that stage `number` asks, rotated, against every slot
        of its domains."""
        stage = self.settings.policy.scores[number]
        positions = due.query_positions[number]
        cache = self.cache
        # 1. The angles: beacons are rotated to the newest position, recents to their own.
        at = positions.clamp(min=0)
        rope_lengths = torch.maximum(due.prompt_lengths[:, None], at + 1)
        cos, sin = self.rope.cos_sin(at, rope_lengths)
        # 2. The queries of all heads that ask these KV heads, where some are another member's.
        buffer = self.queries.buffer[:, :, :, self.slots_asked(stage)]
        rows = due.rows
        if self.heads.copies > 1:
            buffer = self.heads.queries_of_mine(buffer[rows], dim=2)
            rows = torch.arange(len(rows), device=rows.device)
        # 3. Softmax over the domain, pooled over queries and heads.
        scored = self.kernels.scores(
            buffer, rows, positions, cos, sin, cache.keys, cache.positions,
            due.page_table, due.cached_lengths, due.domains[number], cache.keys.shape[-1] ** -0.5,
            due.longest, stage.group, stage.pool,
        )  # fmt: skip
        # 4. A mean over the layer's heads: every member has the mean over as many of them.
        if stage.group == "layer" and self.heads.group.size > 1:
            scored = self.heads.group.all_reduce(scored) / self.heads.group.size
        return scored

    def slots_asked(self, stage: Stage) -> slice:
        """The slots of the query buffer that a stage asks: the policy's beacons and recents in front,
        or the newest queries in the ring behind them."""
        observed = self.settings.policy.observed
        return slice(observed) if stage.latest is None else slice(observed, None)

    def rotations(self, request: Request, stage: Stage) -> list[int]:
        """Where the query of each of its `slots_asked` is rotated to; -1 where there is none, or an
        older one than the stage asks."""
        rotations = self.queries.rotations(request)[self.slots_asked(stage)]
        if stage.latest is None:
            return rotations
        oldest_asked = request.num_computed - stage.latest  # EMPTY is older than all
        return [at if at >= oldest_asked else EMPTY for at in rotations]

    def domain(self, request: Request, stage: Stage) -> tuple[int, int]:
        """Slots [start, end) that a stage's softmax runs over."""
        length = request.cached_length
        if stage.domain == "evictable":
            return request.protected, length - self.settings.window
        if stage.domain == "before-recents":
            return 0, length - self.settings.policy.recents_of(stage)
        return 0, length
