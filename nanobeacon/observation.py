"""Where the queries of a batch go in a query buffer row: two mechanisms, decided from counts alone.

* `Reduction` (METHOD.md, "Query buffer"): queries are appended; farthest point sampling boils them
  down to the beacons whenever the row is full, at the freeze and after an eviction.
* `Ring`: the newest queries overwrite the oldest ones, slot by slot; in front of them stand beacons
  that no sampling finds: the first queries of the output, or a reservoir of random past ones.

A policy whose stages ask more of the newest queries has both, `SideBySide`. All answer the same
three questions: where do a batch's queries go (`plan`), what has the row held since (`advance`),
and to which position is each slot's query rotated when an eviction asks it (`rotations`). Knows
requests, rows and counts on the host; nothing of vectors, of caches or of when an eviction is due.
"""

from dataclasses import astuple, dataclass

from torch import Tensor

from .policies import EvictionSettings, Policy
from .request import Request
from .scheduler import Plan

Columns = dict[str, list[int]]  # a step's numbers by name, on the host
Write = tuple[int, int, int]  # (token, row, slot): a query of the batch is copied there
EMPTY = -1  # the rotation of a slot that holds no query


@dataclass(frozen=True)
class Chunk:
    """A prompt chunk of one request on its way into a buffer row that is reduced."""

    row: int
    first: int  # its first token in the batch
    held: int  # queries that the row held before
    candidates: int  # its first tokens are reduced together with those held, …
    kept: int  # … to so many queries; …
    recents: int  # … its other tokens come after the freeze and are appended


@dataclass(frozen=True)
class Observation:
    """What a batch leaves in the query buffer. Token, row and slot tensors are int64."""

    # [T] of a decode step: where each token's query goes, in store's launch
    # (None: `store` leaves queries beside the buffer, and `QueryBuffer.observe` takes what stays)
    rows: Tensor | None = None
    slots: Tensor | None = None
    # (token, row, slot): queries copied beside that
    writes: tuple[Tensor, Tensor, Tensor] | None = None
    chunks: tuple[Chunk, ...] = ()
    chunk_table: Tensor | None = None  # int32 [chunks, 6]: the numbers of `chunks`, on the device

    @staticmethod
    def of(chunks: tuple[Chunk, ...], sent: dict[str, Tensor]) -> "Observation":
        """What a mechanism has planned, once its columns are on the device."""
        writes = None
        if "write_tokens" in sent:
            writes = (sent["write_tokens"], sent["write_rows"], sent["write_slots"])
        table = None
        if chunks:
            table = sent["chunk_table"].view(len(chunks), -1)
        return Observation(
            rows=sent.get("query_rows"),
            slots=sent.get("query_slots"),
            writes=writes,
            chunks=chunks,
            chunk_table=table,
        )

    @property
    def longest(self) -> int:
        """The most queries that compete for one row, a chunk's and those held before."""
        return max(chunk.held + chunk.candidates for chunk in self.chunks)


class Reduction:
    """Append and reduce. `Request.buffer_count` says how many queries its row holds,
    beacons first."""

    def __init__(self, settings: EvictionSettings) -> None:
        self.settings = settings

    def plan(self, plan: Plan) -> tuple[tuple[Chunk, ...], Columns]:
        """A prompt chunk is reduced as a whole; a decode step's queries are appended one
        behind the other."""
        # 1. A prefill step: the numbers of all chunks, one behind the other.
        if plan.prefill:
            chunks = self._chunks(plan)
            table = [number for chunk in chunks for number in astuple(chunk)]
            return chunks, {"chunk_table": table}
        # 2. A decode step: a row and a slot for each token.
        if plan.one_each:
            rows = [request.row for request in plan.requests]
            slots = [request.buffer_count for request in plan.requests]
        else:
            rows = []
            slots = []
            for request, length in zip(plan.requests, plan.lengths, strict=True):
                rows += [request.row] * length
                slots += range(request.buffer_count, request.buffer_count + length)
        return (), {"query_rows": rows, "query_slots": slots}

    def _chunks(self, plan: Plan) -> tuple[Chunk, ...]:
        """Queries up to the freeze are candidates for beacons, those behind it are recents."""
        chunks = []
        first = 0
        for request, length in zip(plan.requests, plan.lengths, strict=True):
            held = request.buffer_count
            before_freeze = max(self.settings.freeze - request.evictable, 0)
            candidates = min(before_freeze, length)
            kept = held  # nothing new to choose from: the row stays as it is
            if candidates:
                kept = min(self.settings.policy.beacons, held + candidates)
            chunk = Chunk(
                row=request.row,
                first=first,
                held=held,
                candidates=candidates,
                kept=kept,
                recents=length - candidates,
            )
            chunks.append(chunk)
            first += length
        return tuple(chunks)

    def advance(self, plan: Plan, observation: Observation) -> None:
        """Count what a batch has left in the rows."""
        if plan.prefill:
            for request, chunk in zip(plan.requests, observation.chunks, strict=True):
                request.buffer_count = chunk.kept + chunk.recents
        else:
            for request, length in zip(plan.requests, plan.lengths, strict=True):
                request.buffer_count += length

    def rotations(self, request: Request) -> list[int]:
        """Beacons stand at the newest position, recents at their own: they see no key
        newer than that."""
        newest = request.num_computed - 1
        recents = self.settings.recents
        beacons = request.buffer_count - recents
        empty = self.settings.policy.observed - request.buffer_count
        own_positions = list(range(newest - recents + 1, newest + 1))
        return [newest] * beacons + own_positions + [EMPTY] * empty


