"""What the measurements share: memory, intervals, columns, and objects that live in
processes of their own.

Knows nothing of models, engines or of what is measured.
"""

import json
import multiprocessing
import os
import signal
import statistics
import sys
import textwrap
import threading
import time
import traceback
import warnings
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch


def listed(kind: Callable[[str], Any], possible: Collection[str] = ()) -> Callable[[str], list]:
    """A type for argparse: values of a kind between commas, all of them possible where
    that is said."""

    def values(text: str) -> list:
        parts = text.split(",")
        if possible and not set(parts) <= set(possible):
            raise ArgumentTypeError(f"{text!r}: possible are {', '.join(possible)}")
        try:
            return list(dict.fromkeys(kind(part) for part in parts))  # named twice is measured once
        except ValueError:
            raise ArgumentTypeError(f"{text!r}: values between commas, as --help shows") from None

    return values


names = listed(str)
numbers = listed(int)
WIDTH = 100  # of what is printed, in columns
BUDGET_AXIS = "budget (output tokens kept of each request)"  # of charts


def filled(options: Namespace, defaults: dict[str, Any]) -> Namespace:
    """The options, with a default for what was not given."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    return Namespace(**vars(options) | defaults | given)


def refuse(options: Namespace, given: Sequence[str], where: str) -> None:
    """ValueError for an option that somebody gave where it would change nothing."""
    for name in given:
        value = getattr(options, name)
        if value is not None and value is not False:  # 0 was given
            raise ValueError(f"--{name.replace('_', '-')}: {where}")


def read_lines(path: Path, right: Callable[[dict], bool], wanted: str) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file. ValueError names the line that is not right, and
    what is wanted."""
    found = []
    where = str(path)  # of a mistake
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if line.strip():
                where = f"{path}, line {number}"
                entry = json.loads(line)
                json.dumps(entry, ensure_ascii=False).encode()  # no lone surrogates
                if type(entry) is not dict or not right(entry):
                    raise ValueError(f"{wanted} is needed")
                found.append(entry)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from error
    if not found:
        raise ValueError(f"{where}: it is empty; {wanted} is needed on each line")
    return found


def proc(path: str) -> dict[str, str]:
    """The `name: value` lines of a file below /proc, empty where there is none."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def proc_bytes(path: str, name: str) -> int:
    """A field that /proc gives in kB, in bytes; 0 where there is none."""
    return 1024 * int(proc(path).get(name, "0").split()[0])


def peak_memory(device: str) -> int:
    """Most bytes so far: allocated on the GPU, else resident in this process, mapped
    files included."""
    cuda = device.startswith("cuda")
    return torch.cuda.max_memory_allocated(device) if cuda else proc_bytes("/proc/self/status", "VmHWM")


def free_memory(device: str) -> int:
    """Bytes that can still be taken, on the GPU or of this machine's memory."""
    cuda = device.startswith("cuda")
    return torch.cuda.mem_get_info(device)[0] if cuda else proc_bytes("/proc/meminfo", "MemAvailable")


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median of some repeats, the least and the most of them."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def bootstrap(values: Sequence[float], seed: int = 0, rounds: int = 2000) -> dict[str, float]:
    """Mean of the values, one a prompt or problem, and its 95 % percentile interval under
    resampling them."""
    given = torch.tensor(values, dtype=torch.float64)
    draws = torch.randint(len(given), (rounds, len(given)), generator=torch.Generator().manual_seed(seed))
    low, high = given[draws].mean(1).quantile(given.new_tensor([0.025, 0.975])).tolist()
    return {"mean": given.mean().item(), "low": low, "high": high}


def show(value: dict[str, float], digits: str = ".1f") -> str:
    """A median or mean and what lies around it, if anything: 12.3 (11.0 to 13.1)."""
    middle, low, high = (f"{number:{digits}}" for number in value.values())
    return middle if low == high else f"{middle} ({low} to {high})"


def model_name(model: str) -> str:
    """What headings and charts call a model: the last part of its id or folder that says
    something."""
    parts = Path(model).parts
    if parts[-2:-1] == ("snapshots",):  # the hub's cache: models--org--name/snapshots/revision
        return parts[-3].rpartition("--")[2]
    if parts[-1].startswith("checkpoint"):  # of which run
        return "/".join(parts[-2:])
    return parts[-1]


