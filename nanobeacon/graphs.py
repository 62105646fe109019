"""CUDA graphs of the decode step, one per batch bucket: a step is then one launch instead of hundreds.

Knows a batch's tensors, and that padded rows write to page 0 and buffer row 0; no requests, no prefill."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .batch import Batch
from .cache import KVCache, QueryBuffer
from .observation import Observation

log = logging.getLogger("nanobeacon")
Replay = Callable[[], Tensor]


def buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: every size from 1 to the maximum fits one of them."""
    sizes = [1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


def capture(forward: Replay) -> Replay:
    """Record `forward` on the current CUDA device; the result replays it and returns the same tensor."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()  # compiles kernels and lets libraries set themselves up, outside of the recording
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = forward()

    def replay() -> Tensor:
        graph.replay()
        return hidden

    return replay


class DecodeGraphs:
    """Runs decode batches through recordings made on first use. `record`: `capture`, or a test's stand-in."""

    def __init__(
        self, model: Callable[[Batch, KVCache, QueryBuffer], Tensor], cache: KVCache, queries: QueryBuffer,
        max_num_seqs: int, max_cached_length: int, record: Callable[[Replay], Replay] = capture,
    ) -> None:  # fmt: skip
        self.model, self.cache, self.queries = model, cache, queries
        self.buckets, self.max_cached_length, self.record = buckets(max_num_seqs), max_cached_length, record
        self._recordings: dict[int, tuple[Batch, Replay]] = {}
        self._impossible = False

    def __call__(self, batch: Batch, cache: KVCache, queries: QueryBuffer) -> Tensor:
        """Hidden states [R, hidden] of a decode batch of R requests, valid until the next call."""
        assert cache is self.cache and queries is self.queries, "a recording holds the addresses of these"
        count = len(batch.cached_lengths)
        size = next(bucket for bucket in self.buckets if bucket >= count)
        if size not in self._recordings and not self._impossible:
            try:
                static = self._static(batch, size)
                replay = self.record(lambda: self.model(static, self.cache, self.queries))
                self._recordings[size] = static, replay
            except RuntimeError as error:
                self._impossible = True
                log.warning("CUDA graphs are not possible here, decoding without them: %s", error)
        if size not in self._recordings:
            return self.model(batch, self.cache, self.queries)
        static, replay = self._recordings[size]
        for to, of in zip(_tensors(static), _tensors(batch), strict=True):
            columns = to[:, : of.shape[1]] if of.dim() == 2 else to  # right of its pages no request reads
            columns[: len(of)] = of
            # Rows past the batch: token 0 at position 0 in slot 0, one cached token, buffer row 0.
            to[len(of) :] = 1 if to is static.cached_lengths else 0
        return replay()[:count]

    def _static(self, batch: Batch, size: int) -> Batch:
        """A batch of `size` padded rows whose tensors stay where they are."""

        def padded(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return tensor.new_zeros(len(tensor) // len(batch.cached_lengths) * size)

        seen, table = batch.observation, self.cache.page_table
        writes = seen.writes and tuple(padded(w) for w in seen.writes)
        return replace(
            batch, token_ids=padded(batch.token_ids), positions=padded(batch.positions),
            rope_lengths=padded(batch.rope_lengths), slots=padded(batch.slots),
            cached_lengths=padded(batch.cached_lengths) + 1,
            cu_seqlens=torch.arange(size + 1, dtype=torch.int32, device=table.device),
            page_table=table.new_zeros(size, table.shape[1]), max_cached_length=self.max_cached_length,
            runs=None, observation=Observation(padded(seen.rows), padded(seen.slots), writes),
        )  # fmt: skip


def _tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch that change from step to step."""
    seen = batch.observation
    tensors = [batch.token_ids, batch.positions, batch.rope_lengths, batch.slots, batch.cached_lengths]
    tensors += [batch.page_table, seen.rows, seen.slots, *(seen.writes or ())]
    return [tensor for tensor in tensors if tensor is not None]