class Ring:
    """Beacon slots first, then a ring: the query of position p lies in slot beacons + p
    mod recents."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def plan(self, plan: Plan) -> tuple[tuple[Chunk, ...], Columns]:
        """Every query that stays, as a copy (token, row, slot)."""
        writes: list[Write] = []
        first = 0
        for request, length in zip(plan.requests, plan.lengths, strict=True):
            writes += self._writes(request, first, length, decode=not plan.prefill)
            first += length
        columns = {
            "write_tokens": [token for token, _, _ in writes],
            "write_rows": [row for _, row, _ in writes],
            "write_slots": [slot for _, _, slot in writes],
        }
        return (), columns

    def _writes(self, request: Request, first: int, length: int, decode: bool) -> list[Write]:
        """The copies of one request's tokens, whose first is token `first` of the batch."""
        policy = self.policy
        # slot -> token: of several queries for one slot, the last one stays
        token_of: dict[int, int] = {}
        idle = []  # decode tokens that no beacon slot takes
        for i in range(length):
            position = request.num_computed + i
            # 1. Of a long chunk only the last `recents` queries survive in the ring.
            if i >= length - policy.recents:
                token_of[policy.beacons + position % policy.recents] = first + i
            # 2. The beacon slots, where this query is one of the first, or drawn by the reservoir.
            slot = self._beacon_slot(request, position, request.evictable + i)
            if 0 <= slot < policy.beacons:
                token_of[slot] = first + i
            elif policy.beacons:
                idle.append(first + i)
        writes: list[Write] = [(token, request.row, slot) for slot, token in token_of.items()]
        # 3. A captured decode step has the same number of copies each time: what no slot takes goes
        #    to row 0.
        if decode and idle:
            writes.append((idle[0], 0, 0))
        return writes

    def _beacon_slot(self, request: Request, position: int, evictable: int) -> int:
        """The beacon slot that a query would go to; one outside [0, beacons) is none."""
        policy = self.policy
        if policy.select == "first":
            return evictable
        if policy.select == "reservoir":
            if position < policy.beacons:
                return position
            return int(request.chance("reservoir", position) * (position + 1))
        return EMPTY

    def advance(self, plan: Plan, observation: Observation) -> None:
        """Nothing to count: positions alone say what a ring holds."""

    def rotations(self, request: Request) -> list[int]:
        """As in `Reduction`: beacons at the newest position, the ring's queries at their own."""
        policy = self.policy
        newest = request.num_computed - 1
        # 1. The beacon slots: as many as there have been queries for them.
        if policy.select == "first":
            offered = request.evictable
        elif policy.select == "reservoir":
            offered = newest + 1
        else:
            offered = 0
        beacons = min(offered, policy.beacons)
        at = [newest] * beacons + [EMPTY] * (policy.observed - beacons)
        # 2. The ring.
        oldest = max(0, newest + 1 - policy.recents)
        for position in range(oldest, newest + 1):
            at[policy.beacons + position % policy.recents] = position
        return at


class SideBySide:
    """Beacons and recents in front, as a policy without stages keeps them; behind them a ring of
    the newest queries, which other stages ask."""

    def __init__(self, settings: EvictionSettings) -> None:
        policy = settings.policy
        self.settings = settings
        self.front = Reduction(settings) if settings.reduces else Ring(policy)
        self.ring = Ring(Policy("latest", select="none", beacons=0, recents=policy.latest))

    def plan(self, plan: Plan) -> tuple[tuple[Chunk, ...], Columns]:
        """What the front does with a batch, and one more copy of each query that enters
        the ring."""
        chunks, front = self.front.plan(plan)
        _, ring = self.ring.plan(plan)
        # 1. The ring's copies: its slots lie behind those of the front.
        tokens = ring["write_tokens"]
        rows = ring["write_rows"]
        slots = [slot + self.settings.policy.observed for slot in ring["write_slots"]]
        # 2. What the front appends in the store's launch is a copy here too: a query goes to
        #    two places.
        if "query_rows" in front:
            tokens = [*tokens, *range(len(front["query_rows"]))]
            rows = rows + front["query_rows"]
            slots = slots + front["query_slots"]
        # 3. What the front copies by itself.
        if "write_tokens" in front:
            tokens = tokens + front["write_tokens"]
            rows = rows + front["write_rows"]
            slots = slots + front["write_slots"]
        columns = {"write_tokens": tokens, "write_rows": rows, "write_slots": slots}
        if chunks:
            columns["chunk_table"] = front["chunk_table"]
        return chunks, columns

    def advance(self, plan: Plan, observation: Observation) -> None:
        """The front counts; a ring has nothing to count."""
        self.front.advance(plan, observation)

    def rotations(self, request: Request) -> list[int]:
        """Of the front's slots, then of the ring's."""
        return self.front.rotations(request) + self.ring.rotations(request)


def mechanism_for(settings: EvictionSettings) -> Reduction | Ring | SideBySide | None:
    """What decides over a row of the query buffer; None where the policy asks no queries."""
    if not settings.capacity:
        return None
    if settings.policy.latest:
        return SideBySide(settings)
    return Reduction(settings) if settings.reduces else Ring(settings.policy)
