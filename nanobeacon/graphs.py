"""CUDA graphs of the decode step, one per batch bucket: a step is then one launch, not hundreds.

A graph repeats the same kernels on the same memory. So a batch is filled up with nobody's requests
to the next size that is recorded, and its numbers are copied to where the recording reads them.
Knows how a batch is built, and that nobody's rows write to page 0 and buffer row 0. Knows nothing
of prefill, nor of sampling but for the greedy token.
"""

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
# int64 numbers that a decode step has of each request, at most: 7 of the batch, 9 of copies of its
# queries and, half of them int32, 2 of a new page
ROOM = 24


def buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: every size from 1 to the maximum fits one of them.

    Close together where batches are small: there a row of nobody's is a large share of the step."""
    small = [1, 2, 4]
    medium = list(range(8, 64, 8))
    large = list(range(64, max_num_seqs, 32))
    sizes = small + medium + large + [max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


def can_record(model: Decoder) -> bool:
    """Whether the model's decode step fits a graph.

    That of the reference kernels does not: they read the device. That of a group does not: a
    recording that fails on one member alone would part it from the others."""
    on_gpu = model.device.type == "cuda" and model.kernels is not reference
    return on_gpu and model.group.size == 1


class Recorder:
    """Records work on one CUDA device, on a stream and in a memory pool of its own.

    Not on the stream that `torch.cuda.graph` takes by itself: the process has one of these, on
    whatever device came first, and on another device it would record nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        # one for all recordings: what one needs only meanwhile, the next reuses
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Replay) -> Replay:
        """What replays `forward`, and returns the same tensor each time.

        "thread_local": what other threads of the program do on the GPU does not spoil the recording."""
        before = torch.cuda.current_stream(self.device)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(
            graph,
            pool=self.pool,
            stream=self.stream,
            capture_error_mode="thread_local",
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
    """Runs decode steps through recordings: from a step's numbers, which reach the inputs in one copy,
    to the greedy tokens."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        queries: QueryBuffer,
        max_num_seqs: int,
        max_cached_length: int,
        vocabulary: int,
        record: Callable[[Replay], Replay],
        newest: Tensor | None = None,
    ) -> None:
        """max_cached_length: tokens, for which attention is launched whatever a batch has.
        vocabulary: logits in a row. record: a `Recorder`, or a test's stand-in. newest: the token
        sampled last for each row, int64 [rows]; None where the host knows all tokens."""
        self.model = model
        self.cache = cache
        self.queries = queries
        self.buckets = buckets(max_num_seqs)
        self.max_cached_length = max_cached_length
        self.record = record
        self.newest = newest
        # Inputs and outputs of all recordings, which run one at a time: each uses the first rows.
        device = cache.keys.device
        self.numbers = torch.zeros(ROOM * (max_num_seqs + 1), dtype=torch.int64, device=device)
        self.logits = torch.zeros(max_num_seqs, vocabulary, device=device)
        self.best = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.nobody = padding_request(1, cache.page_size)
        self._recordings: dict[int, Replay] = {}

    @torch.inference_mode()
    def record_all(self, progress: bool = False) -> None:
        """Record every bucket, the largest first: smaller ones find their memory in what it took.

        A bucket that cannot be recorded is left out, with one warning for all of these."""
        failures: dict[int, RuntimeError] = {}
        off = None if progress else True  # tqdm's None: off where stderr is no terminal
        largest_first = self.buckets[::-1]
        for size in tqdm(largest_first, desc="recording CUDA graphs", leave=False, disable=off):
            # 1. Inputs of nobody's requests, that launch for as much as a real one can have cached.
            nobodys = self._batch([], size)
            inputs = replace(nobodys, max_cached_length=self.max_cached_length, runs=None)
            # 2. The recording of what is done with them.
            try:
                self._recordings[size] = self.record(partial(self._forward, inputs))
            except RuntimeError as error:
                failures[size] = error
        if failures:
            sizes = ", ".join(map(str, sorted(failures)))
            reason = next(iter(failures.values()))
            log.warning("no CUDA graph of decode steps with %s requests: %s", sizes, reason)

    def __call__(self, plan: Plan) -> Answers | None:
        """The answers to a decode step of one token each; None where no recording holds so many
        requests."""
        # 1. The smallest recording that has a row for everybody.
        count = len(plan.requests)
        enough = [size for size in self._recordings if size >= count]
        if not enough:
            return None
        size = min(enough)
        # 2. The step's numbers to where it reads them, and the replay.
        batch = self._batch(plan.requests, size)
        self._recordings[size]()
        # 3. What the rows of nobody's say is left out.
        return Answers(self.logits[:count], self.best[:count], batch.rows[:count])

    def _batch(self, requests: list[Request], size: int) -> Batch:
        """The requests, and nobody in the rows behind them: the same tensors for the same size."""
        empty_rows = size - len(requests)
        padded = requests + [self.nobody] * empty_rows
        plan = Plan(padded, [1] * size, prefill=False)
        return Batch.build(plan, self.cache, self.queries, onto=self.numbers)

    def _forward(self, inputs: Batch) -> Tensor:
        """What is recorded: model, head and greedy tokens, all into the outputs."""
        count = len(inputs.cached_lengths)
        if self.newest is not None:
            inputs = inputs.with_unread(self.newest)
        hidden = self.model(inputs, self.cache, self.queries)
        logits = self.model.logits(hidden, self.logits.shape[1], onto=self.logits[:count])
        return self.best[:count].copy_(best_tokens(logits))