def chart_note(result: dict[str, Any], sample: str) -> str:
    """What a chart was drawn from: the model, how much was measured, the day."""
    model = model_name(result["model"]) if result.get("model") else ""
    return ", ".join(filter(None, (model, sample, result.get("date", "")[:10])))


def columns(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table: the first column to the left, the others to the right; None is a dash.

    What is wider than WIDTH becomes several tables below each other. Each of them begins with
    the columns that tell the rows apart. A cell that is too wide for any table is broken into
    lines, to the left.
    """
    lines = [["-" if cell is None else str(cell) for cell in line] for line in (head, *rows)]
    keys = _telling_apart(lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = WIDTH - sum(width + 2 for width in widths[:keys])
    broken = [i for i, width in enumerate(widths) if i >= keys and width > room]
    for i in broken:
        widths[i] = room
    lines.insert(1, ["-" * width for width in widths])

    def drawn(part: Sequence[int]) -> str:
        found = []
        for line in lines:
            cells = [textwrap.wrap(line[i], room) if i in broken else [line[i]] for i in part]
            for pieces in zip_longest(*cells, fillvalue=""):
                aligned = [
                    piece.ljust(widths[i]) if i == 0 or i in broken else piece.rjust(widths[i])
                    for i, piece in zip(part, pieces, strict=True)
                ]
                found.append("  ".join(aligned).rstrip())
        return "\n".join(found)

    return "\n\n".join(drawn(part) for part in _parts(widths, keys))


def _telling_apart(lines: Sequence[Sequence[str]]) -> int:
    """How many of the first columns it takes to tell all lines apart; 1 where no number does."""
    for count in range(1, len(lines[0])):
        if len({tuple(line[:count]) for line in lines}) == len(lines):
            return count
    return 1


def _parts(widths: Sequence[int], keys: int) -> list[list[int]]:
    """The columns of each table, as numbers: the first `keys`, and as many others as fit."""
    parts = [list(range(keys))]
    for i in range(keys, len(widths)):
        width = sum(widths[j] + 2 for j in parts[-1]) + widths[i]
        if width > WIDTH and len(parts[-1]) > keys:
            parts.append(list(range(keys)))
        parts[-1].append(i)
    return parts


def fitted(text: str) -> str:
    """The text with its longer lines, which are sentences, broken at WIDTH; a word stays whole."""
    found = []
    for line in text.split("\n"):
        if len(line) <= WIDTH:
            found.append(line)
        else:
            found += textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(found)


class Worker:
    """make(*arguments) in a fresh process, whose memory is its own; `call` runs a method
    there and waits.

    ValueError there is ValueError here, anything else a RuntimeError that names it. Ends with its context.
    `deadline`, on the clock of time.monotonic, may be set before it is entered: an answer that has not come
    by then is a RuntimeError.
    """

    deadline: float | None = None

    def __init__(self, name: str, threads: int, make: Callable, *arguments: Any) -> None:
        # a fork would share what the parent has loaded
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, threads, make, arguments), daemon=True)
        # is inherited: Ctrl-C is for the parent alone,
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._process.start()  # which ends this process
        signal.signal(signal.SIGINT, before)
        there.close()

    def __enter__(self) -> "Worker":
        try:
            self._answer()  # it has been made
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, failure: type | None, *_: Any) -> None:
        self._pipe.close()
        if failure:
            self._process.terminate()
            self._process.join(10)
            self._process.kill()
        self._process.join()

    def call(self, method: str, *arguments: Any) -> Any:
        """What the object's method returns, there."""
        self._pipe.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        if self.deadline is not None and not self._pipe.poll(max(0.0, self.deadline - time.monotonic())):
            raise RuntimeError(f"{self.name}: its time was over")
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            self._process.join()
            kind, value = "killed", f"status {self._process.exitcode}; -9 is mostly want of memory"
        if kind == "ValueError":
            raise ValueError(value)
        if kind:
            raise RuntimeError(f"{self.name}: {kind}: {value}")
        return value


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _serve(pipe: Any, threads: int, function: Callable, arguments: tuple) -> None:
    """What a worker's process does until the other end is gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it cleans up
    warnings.simplefilter("ignore", FutureWarning)
    # a parent that is killed says nothing
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    subject = None
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
        except (EOFError, OSError):
            return
        function = getattr(subject, method)
