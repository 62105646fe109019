"""What the measurements share: memory, intervals, tables, and objects that live in processes of their own.

Knows nothing of models, engines or of what is measured.
"""

import multiprocessing
import signal
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def proc(path: str) -> dict[str, str]:
    """The `name: value` lines of a file below /proc, empty where there is none."""
    try:
        lines = (line.partition(":") for line in Path(path).read_text().splitlines())
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in lines}


def proc_bytes(path: str, name: str) -> int:
    """A field that /proc gives in kB, in bytes; 0 where there is none."""
    return 1024 * int(proc(path).get(name, "0").split()[0])


def peak_memory(device: str) -> int:
    """Most bytes so far: allocated on the GPU, else resident in this process, files mapped into it included."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    if peak := proc_bytes("/proc/self/status", "VmHWM"):
        return peak
    import resource  # in bytes on a Mac, in kB elsewhere

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory(device: str) -> None:
    """Let `peak_memory` start again from what is held now; without /proc it goes on from the process's start."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def free_memory(device: str) -> int:
    """Bytes that can still be taken, on the GPU or of this machine's memory."""
    cuda = device.startswith("cuda")
    return torch.cuda.mem_get_info(device)[0] if cuda else proc_bytes("/proc/meminfo", "MemAvailable")


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def bootstrap(values: Sequence[float], seed: int = 0, rounds: int = 2000) -> dict[str, float]:
    """Mean of the values, one a prompt or problem, and its 95 % percentile interval under resampling them."""
    given = torch.tensor(values, dtype=torch.float64)
    draws = torch.randint(len(given), (rounds, len(given)), generator=torch.Generator().manual_seed(seed))
    low, high = given[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"mean": given.mean().item(), "low": low, "high": high}


def show(numbers: dict[str, float], digits: str = ".1f") -> str:
    """A median or mean and what lies around it: 12.3 (11.0 to 13.1)."""
    middle = numbers["median"] if "median" in numbers else numbers["mean"]
    return f"{middle:{digits}} ({numbers['low']:{digits}} to {numbers['high']:{digits}})"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as needed, the first to the left, the others to the right; None is a dash."""
    lines = [["-" if cell is None else str(cell) for cell in line] for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    justify = [str.ljust, *[str.rjust] * (len(head) - 1)]
    return "\n".join("  ".join(j(c, w) for j, c, w in zip(justify, ln, widths, strict=True)) for ln in lines)


class WorkerError(RuntimeError):
    """What went wrong in a worker's process; `kind` names the exception there."""

    def __init__(self, worker: str, kind: str, message: str) -> None:
        super().__init__(f"{worker}: {kind}: {message}")
        self.kind = kind


class Worker:
    """make(*arguments) in a fresh process, whose memory is its own; `call` runs a method there and waits.

    ValueError there is ValueError here, anything else a WorkerError. The process ends with the context.
    """

    def __init__(self, name: str, threads: int, make: Callable, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share what the parent has loaded
        self.name, (self._pipe, there) = name, context.Pipe()
        self._process = context.Process(target=_serve, args=(there, threads, make, arguments), daemon=True)
        self._process.start()
        there.close()

    def __enter__(self) -> "Worker":
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        self._process.join()

    def call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            self._process.join()
            why = f"status {self._process.exitcode} (-9: killed, mostly for want of memory)"
            raise WorkerError(self.name, "its process ended", why) from None
        if kind == "ValueError":
            raise ValueError(value)
        if kind:
            raise WorkerError(self.name, kind, value)
        return value


def _serve(pipe: Any, threads: int, make: Callable, arguments: tuple) -> None:
    """What a worker's process does until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, and the parent ends this process
    torch.set_num_threads(threads)
    subject, function = None, make
    while True:
        try:
            kind, value = "", function(*arguments)
            if subject is None:
                subject, value = value, None
        except Exception as error:
            kind, value = type(error).__name__, " ".join(str(error).split())[:500]
            if kind != "ValueError":
                traceback.print_exc()
        try:
            pipe.send((kind, value))
            method, arguments = pipe.recv()
        except (EOFError, BrokenPipeError):
            return
        function = getattr(subject, method)
