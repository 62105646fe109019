"""What a request leaves on the device: `KVCache` (keys, values, positions in pages) and `QueryBuffer`.

Knows slots, rows and counts; nothing of scheduling, of scores or of when an eviction is due. A buffer row's
slots are decided by counts on the host, never by what a tensor holds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ModelConfig
from .policies import EvictionSettings
from .request import Request
from .scheduler import Plan


class KVCache:
    """Keys and values [L, K, pages, P, D], positions int32 [L, K, pages, P], and each row's page table.

    Memory is not cleared: nothing reads a slot that was not written.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, num_rows: int, max_pages: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        shape = (config.num_layers, config.num_kv_heads, num_pages, page_size)
        head_dim = config.head_dim
        self.keys = torch.empty(*shape, head_dim, dtype=dtype, device=device)
        self.values = torch.empty(*shape, head_dim, dtype=dtype, device=device)
        self.positions = torch.empty(shape, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(num_rows, max_pages, dtype=torch.int32, device=device)
        self.page_size = page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of keys and values in one page, all layers and heads."""
        layers, num_kv_heads, _, page_size, head_dim = self.keys.shape
        return 2 * layers * num_kv_heads * page_size * head_dim * self.keys.element_size()

    def store_positions(self, positions: Tensor, slots: Tensor) -> None:
        """Write the tokens' positions [T] into their slots [T] in every layer and KV head."""
        self.positions.view(-1, self.positions.shape[2] * self.page_size)[:, slots] = positions.int()

    def write_page_table(self, request: Request) -> None:
        pages = torch.tensor(request.pages, dtype=torch.int32)
        self.page_table[request.row, : len(pages)] = pages.to(self.page_table.device)
        request.pages_changed = False

    def copy_pages(self, source: list[int], target: list[int]) -> None:
        """Copy whole pages, all layers and heads."""
        device = self.keys.device
        to, of = (torch.tensor(pages, dtype=torch.int64, device=device) for pages in (target, source))
        for tensor in (self.keys, self.values, self.positions):
            tensor[:, :, to] = tensor[:, :, of]


@dataclass(frozen=True)
class Chunk:
    """A prompt chunk of one request on its way into a buffer row that is reduced by fps."""

    row: int
    first: int  # its first token in the batch
    held: int  # queries in the row before
    candidates: int  # its first tokens are reduced together with those held …
    recents: int  # … the others come after the freeze and are appended


@dataclass(frozen=True)
class Observation:
    """What a batch leaves in the query buffer. Token, row and slot tensors are int64."""

    rows: Tensor | None = None  # [T] of a decode step: where each token's query goes, in store's launch
    slots: Tensor | None = None
    writes: tuple[Tensor, Tensor, Tensor] | None = None  # (token, row, slot): queries copied beside that
    chunks: tuple[Chunk, ...] = ()


class QueryBuffer:
    """Past queries of each running request, before RoPE: buffer [rows, L, H, C, D], their positions [rows, L,
    H, C].

    Row 0 is nobody's. A policy that reduces appends, and keeps `Request.buffer_count`; the others write the
    query of position p into slot beacons + p mod recents, and the beacons into the slots before.
    """

    def __init__(
        self, settings: EvictionSettings | None, config: ModelConfig, num_rows: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.settings = settings if settings is not None and settings.capacity else None
        self.capacity = settings.capacity if settings is not None else 0
        shape = (num_rows, config.num_layers, config.num_heads, self.capacity)
        head_dim = config.head_dim
        self.buffer = torch.empty(*shape, head_dim, dtype=dtype, device=device)
        self.positions = torch.full(shape, -1, dtype=torch.int32, device=device)

    @property
    def row_bytes(self) -> int:
        return self.buffer[:1].numel() * self.buffer.element_size()

    def plan(self, plan: Plan) -> Observation:
        """Where the queries of a batch go, from counts alone."""
        if self.settings is None:
            return Observation()
        device = self.buffer.device
        if self.settings.reduces and plan.prefill:
            return Observation(chunks=self._chunks(plan))
        if self.settings.reduces:
            rows, slots = [r.row for r in plan.requests], [r.buffer_count for r in plan.requests]
            return Observation(torch.tensor(rows, device=device), torch.tensor(slots, device=device))
        writes = self._writes(plan)
        return Observation(writes=tuple(torch.tensor(w, dtype=torch.int64, device=device) for w in writes))

    def _chunks(self, plan: Plan) -> tuple[Chunk, ...]:
        chunks, first = [], 0
        for request, length in zip(plan.requests, plan.lengths, strict=True):
            candidates = min(max(self.settings.freeze - request.evictable, 0), length)
            chunks.append(Chunk(request.row, first, request.buffer_count, candidates, length - candidates))
            first += length
        return tuple(chunks)

    def _writes(self, plan: Plan) -> tuple[list[int], list[int], list[int]]:
        """(token, row, slot) of every query that a ring, a reservoir or the first ones take from this batch.

        A decode step has the same number of writes for each request, those not needed going to row 0.
        """
        policy = self.settings.policy
        tokens, rows, slots, first = [], [], [], 0
        for request, length in zip(plan.requests, plan.lengths, strict=True):
            latest: dict[int, tuple[int, int]] = {}  # slot -> (token, row): the last writer wins
            for i in range(length):
                position, evictable = request.num_computed + i, request.evictable + i + 1
                if i >= length - policy.recents:
                    latest[policy.beacons + position % policy.recents] = (first + i, request.row)
                slot = self._beacon_slot(request, position, evictable)
                if slot is not None:
                    latest[slot] = (first + i, request.row)
                elif not plan.prefill and policy.beacons:
                    latest[-1] = (first + i, 0)
            tokens += [token for token, _ in latest.values()]
            rows += [row for _, row in latest.values()]
            slots += [max(slot, 0) for slot in latest]
            first += length
        return tokens, rows, slots

    def _beacon_slot(self, request: Request, position: int, evictable: int) -> int | None:
        """The beacon slot that this query takes: one of the first evictable ones, or by a seeded
        reservoir."""
        policy = self.settings.policy
        if policy.select == "first" and 1 <= evictable <= policy.beacons:
            return evictable - 1
        if policy.select == "reservoir":
            slot = position
            if position >= policy.beacons:
                slot = int(request.chance("reservoir", position) * (position + 1))
            return slot if slot < policy.beacons else None
        return None

    def store_positions(self, observation: Observation, positions: Tensor) -> None:
        """The positions of a batch's queries, all layers and heads; those of chunks follow their picks."""
        if observation.rows is not None:
            self.positions[observation.rows, :, :, observation.slots] = positions.int()[:, None, None]
        if observation.writes is not None:
            token, row, slot = observation.writes
            self.positions[row, :, :, slot] = positions[token].int()[:, None, None]

    def observe(self, layer: int, q: Tensor, positions: Tensor, observation: Observation, kernels) -> None:
        """Take a layer's queries q [T, H, D], before RoPE; a chunk is reduced with the row's queries here."""
        if observation.writes is not None:
            token, row, slot = observation.writes
            self.buffer[row, layer, :, slot] = q[token]
        for chunk in observation.chunks:
            self._take_chunk(layer, q, positions, chunk, kernels)

    def _take_chunk(self, layer: int, q: Tensor, positions: Tensor, chunk: Chunk, kernels) -> None:
        held, at = self.buffer[chunk.row, layer], self.positions[chunk.row, layer]
        middle = chunk.first + chunk.candidates
        if chunk.candidates:
            new, where = q[chunk.first : middle], positions[chunk.first : middle].int()
            pool = torch.cat((held[:, : chunk.held], new.transpose(0, 1)), dim=1)
            pool_at = torch.cat((at[:, : chunk.held], where.expand(len(at), -1)), dim=1)
            kept = min(self.settings.policy.beacons, pool.shape[1])
            counts = torch.full((len(pool),), pool.shape[1], dtype=torch.int32, device=q.device)
            picks = kernels.fps(pool, counts, kept)
            held[:, :kept] = pool.gather(1, picks[..., None].expand(-1, -1, pool.shape[-1]))
            at[:, :kept] = pool_at.gather(1, picks)
        if chunk.recents:
            count = self.count_after(chunk) - chunk.recents
            held[:, count : count + chunk.recents] = q[middle : middle + chunk.recents].transpose(0, 1)
            at[:, count : count + chunk.recents] = positions[middle : middle + chunk.recents].int()

    def count_after(self, chunk: Chunk) -> int:
        kept = min(self.settings.policy.beacons, chunk.held + chunk.candidates)
        return (kept if chunk.candidates else chunk.held) + chunk.recents

    def advance(self, plan: Plan, observation: Observation) -> None:
        """Count what a batch has left in the rows."""
        for request, chunk in zip(plan.requests, observation.chunks, strict=False):
            request.buffer_count = self.count_after(chunk)
        if observation.rows is not None:
            for request in plan.requests:
                request.buffer_count += 1

    def copy_row(self, source: Request, target: Request) -> None:
        if self.settings is not None:
            self.buffer[target.row] = self.buffer[source.row]
            self.positions[target.row] = self.positions[source.row]
            target.buffer_count = source.buffer_count
