"""Processes that compute together, as torchrun starts them, and what each of them does in tests of groups.

Imports nothing slow beside torch: every process imports it again."""

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nanobeacon import LLM, SamplingParams
from nanobeacon.models.decoder import Decoder
from nanobeacon.models.packing import BlockedLinear, PackedLinear
from nanobeacon.parallel import Group, join

PATIENCE = 60.0


@dataclass
class Members:
    """Processes on their way."""

    processes: list[Any]
    queue: Any

    def results(self) -> list[Any]:
        """What each one's function has returned, in the order of rank; raises what one of them raised."""
        found = dict(self.queue.get(timeout=2 * PATIENCE) for _ in self.processes)
        for result in found.values():
            if isinstance(result, Exception):
                raise result
        return [found[rank] for rank in range(len(self.processes))]


@contextmanager
def members(size: int, function: Callable[..., Any], *arguments: Any) -> Iterator[Members]:
    """Start `size` processes that run function(group, *arguments), and end them with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_member, args=(rank, size, port, queue, function, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        yield Members(processes, queue)
    finally:
        for process in processes:
            process.kill()


def _member(rank: int, size: int, port: int, queue: Any, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        with join("cpu", PATIENCE) as group:
            result = function(group, *arguments)
    except Exception as error:
        result = error
    queue.put((rank, result))
    queue.close()
    queue.join_thread()


@dataclass(frozen=True)
class Job:
    """A model and what is asked of it; options as `LLM` has them, beside those that all jobs share."""

    folder: str
    options: dict[str, Any]
    prompts: list[list[int]]
    params: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[float]  # of these tokens
    kept: list[list]  # positions of each eviction, [L, K, S] as lists
    beacons: list[list]


@dataclass(frozen=True)
class Result:
    answers: list[Answer]
    weight_bytes: int  # of the matrices that this process holds
    page_bytes: int  # of one page of its cache
    parted: int  # matrices of which it has read a part


def answer(group: Group, jobs: list[Job]) -> list[Result]:
    """All jobs, one after the other."""
    return [_answer(group, job) for job in jobs]


def _answer(group: Group, job: Job) -> Result:
    llm = LLM(job.folder, device="cpu", trace=True, num_pages=64, group=group, **job.options)
    outputs = llm.generate(job.prompts, SamplingParams(logprobs=0, ignore_eos=True, **job.params))
    answers = []
    for output in outputs:
        assert output.error is None, output.error
        answers.append(
            Answer(
                output.token_ids,
                [own for own, _ in output.logprobs],
                [event.kept.tolist() for event in output.trace],
                [event.beacons.tolist() for event in output.trace],
            )
        )
    model = llm.engine.model
    if isinstance(model.head, PackedLinear | BlockedLinear):
        # Its matrices cannot be counted any more: those of the same part of the model, without content.
        model = Decoder(llm.model_config, model.dtype, torch.device("meta"), 16, model.held, group)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    weight_bytes = sum(matrix.numel() * matrix.element_size() for matrix in matrices)
    llm.engine.scheduler.check()
    return Result(answers, weight_bytes, llm.engine.page_bytes, len(model.parts()))
