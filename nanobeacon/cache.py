"""What a request leaves on the device: `KVCache` (keys, values, positions in pages) and
`QueryBuffer`.

Storage only: which query goes to which row and slot is decided in `observation.py`. Knows nothing
of scheduling, of scores or of when an eviction is due.
"""

import torch
from torch import Tensor

from .config import ModelConfig
from .observation import Chunk, Columns, Observation, mechanism_for
from .policies import EvictionSettings
from .request import Request
from .scheduler import Plan


class KVCache:
    """Keys and values [L, K, pages, P, D], positions int32 [L, K, pages, P], and each row's page
    table. Memory is not cleared: nothing reads a slot that was not written."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        num_rows: int,
        max_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (config.num_layers, config.num_kv_heads, num_pages, page_size)
        self.keys = torch.empty(*shape, config.head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.positions = torch.empty(shape, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(num_rows, max_pages, dtype=torch.int32, device=device)
        self.page_size = page_size

    def store_positions(self, positions: Tensor, slots: Tensor) -> None:
        """Write the tokens' positions [T] into their slots [T] in every layer and KV head."""
        num_slots = self.positions.shape[2] * self.page_size
        by_head = self.positions.view(-1, num_slots)  # [L * K, slots]
        by_head[:, slots] = positions.int()

    def copy_pages(self, source: list[int], target: list[int]) -> None:
        """Copy whole pages, all layers and heads."""
        for tensor in (self.keys, self.values, self.positions):
            tensor[:, :, target] = tensor[:, :, source]


class QueryBuffer:
    """Past queries of running requests, before RoPE.

    buffer [rows, L, H, C, D] in the model's dtype, positions int32 [rows, L, H, C]; C is the
    settings' capacity. Row 0 is nobody's. What stands in which slot is the business of `mechanism`;
    None where the policy asks no queries.
    """

    def __init__(
        self,
        settings: EvictionSettings | None,
        config: ModelConfig,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # A full cache observes nothing: rows without slots.
        self.capacity = 0
        self.mechanism = None
        self.beacons = 0
        if settings is not None:
            self.capacity = settings.capacity
            self.mechanism = mechanism_for(settings)
            self.beacons = settings.policy.beacons
        shape = (num_rows, config.num_layers, config.num_heads, self.capacity)
        self.buffer = torch.empty(*shape, config.head_dim, dtype=dtype, device=device)
        self.positions = torch.full(shape, -1, dtype=torch.int32, device=device)

    @property
    def row_bytes(self) -> int:
        """Bytes of one request's queries."""
        return self.buffer[:1].numel() * self.buffer.element_size()

    def plan(self, plan: Plan) -> tuple[tuple[Chunk, ...], Columns]:
        """Where the queries of a batch go, from counts alone: for `Observation.of`."""
        if self.mechanism is None:
            return (), {}
        return self.mechanism.plan(plan)

    def store_positions(self, observation: Observation, positions: Tensor) -> None:
        """The positions of a batch's queries, all layers and heads; those of chunks follow
        their picks."""
        if observation.rows is not None:
            rows = observation.rows
            slots = observation.slots
            self.positions[rows, :, :, slots] = positions.int()[:, None, None]
        if observation.writes is not None:
            token, row, slot = observation.writes
            self.positions[row, :, :, slot] = positions[token].int()[:, None, None]

    def observe(
        self,
        layer: int,
        q: Tensor,
        positions: Tensor,
        observation: Observation,
        kernels,
    ) -> None:
        """Take a layer's queries q [T, H, D], before RoPE, positions int64 [T].

        Only what `store` does not take in its own launch: copies into a ring, and prompt chunks,
        which are reduced here together with what their row holds.
        """
        # 1. Copies.
        if observation.writes is not None:
            token, row, slot = observation.writes
            self.buffer[row, layer, :, slot] = q[token].to(self.buffer.dtype)
        # 2. Prompt chunks; kernels want the vectors of a head together, [H, T, D].
        if observation.chunks:
            new = q.transpose(0, 1).to(self.buffer.dtype).contiguous()
            kernels.reduce_chunks(
                self.buffer[:, layer], self.positions[:, layer], new, positions,
                observation.chunk_table, self.beacons, observation.longest,
            )  # fmt: skip

    def advance(self, plan: Plan, observation: Observation) -> None:
        """Count what a batch has left in the rows."""
        if self.mechanism is not None:
            self.mechanism.advance(plan, observation)

    def rotations(self, request: Request) -> list[int]:
        """The position that each slot's query is rotated to, -1 where a slot of the row
        is empty."""
        assert self.mechanism is not None, "this policy asks no queries"
        return self.mechanism.rotations(request)

    def copy_row(self, source: int, target: int) -> None:
        """Copy a row, all layers and heads."""
        for tensor in (self.buffer, self.positions):
            tensor[target] = tensor[source]
