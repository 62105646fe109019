"""What `bench.py host` measures: the host's own time in a decode step, whatever model and GPU
stand behind.

A stand-in takes the model's place: it answers at once, with noise, and notes the clock. From one
decode step's forward pass to the next lies all that a serving host does between two: planning,
building the batch, drawing, counting, ends. Sampling runs on the embedded reasoner's 48 tokens; what
draws among candidates, a GPU's work, is called as often as ever and computes one row instead of all.
Reductions and evictions come every few steps, and in medians they do not count.

The clock is that of this thread's own work: whoever else is busy on the machine counts little.
Knows the engine's model by two methods, `forward` and `logits`; nothing of kernels and devices.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nanobeacon import LLM, SamplingParams, sampling
from nanobeacon.batch import Batch
from nanobeacon.cache import KVCache, QueryBuffer
from nanobeacon.reasoner import folder

from .common import columns, numbers

SAMPLINGS = {"greedy": {}, "sampled": dict(temperature=0.6, top_p=0.95)}
PROMPT = 16  # tokens of the first prompt; each next one is longer, so that pages grow in turns


def add_arguments(p: ArgumentParser) -> None:
    """The options of `bench.py host`."""
    p.add_argument("--batches", type=numbers, default=[1, 14, 192, 320], help="default: 1,14,192,320")
    p.add_argument("--budget", type=int, default=1024, help="beside the full cache (default: %(default)s)")
    p.add_argument("--steps", type=int, default=100, help="timed in each row (default: %(default)s)")


def run(options: Namespace) -> dict[str, Any]:
    """One row for each batch, cache and way of sampling; the median of so many steps in each.

    ValueError names the option that is below 1."""
    # 1. What cannot be measured is said before anything is.
    _check("batches", min(options.batches))
    _check("steps", options.steps)
    # 2. The full cache and the budget beside each other, for each batch.
    rows = []
    for batch in options.batches:
        for budget in (None, options.budget):
            for way in SAMPLINGS:
                seconds = decode_seconds(batch, budget, options.steps, way)
                step_ms = 1000 * median(seconds)
                row = {
                    "batch": batch,
                    "budget": budget,
                    "sampling": way,
                    "n": len(seconds),
                    "step_ms": step_ms,
                    "request_us": 1000 * step_ms / batch,
                }
                rows.append(row)
    return {"rows": rows}


def _check(name: str, value: int) -> None:
    """Refuse an option's least value where it is below 1."""
    if value < 1:
        raise ValueError(f"{name}={value}: at least 1 is possible")


def decode_seconds(batch: int, budget: int | None, steps: int, way: str) -> list[float]:
    """The host's seconds for each of so many decode steps of `batch` requests.

    budget: of each request, None for the full cache. way: of sampling, a name in SAMPLINGS."""
    # 1. An engine without a model's time. The longest prompt and its output fit the context.
    longest = 2 * PROMPT + steps + 2
    llm = LLM(
        str(folder()),
        device="cpu",
        dtype="float32",
        seed=0,
        max_num_seqs=batch,
        max_model_len=longest,
        budget=budget,
    )
    stand_in = StandIn(llm, batch)
    # 2. Requests that all decode together for the last `steps` steps.
    prompts = [[5] * (PROMPT + i % PROMPT) for i in range(batch)]
    params = SamplingParams(max_tokens=steps + 2, ignore_eos=True, **SAMPLINGS[way])
    with _drawing_one_row():
        llm.generate(prompts, params)
    return stand_in.between(steps)


@contextmanager
def _drawing_one_row() -> Iterator[None]:
    """While this lasts, the rows that are drawn together all get what the first of them draws."""
    draw: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = sampling._draw_from_candidates

    def draw_one(logits: Tensor, columns: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        ids, certain = draw(logits[:1], columns[:1], blocks)
        return ids.expand(len(logits)), certain.expand(len(logits))

    sampling._draw_from_candidates = draw_one
    try:
        yield
    finally:
        sampling._draw_from_candidates = draw


class StandIn:
    """Takes a model's place in its engine: any forward pass is over at once, and the logits are
    always the same noise."""

    def __init__(self, llm: LLM, batch: int) -> None:
        """batch: how many requests decode at once, at most."""
        generator = torch.Generator().manual_seed(0)
        model = llm.engine.model
        self.batch = batch
        self.hidden = torch.zeros(batch, model.config.hidden_size)
        self.noise = torch.randn(batch, llm.engine.vocabulary, generator=generator)
        # of each forward pass: how many requests, whether they decode, and when
        self.calls: list[tuple[int, bool, float]] = []
        model.forward = self.forward
        model.logits = self.logits

    def forward(self, batch: Batch, cache: KVCache, queries: QueryBuffer) -> Tensor:
        """Hidden states [T, hidden] of zeros; when this was called is what is measured."""
        now = time.thread_time()
        requests = len(batch.cached_lengths)
        tokens = len(batch.token_ids)
        decodes = batch.max_query_length == 1
        self.calls.append((requests, decodes, now))
        if decodes:
            return self.hidden
        return self.hidden.new_zeros(tokens, self.hidden.shape[1])

    def logits(self, hidden: Tensor, vocabulary: int | None = None) -> Tensor:
        """The noise, float32 [T, V]."""
        return self.noise[: len(hidden)]

    def between(self, steps: int) -> list[float]:
        """Seconds from each of the last decode steps of the whole batch to the next one."""
        moments = []
        for requests, decodes, when in self.calls:
            if decodes and requests == self.batch:
                moments.append(when)
        seconds = [after - before for before, after in zip(moments, moments[1:], strict=False)]
        return seconds[-steps:]


def table(result: dict[str, Any]) -> str:
    """The rows for people."""
    head = ["batch", "budget", "sampling", "ms a step", "us a request"]
    return columns(head, [_line(row) for row in result["rows"]])


def _line(row: dict[str, Any]) -> Sequence[Any]:
    """One row's cells."""
    step_ms = f"{row['step_ms']:.3f}"
    request_us = f"{row['request_us']:.1f}"
    return [row["batch"], row["budget"], row["sampling"], step_ms, request_us]
