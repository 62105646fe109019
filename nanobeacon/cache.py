"""What a request leaves on the device: `KVCache` (keys, values, positions in pages) and `QueryBuffer`.

Knows slots, rows and counts on the host; nothing of scheduling, of scores or of when an eviction is due."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ModelConfig
from .policies import EvictionSettings
from .request import Request
from .scheduler import Plan


class KVCache:
    """Keys and values [L, K, pages, P, D], positions int32 [L, K, pages, P], and each row's page table.
    Memory is not cleared: nothing reads a slot that was not written."""

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, num_rows: int, max_pages: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        shape = (config.num_layers, config.num_kv_heads, num_pages, page_size)
        self.keys = torch.empty(*shape, config.head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.positions = torch.empty(shape, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(num_rows, max_pages, dtype=torch.int32, device=device)
        self.page_size = page_size

    def store_positions(self, positions: Tensor, slots: Tensor) -> None:
        """Write the tokens' positions [T] into their slots [T] in every layer and KV head."""
        self.positions.view(-1, self.positions.shape[2] * self.page_size)[:, slots] = positions.int()

    def write_page_table(self, request: Request) -> None:
        self.page_table[request.row, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
        request.pages_changed = False

    def copy_pages(self, source: list[int], target: list[int]) -> None:
        """Copy whole pages, all layers and heads."""
        for tensor in (self.keys, self.values, self.positions):
            tensor[:, :, target] = tensor[:, :, source]


@dataclass(frozen=True)
class Chunk:
    """A prompt chunk of one request on its way into a buffer row that is reduced by fps."""

    row: int
    first: int  # its first token in the batch
    held: int  # queries in the row before
    candidates: int  # its first tokens are reduced together with those held, …
    kept: int  # … to so many; …
    recents: int  # … the others come after the freeze and are appended


@dataclass(frozen=True)
class Observation:
    """What a batch leaves in the query buffer. Token, row and slot tensors are int64."""

    rows: Tensor | None = None  # [T] of a decode step: where each token's query goes, in store's launch
    slots: Tensor | None = None
    writes: tuple[Tensor, Tensor, Tensor] | None = None  # (token, row, slot): queries copied beside that
    chunks: tuple[Chunk, ...] = ()


class QueryBuffer:
    """Past queries of running requests, before RoPE: buffer [rows, L, H, C, D], positions [rows, L, H, C].
    Row 0 is nobody's. A policy that reduces appends, and keeps `Request.buffer_count`; the others write the
    query of position p into slot beacons + p mod recents, and the beacons into the slots before."""

    def __init__(
        self, settings: EvictionSettings | None, config: ModelConfig, num_rows: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.capacity = settings.capacity if settings is not None else 0
        self.settings = settings if self.capacity else None
        shape = (num_rows, config.num_layers, config.num_heads, self.capacity)
        self.buffer = torch.empty(*shape, config.head_dim, dtype=dtype, device=device)
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
            pairs = list(zip(plan.requests, plan.lengths, strict=True))
            rows = [r.row for r, length in pairs for _ in range(length)]
            slots = [r.buffer_count + i for r, length in pairs for i in range(length)]
            return Observation(torch.tensor(rows, device=device), torch.tensor(slots, device=device))
        writes = torch.tensor(self._writes(plan), dtype=torch.int64, device=device)
        return Observation(writes=tuple(writes.view(-1, 3).T))

    def _chunks(self, plan: Plan) -> tuple[Chunk, ...]:
        chunks, first = [], 0
        for request, length in zip(plan.requests, plan.lengths, strict=True):
            held = request.buffer_count
            candidates = min(max(self.settings.freeze - request.evictable, 0), length)
            kept = min(self.settings.policy.beacons, held + candidates) if candidates else held
            chunks.append(Chunk(request.row, first, held, candidates, kept, length - candidates))
            first += length
        return tuple(chunks)

    def _writes(self, plan: Plan) -> list[tuple[int, int, int]]:
        """(token, row, slot) of every query that a ring, a reservoir or the first ones take from this batch.
        A decode step has the same number of writes for each request, those not needed going to row 0."""
        policy = self.settings.policy
        writes, token = [], 0
        for request, length in zip(plan.requests, plan.lengths, strict=True):
            latest: dict[int, tuple[int, int, int]] = {}  # by slot: the last writer wins
            for i in range(length):
                position = request.num_computed + i
                if i >= length - policy.recents:
                    slot = policy.beacons + position % policy.recents
                    latest[slot] = (token, request.row, slot)
                slot = self._beacon_slot(request, position, request.evictable + i)
                if 0 <= slot < policy.beacons:
                    latest[slot] = (token, request.row, slot)
                elif not plan.prefill and policy.beacons:
                    latest[-1] = (token, 0, 0)
                token += 1
            writes += latest.values()
        return writes

    def _beacon_slot(self, request: Request, position: int, evictable: int) -> int:
        """Where a query goes, if that is a beacon slot: the first evictable ones, or a seeded reservoir."""
        policy = self.settings.policy
        if policy.select == "reservoir" and position >= policy.beacons:
            return int(request.chance("reservoir", position) * (position + 1))
        return {"first": evictable, "reservoir": position}.get(policy.select, -1)

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
            self.buffer[row, layer, :, slot] = q[token].to(self.buffer.dtype)
        for chunk in observation.chunks:
            self._take_chunk(layer, q, positions, chunk, kernels)

    def _take_chunk(self, layer: int, q: Tensor, positions: Tensor, chunk: Chunk, kernels) -> None:
        held, at = self.buffer[chunk.row, layer], self.positions[chunk.row, layer]
        candidates, kept, end = chunk.candidates, chunk.kept, chunk.kept + chunk.recents
        tokens = slice(chunk.first, chunk.first + candidates + chunk.recents)
        new = q[tokens].transpose(0, 1).to(held.dtype)  # what the buffer would hold
        new_at = positions[tokens].int().expand(len(at), -1)
        if candidates:
            pool = torch.cat((held[:, : chunk.held], new[:, :candidates]), dim=1)
            pool_at = torch.cat((at[:, : chunk.held], new_at[:, :candidates]), dim=1)
            counts = torch.full((len(pool),), pool.shape[1], dtype=torch.int32, device=q.device)
            picks = kernels.fps(pool, counts, kept)
            held[:, :kept] = pool.gather(1, picks[..., None].expand(-1, -1, pool.shape[-1]))
            at[:, :kept] = pool_at.gather(1, picks)
        held[:, kept:end], at[:, kept:end] = new[:, candidates:], new_at[:, candidates:]

    def advance(self, plan: Plan, observation: Observation) -> None:
        """Count what a batch has left in the rows."""
        for request, chunk in zip(plan.requests, observation.chunks, strict=False):
            request.buffer_count = chunk.kept + chunk.recents
        if observation.rows is not None:
            for request, length in zip(plan.requests, plan.lengths, strict=True):
                request.buffer_count += length

    def copy_row(self, source: Request, target: Request) -> None:
        for tensor in (self.buffer, self.positions):
            tensor[target.row] = tensor[source.row]
        target.buffer_count = source.buffer_count
