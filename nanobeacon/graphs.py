"""CUDA graphs of the decode step, one per batch bucket: a step is then one launch instead of hundreds.

Knows a batch's tensors, and that padded rows write to page 0 and buffer row 0; no requests, no prefill."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from .batch import Batch, padding_request
from .cache import KVCache, QueryBuffer
from .kernels import reference
from .models.decoder import Decoder
from .scheduler import Plan

log = logging.getLogger("nanobeacon")
Replay = Callable[[], Tensor]


def buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: every size from 1 to the maximum fits one of them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 32), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


def can_record(model: Decoder) -> bool:
    """Whether the model's decode step fits a graph. The reference kernels do not: they read the device. A
    group does not: a recording that fails on one member alone would part it from the others."""
    on_gpu = model.device.type == "cuda" and model.kernels is not reference
    return on_gpu and model.group.size == 1


class Recorder:
    """Records work on one CUDA device, on a stream and in a memory pool of its own.

    Not on the stream that `torch.cuda.graph` takes by itself: the process has one of these, on whatever
    device came first, and on another device it would record nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()  # what one recording needs only meanwhile, the next reuses

    def __call__(self, forward: Replay) -> Replay:
        """What replays `forward`, and returns the same tensor each time.

        "thread_local": what other threads of the program do on the GPU does not spoil the recording."""
        before = torch.cuda.current_stream(self.device)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        )
        self.stream.wait_stream(before)
        try:
            # 1. Kernels are compiled and libraries set themselves up outside of the recording.
            with torch.cuda.stream(self.stream):
                forward()
            # 2. The same again, recorded.
            with recording:
                hidden = forward()
        finally:
            torch.cuda.set_stream(before)  # a recording that fails leaves its own stream behind
        before.wait_stream(self.stream)

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return replay


class DecodeGraphs:
    """Runs decode batches through recordings. `record`: a `Recorder`, or a test's stand-in."""

    def __init__(
        self, model: Callable[[Batch, KVCache, QueryBuffer], Tensor], cache: KVCache, queries: QueryBuffer,
        max_num_seqs: int, max_cached_length: int, record: Callable[[Replay], Replay],
    ) -> None:  # fmt: skip
        self.model = model
        self.cache = cache
        self.queries = queries
        self.buckets = buckets(max_num_seqs)
        self.max_cached_length = max_cached_length
        self.record = record
        self._recordings: dict[int, tuple[Batch, Replay]] = {}

    @torch.inference_mode()
    def record_all(self, progress: bool = False) -> None:
        """Record every bucket, the largest first: the smaller ones find their memory in what it took.

        A bucket that cannot be recorded is left out, with one warning for all of these."""
        failures: dict[int, RuntimeError] = {}
        off = None if progress else True  # tqdm's None: off where stderr is no terminal
        for size in tqdm(self.buckets[::-1], desc="recording CUDA graphs", leave=False, disable=off):
            static = self._static(size)
            forward = partial(self.model, static, self.cache, self.queries)
            try:
                self._recordings[size] = static, self.record(forward)
            except RuntimeError as error:
                failures[size] = error
        if failures:
            sizes = ", ".join(map(str, sorted(failures)))
            reason = next(iter(failures.values()))
            log.warning("no CUDA graph of decode steps with %s requests: %s", sizes, reason)

    def __call__(self, batch: Batch, cache: KVCache, queries: QueryBuffer) -> Tensor:
        """Hidden states [R, hidden] of a decode batch of R requests, valid until the next call."""
        assert cache is self.cache and queries is self.queries, "a recording holds the addresses of these"
        count = len(batch.cached_lengths)
        size = min((size for size in self._recordings if size >= count), default=None)
        if size is None:
            return self.model(batch, self.cache, self.queries)
        static, replay = self._recordings[size]
        for to, of in zip(_tensors(static), _tensors(batch), strict=True):
            columns = to[:, : of.shape[1]] if of.dim() == 2 else to  # right of its pages no request reads
            columns[: len(of)] = of
            if len(of) < size:
                # Rows past the batch: token 0 at position 0 in slot 0, one cached token, buffer row 0.
                to[len(of) :] = 1 if to is static.cached_lengths else 0
        return replay()[:count]

    def _static(self, size: int) -> Batch:
        """A batch of `size` padded rows whose tensors stay where they are."""
        plan = Plan([padding_request(1, self.cache.page_size)] * size, [1] * size, prefill=False)
        batch = Batch.build(plan, self.cache, self.queries)
        widest = self.cache.page_table.new_zeros(size, self.cache.page_table.shape[1])
        return replace(batch, page_table=widest, max_cached_length=self.max_cached_length, runs=None)


def _tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch that change from step to step."""
    seen = batch.observation
    tensors = [batch.token_ids, batch.positions, batch.rope_lengths, batch.slots, batch.cached_lengths]
    tensors += [batch.page_table, seen.rows, seen.slots, *(seen.writes or ())]
    return [tensor for tensor in tensors if tensor is not None]
