"""CUDA graphs of the decode step, one per batch bucket: a step is then one launch instead of hundreds.

Knows how a batch is built, and that nobody's rows write to page 0 and buffer row 0; no prefill, no sampling
but the greedy token."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from .answers import Answers
from .batch import Batch, padding_request
from .cache import KVCache, QueryBuffer
from .kernels import reference
from .models.decoder import Decoder
from .request import Request
from .sampling import best_tokens
from .scheduler import Plan

log = logging.getLogger("nanobeacon")
Replay = Callable[[], Tensor]
ROOM = 24  # int64 numbers that a decode step has of each request, at most: 7 of the batch, 9 of copies of its
# queries and, half of them int32, 2 of a new page


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
    """Runs decode steps through recordings, from a step's numbers, which reach the inputs in one copy, to the
    greedy tokens. `record`: a `Recorder`, or a test's stand-in."""

    def __init__(
        self, model: Decoder, cache: KVCache, queries: QueryBuffer, max_num_seqs: int, max_cached_length: int,
        vocabulary: int, record: Callable[[Replay], Replay],
    ) -> None:  # fmt: skip
        self.model = model
        self.cache = cache
        self.queries = queries
        self.buckets = buckets(max_num_seqs)
        self.max_cached_length = max_cached_length
        self.record = record
        # Inputs and outputs of all recordings, which run one at a time: each uses the first rows.
        device = cache.keys.device
        self.numbers = torch.zeros(ROOM * (max_num_seqs + 1), dtype=torch.int64, device=device)
        self.logits = torch.zeros(max_num_seqs, vocabulary, device=device)
        self.best = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.nobody = padding_request(1, cache.page_size)
        self._recordings: dict[int, Replay] = {}

    @torch.inference_mode()
    def record_all(self, progress: bool = False) -> None:
        """Record every bucket, the largest first: the smaller ones find their memory in what it took.

        A bucket that cannot be recorded is left out, with one warning for all of these."""
        failures: dict[int, RuntimeError] = {}
        off = None if progress else True  # tqdm's None: off where stderr is no terminal
        for size in tqdm(self.buckets[::-1], desc="recording CUDA graphs", leave=False, disable=off):
            inputs = replace(self._batch([], size), max_cached_length=self.max_cached_length, runs=None)
            try:
                self._recordings[size] = self.record(partial(self._forward, inputs))
            except RuntimeError as error:
                failures[size] = error
        if failures:
            sizes = ", ".join(map(str, sorted(failures)))
            reason = next(iter(failures.values()))
            log.warning("no CUDA graph of decode steps with %s requests: %s", sizes, reason)

    def __call__(self, plan: Plan) -> Answers | None:
        """The answers to a decode step of one token each; None where no recording holds so many requests."""
        count = len(plan.requests)
        size = min((size for size in self._recordings if size >= count), default=None)
        if size is None:
            return None
        self._batch(plan.requests, size)
        self._recordings[size]()
        return Answers(self.logits[:count], self.best[:count])

    def _batch(self, requests: list[Request], size: int) -> Batch:
        """The requests, and nobody in the rows behind them: the same tensors for the same size."""
        padded = requests + [self.nobody] * (size - len(requests))
        plan = Plan(padded, [1] * size, prefill=False)
        return Batch.build(plan, self.cache, self.queries, onto=self.numbers)

    def _forward(self, inputs: Batch) -> Tensor:
        """What is recorded: model, head and greedy tokens, all into the outputs."""
        count = len(inputs.cached_lengths)
        hidden = self.model(inputs, self.cache, self.queries)
        logits = self.model.logits(hidden, self.logits.shape[1], onto=self.logits[:count])
        return self.best[:count].copy_(best_tokens(logits))
