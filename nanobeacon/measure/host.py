"""What `bench.py host` measures: the host's own time in a decode step, whatever model and GPU stand behind.

A stand-in takes the model's place: it answers at once, with noise, and notes the clock. From one decode
step's forward pass to the next lies all that a serving host does between two: planning, building the batch,
drawing, counting, ends. Sampling runs, on the embedded reasoner's 48 tokens, with what a CPU computes for
it. Reductions and evictions come every few steps, and in medians they do not count.

The clock is that of this thread's own work: whoever else is busy on the machine counts little.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nanobeacon import LLM, SamplingParams
from nanobeacon.batch import Batch
from nanobeacon.cache import KVCache, QueryBuffer
from nanobeacon.reasoner import folder

from .common import columns, numbers

SAMPLINGS = {"greedy": {}, "sampled": dict(temperature=0.6, top_p=0.95)}
PROMPT = 16  # tokens of the first prompt; each next one is longer, so that pages grow in turns


def add_arguments(p: ArgumentParser) -> None:
    p.add_argument("--batches", type=numbers, default=[1, 14, 192, 320], help="default: 1,14,192,320")
    p.add_argument("--budget", type=int, default=1024, help="beside the full cache (default: %(default)s)")
    p.add_argument("--steps", type=int, default=100, help="timed in each row (default: %(default)s)")


def run(options: Namespace) -> dict[str, Any]:
    """One row for each batch, cache and way of sampling."""
    for name, values in (("batches", options.batches), ("steps", [options.steps])):
        if min(values) < 1:
            raise ValueError(f"{name}={min(values)}: at least 1 is possible")
    rows = []
    for batch in options.batches:
        for budget in (None, options.budget):
            for sampling in SAMPLINGS:
                seconds = decode_seconds(batch, budget, options.steps, sampling)
                step_ms = 1000 * median(seconds)
                row = {"batch": batch, "budget": budget, "sampling": sampling, "n": len(seconds)}
                rows.append(row | {"step_ms": step_ms, "request_us": 1000 * step_ms / batch})
    return {"rows": rows}


def decode_seconds(batch: int, budget: int | None, steps: int, sampling: str) -> list[float]:
    """The host's seconds for each of so many decode steps of `batch` requests."""
    llm = LLM(
        str(folder()),
        device="cpu",
        dtype="float32",
        seed=0,
        max_num_seqs=batch,
        max_model_len=PROMPT * 2 + steps + 2,
        budget=budget,
    )
    stand_in = StandIn(llm, batch)
    prompts = [[5] * (PROMPT + i % PROMPT) for i in range(batch)]
    params = SamplingParams(max_tokens=steps + 2, ignore_eos=True, **SAMPLINGS[sampling])
    llm.generate(prompts, params)
    return stand_in.between(steps)


class StandIn:
    """Takes a model's place in its engine: any forward pass is over at once, and the logits are always the
    same noise."""

    def __init__(self, llm: LLM, batch: int) -> None:
        generator = torch.Generator().manual_seed(0)
        model = llm.engine.model
        self.batch = batch
        self.hidden = torch.zeros(batch, model.config.hidden_size)
        self.noise = torch.randn(batch, llm.engine.vocabulary, generator=generator)
        self.calls: list[tuple[int, bool, float]] = []  # requests, whether they decode, when
        model.forward = self.forward
        model.logits = self.logits

    def forward(self, batch: Batch, cache: KVCache, queries: QueryBuffer) -> Tensor:
        decodes = batch.max_query_length == 1
        self.calls.append((len(batch.cached_lengths), decodes, time.thread_time()))
        return self.hidden if decodes else self.hidden.new_zeros(len(batch.token_ids), self.hidden.shape[1])

    def logits(self, hidden: Tensor, vocabulary: int | None = None) -> Tensor:
        return self.noise[: len(hidden)]

    def between(self, steps: int) -> list[float]:
        """Seconds from each of the last decode steps of the whole batch to the next one."""
        whole = [when for requests, decodes, when in self.calls if decodes and requests == self.batch]
        seconds = [after - before for before, after in zip(whole, whole[1:], strict=False)]
        return seconds[-steps:]


def table(result: dict[str, Any]) -> str:
    head = ["batch", "budget", "sampling", "ms a step", "us a request"]
    return columns(head, [_line(row) for row in result["rows"]])


def _line(row: dict[str, Any]) -> Sequence[Any]:
    numbers_shown = [f"{row['step_ms']:.3f}", f"{row['request_us']:.1f}"]
    return [row["batch"], row["budget"], row["sampling"], *numbers_shown]
