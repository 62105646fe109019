"""What `bench.py gpu` measures: all that only a GPU can show, in one go of at most `--minutes`.

The parts, in order: the outcome of the tests marked `gpu`; the rate of a plain copy; the kernels'
times; a profile of decode steps; steps with and without CUDA graphs; the largest batch that fits;
the rows of the paper's Table 4, in what time is left. Each runs in processes of its own, so that
one that fails, hangs or runs out of memory takes no other along. Small enough (`--scale`, a small
model) all of it runs on a CPU too.

Table 4's rows would take hours as the paper ran them. Here each is measured where its steps cost
the mean: under a budget over two whole periods after the budget is reached, evictions included,
with the full cache behind half of the tokens that are generated there.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

import nanobeacon
from nanobeacon.config import ModelConfig, read_config
from nanobeacon.policies import settle
from nanobeacon.scheduler import MOST_PREFILL_TOKENS

from . import GENERATED, TABLE_4, kernels
from .common import Worker, columns, listed
from .systems import Nanobeacon, System, changed, start
from .throughput import largest

PRESET = "qwen3-4b"  # the model of Table 4
PROFILED = 20  # decode steps under the profiler
TIMED = 64  # decode steps of which the median is taken
# Table 4's small and large batch
PROFILES = ((14, 2048), (192, 2048))  # (batch, budget) of the profile
GRAPHS = (14, 2048)  # … and of the steps with and without graphs
# (name of a way to run steps, whether it does without graphs, whether it overlaps)
WAYS = (("eager", True, False), ("graphs", False, False), ("overlap", False, True))
LARGEST = (2048, 1024)  # budgets whose largest batch is searched
TESTS = Path(nanobeacon.__file__).parents[1] / "tests"
# What a device did, by the categories of a profiler's trace; a CPU's operators stand for kernels
KERNELS = {"cuda": ("kernel",), "cpu": ("cpu_op",)}
COPIES = ("gpu_memcpy", "gpu_memset")


class NotHere(Exception):
    """A part cannot run on this machine; the message says why, in a word."""


class Late(Exception):
    """A part began after its time."""


# ------------------------------------------------------------------------------------------ running


def add_arguments(p: ArgumentParser) -> None:
    """The options of `bench.py gpu`; those that a user cannot set are what a system's
    worker asks for."""
    p.set_defaults(
        prompt_length=64,
        output_length=None,
        repeats=1,
        shared_prefix=0,
        no_cuda_graphs=False,
        no_overlap=False,
        load="dummy",
    )
    p.add_argument("--minutes", type=float, default=12, help="that it may take (default: 12)")
    p.add_argument(
        "--parts",
        type=listed(str, PARTS),
        default=list(PARTS),
        metavar="A,B",
        help=f"of {', '.join(PARTS)} (default: all)",
    )
    p.add_argument(
        "--scale",
        type=int,
        default=1,
        help="divides batches, budgets and lengths (default: 1)",
    )
    p.add_argument(
        "--memory",
        type=float,
        metavar="GB",
        help="of the largest batch (default: 80 %% of what is free)",
    )


def run(options: Namespace) -> dict[str, Any]:
    """What each part found, by its name; in "parts" how each ended.

    ValueError for what cannot be measured at all. What fails later fails its own part."""
    _check(options)
    began = time.monotonic()
    end = began + 60 * options.minutes
    found: dict[str, Any] = {"scale": options.scale, "parts": []}
    for name in tqdm(options.parts, "gpu", leave=False, disable=None):
        part = PARTS[name]
        part_began = time.monotonic()
        # 1. A part's time: its share of the whole, and never past the end.
        until = min(end, part_began + part.share * (end - began))
        # 2. What it finds is kept under its name; the next one goes on, however it ends.
        outcome = "done"
        try:
            if part_began >= end:
                raise Late(f"{options.minutes} minutes were over")
            found[name] = part.measure(options, found, until)
        except NotHere as reason:
            outcome = f"not here: {reason}"
        except Exception as error:
            outcome = f"failed: {_told(error)}"
            found.setdefault("first_error", f"{name}: {_told(error)}")
        seconds = round(time.monotonic() - part_began, 1)
        found["parts"].append({"part": name, "seconds": seconds, "outcome": outcome})
    return found


def _check(options: Namespace) -> None:
    """ValueError names the option that makes all parts impossible, and what is possible."""
    if not 0 < options.minutes < float("inf"):
        raise ValueError(f"--minutes {options.minutes}: a number above 0 is possible")
    if options.scale < 1:
        raise ValueError(f"--scale {options.scale}: at least 1 is possible")
    if options.memory is not None and not 0 < options.memory < float("inf"):
        raise ValueError(f"--memory {options.memory}: a number of GB above 0 is possible")
    if options.device == "cpu" and options.scale == 1:
        possible = "a CPU can run a small --model with --scale 16"
        raise ValueError(f"--device cpu: these sizes need a GPU; {possible}")
    for policy, budget, _, _ in TABLE_4:
        scaled = None if budget is None else budget // options.scale
        try:
            settle(policy, scaled)
        except ValueError as error:
            raise ValueError(f"--scale {options.scale} is too large: {error}") from None


def _told(error: Exception) -> str:
    """An error in one line, for tables."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]}"


def _scaled(job: Namespace, number: int) -> int:
    """A batch or a length, divided by --scale."""
    return max(1, number // job.scale)


def _worker(until: float, worker: Worker) -> Worker:
    """The worker, which is given up when its time is over: `until`, of `time.monotonic`."""
    worker.deadline = until
    return worker


class Call:
    """A function and its arguments: what a worker's process holds where else a system stands."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments

    def result(self) -> Any:
        """What the function returns, each time anew."""
        return self.function(*self.arguments)


def _apart(name: str, job: Namespace, until: float, function: Callable, *arguments: Any) -> Any:
    """What a function returns in a process of its own, which takes its memory along when it ends.

    name: for messages. Raises what the function raises, and gives up at `until`."""
    with _worker(until, Worker(name, job.threads, Call, function, *arguments)) as worker:
        return worker.call("result")


# -------------------------------------------------------------------------------------------- tests


def tests(job: Namespace, found: dict[str, Any], until: float) -> dict[str, Any]:
    """The outcome of `pytest -m gpu`, as far as it came: `outcomes`, and whether it ended
    in time."""
    # 1. Only the files that have such tests: collecting the others takes time.
    paths = sorted(TESTS.glob("test_*.py"))
    files = [path.name for path in paths if "mark.gpu" in path.read_text()]
    if not files:
        raise NotHere("no tests")
    # 2. The tests, in a process. -v twice: pyproject.toml has taken one away.
    command = [sys.executable, "-m", "pytest", "-m", "gpu"]
    command += ["-vv", "--tb=line", "-p", "no:cacheprovider"]
    command += files
    in_time = True
    try:
        ended = subprocess.run(
            command,
            cwd=TESTS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(1, until - time.monotonic()),
        )
        output = ended.stdout
    except subprocess.TimeoutExpired as late:
        in_time = False
        output = late.stdout or b""
    # 3. What it wrote tells, even where its time was over.
    told = outcomes(output.decode(errors="replace"))
    told["in_time"] = in_time
    return told


def outcomes(output: str) -> dict[str, Any]:
    """Numbers of tests by outcome, and those that went wrong and why, of what `pytest -v` wrote."""
    one_test = r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b"
    lines = re.findall(one_test, output, re.MULTILINE)
    if not lines:
        raise RuntimeError(f"pytest ran no test: {output[-300:]}")
    counts: dict[str, int] = defaultdict(int)
    for _, outcome in lines:
        counts[outcome.lower()] += 1
    wrong = [name for name, outcome in lines if outcome in ("FAILED", "ERROR")]
    reasons = re.findall(r"^(?:E |/).*(?:Error|Exception).*$", output, re.MULTILINE)
    first_reasons = [line[:200] for line in reasons[:20]]
    return {"counts": dict(counts), "wrong": wrong, "reasons": first_reasons}


# ------------------------------------------------------------------------------------------ kernels


def bandwidth(job: Namespace, found: dict[str, Any], until: float) -> dict[str, float]:
    """Bytes that a plain copy reads and writes in a second."""
    return {"bytes_per_second": _apart("bandwidth", job, until, kernels.copy_rate, job.device)}


def kernel_times(job: Namespace, found: dict[str, Any], until: float) -> list[dict[str, Any]]:
    """Each kernel's time against the copy's rate; on a CPU the reference, small."""
    return _apart("kernels", job, until, kernels.timings, job.device)


# ------------------------------------------------------------------------------------------ profile


class Profiled(Nanobeacon):
    """The engine with its decode steps under a profiler."""

    def profile(self, steps: int) -> list[dict[str, Any]]:
        """The trace of so many steps: events with `cat`, `name`, `ts` and `dur`
        (microseconds), `tid`."""
        # 1. The steps. A GPU must be done before the profiler stops.
        activity = torch.profiler.ProfilerActivity
        cuda = self.job.device.startswith("cuda")
        watched = activity.CUDA if cuda else activity.CPU
        with torch.profiler.profile(activities=[watched]) as profiler:
            self.advance(steps)
            if cuda:
                torch.cuda.synchronize()
        # 2. Its trace, which it gives away as a file only, and of that what a device did.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        wanted = KERNELS["cuda" if cuda else "cpu"] + COPIES
        return [event for event in trace["traceEvents"] if event.get("cat") in wanted]


def profile(job: Namespace, found: dict[str, Any], until: float) -> list[dict[str, Any]]:
    """Launches, copies and gaps of decode steps, one row for each of PROFILES; on a CPU
    operators."""
    rows = []
    for batch, budget in PROFILES:
        # The step's own time is taken before: a profiler slows steps down.
        system, at_work = _middle_of_a_period(job, batch, budget, steps=PROFILED + TIMED)
        worker = Worker(f"profile {at_work.batch}", job.threads, Profiled, system, at_work)
        with _worker(until, worker):
            step_ms = _median_step_ms(worker, at_work, TIMED)
            events = worker.call("profile", PROFILED)
        row = {
            "batch": at_work.batch,
            "budget": system.budget,
            "steps": PROFILED,
            "step_ms": step_ms,
        }
        row.update(summary(events, PROFILED))
        rows.append(row)
    return rows


def summary(events: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """A step's launches and copies, the time something ran and the time nothing did, and what
    took most.

    events: as `Profiled.profile` gives them, of so many steps. Of operators that call others only
    the outermost counts."""
    # 1. What ran, one after the other; `until` is when the last one on any stream was over.
    copies = 0
    launches = 0
    busy = 0.0
    gaps: list[float] = []
    spent: dict[str, list[float]] = defaultdict(list)
    until: float | None = None
    for event in sorted(events, key=lambda event: event["ts"]):
        begin = event["ts"]
        end = begin + event["dur"]
        inner = event["cat"] == "cpu_op" and until is not None and end <= until
        if inner:
            continue
        if event["cat"] in COPIES:
            copies += 1
        else:
            launches += 1
            spent[event["name"]].append(event["dur"])
        # 2. Work on two streams at once counts once.
        if until is None:
            until = begin
        if begin > until:
            gaps.append(begin - until)
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    # 3. The names that took most.
    total = sum(sum(durations) for durations in spent.values())
    most = sorted(spent.items(), key=lambda item: -sum(item[1]))[:10]
    named = [
        {
            "name": name[:60],
            "a_step": round(len(durations) / steps, 2),
            "us_a_step": round(sum(durations) / steps, 1),
            "share": round(sum(durations) / total, 3),
        }
        for name, durations in most
    ]
    return {
        "launches_a_step": round(launches / steps, 1),
        "copies_a_step": round(copies / steps, 1),
        "busy_ms_a_step": round(busy / steps / 1e3, 3),
        "gap_ms_a_step": round(sum(gaps) / steps / 1e3, 3),
        "largest_gap_us": round(max(gaps, default=0.0), 1),
        "most": named,
    }


def _middle_of_a_period(
    job: Namespace,
    batch: int,
    budget: int,
    steps: int,
) -> tuple[System, Namespace]:
    """Requests whose caches are as long as they are in the mean under the budget: their prompt is.

    The output lasts for the prefill and for `steps` decode steps."""
    system = System(policy="beacon", budget=_scaled(job, budget))
    period = system.budget // kernels.PERIODS
    batch = _scaled(job, batch)
    prompt = system.budget - period // 2
    length = prefill_steps(batch, prompt) + steps + 1
    return system, changed(job, batch=batch, prompt_length=prompt, output_length=length)


def prefill_steps(batch: int, prompt: int) -> int:
    """Steps until all prompts are read, the decode steps between them included."""
    return 2 * -(-batch * prompt // MOST_PREFILL_TOKENS)


def _median_step_ms(worker: Worker, job: Namespace, steps: int) -> float:
    """Of so many decode steps of the whole batch, after its prefill."""
    worker.call("begin", 0)
    worker.call("advance", prefill_steps(job.batch, job.prompt_length))
    advanced = worker.call("advance", steps)
    taken = [seconds for _, seconds, tokens in advanced if tokens == job.batch]
    return round(1000 * median(taken), 3)


def graphs(job: Namespace, found: dict[str, Any], until: float) -> list[dict[str, Any]]:
    """Decode steps without CUDA graphs and overlap, with graphs, and with both, on the same requests:
    what each saves."""
    if job.device == "cpu":
        raise NotHere("cpu")
    rows = []
    for name, eager, overlaps in WAYS:
        system, at_work = _middle_of_a_period(job, *GRAPHS, steps=TIMED)
        at_work.no_cuda_graphs = eager
        at_work.no_overlap = not overlaps
        with _worker(until, start(system, at_work)) as worker:
            step_ms = _median_step_ms(worker, at_work, TIMED)
        row = {
            "steps": name,
            "batch": at_work.batch,
            "budget": system.budget,
            "step_ms": step_ms,
        }
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------ largest batch


def largest_batches(job: Namespace, found: dict[str, Any], until: float) -> list[dict[str, Any]]:
    """The largest batch that fits under each of LARGEST: every request admitted, with all
    its pages."""
    rows = []
    for budget in LARGEST:
        system = System(policy="beacon", budget=_scaled(job, budget))
        # Longer than the budget, so that a request reserves all the pages that it can ever hold.
        longer = changed(job, output_length=2 * system.budget)
        rows.append(largest(system, longer, partial(_admitted, system, longer, until)))
    return rows


def _admitted(system: System, job: Namespace, until: float, batch: int) -> dict[str, Any]:
    """What a batch takes and how fast it is; RuntimeError where not all of its requests decode."""
    with _worker(until, start(system, changed(job, batch=batch))) as worker:
        worker.call("begin", 0)
        steps = worker.call("advance", prefill_steps(batch, job.prompt_length) + 8)
        report = worker.call("report")
    _, seconds, tokens = steps[-1]
    if tokens != batch:
        raise RuntimeError(f"{tokens} of {batch} requests decode")
    return {
        "budget": system.budget,
        "batch": batch,
        "tokens_per_second": round(batch / seconds, 1),
        "memory_bytes": report["memory_bytes"],
        "kv_bytes": report["kv_bytes"],
    }


# ------------------------------------------------------------------------------------------ Table 4


def table4(job: Namespace, found: dict[str, Any], until: float) -> list[dict[str, Any]]:
    """The paper's rows, each beside the paper's tokens/s and the floor at the copy's rate.

    A row that fails holds its error. A row may take twice its even share of the time that
    is left."""
    rows = []
    copied = found.get("bandwidth", {}).get("bytes_per_second")
    for i, (policy, budget, batch, paper) in enumerate(TABLE_4):
        # 1. The row as the paper has it, in this machine's size.
        scaled = None if budget is None else budget // job.scale
        system = System(policy=policy, budget=scaled)
        batch = _scaled(job, batch)
        row: dict[str, Any] = {
            "policy": policy,
            "budget": system.budget,
            "batch": batch,
            "paper_tokens_per_s": paper,
        }
        # 2. How long it may take.
        now = time.monotonic()
        left = until - now
        even_share = left / (len(TABLE_4) - i)
        row_until = min(until, now + 2 * even_share)
        # 3. What is measured, and the floor.
        try:
            if left <= 0:
                raise Late("no time was left")
            row.update(_row(system, changed(job, batch=batch), row_until))
            if copied:
                config = read_config(job.model)
                row.update(_beside_floor(row, config, GENERATED // job.scale, copied))
        except Exception as error:
            row["error"] = _told(error)
        rows.append(row)
    # 4. Where no row came to anything the part has failed.
    errors = [row["error"] for row in rows if "error" in row]
    if len(errors) == len(rows):
        raise RuntimeError(errors[0])
    return rows


def _row(system: System, job: Namespace, until: float) -> dict[str, Any]:
    """Tokens/s of the steps that cost the mean, and the share of evictions."""
    # 1. How long the prompts and outputs must be for these steps.
    if system.budget is None:
        window = TIMED
        prompt = max(1, GENERATED // 2 // job.scale - window // 2)
        before = 0
    else:
        window = 2 * (system.budget // kernels.PERIODS)
        prompt = job.prompt_length
        before = system.budget
    length = before + prefill_steps(job.batch, prompt) + window + 1
    job = changed(job, prompt_length=prompt, output_length=length)
    # 2. The run, and of its steps the last ones with all requests.
    with _worker(until, start(system, job)) as worker:
        worker.call("begin", 0)
        steps = worker.call("advance")
        report = worker.call("report")
    whole = [seconds for _, seconds, tokens in steps if tokens == job.batch]
    taken = whole[-window:]
    # 3. In two periods every request evicts twice.
    eviction = 0.0
    if report["evictions"]:
        eviction = 2 * job.batch * report["eviction_seconds"] / report["evictions"]
    return {
        "tokens_per_s": round(job.batch * len(taken) / sum(taken), 1),
        "step_ms": round(1000 * median(taken), 3),
        "steps": len(taken),
        "eviction_share": round(eviction / sum(taken), 4),
        "evictions": report["evictions"],
        "memory_bytes": report["memory_bytes"],
    }


def _beside_floor(
    row: dict[str, Any],
    config: ModelConfig,
    generated: int,
    rate: float,
) -> dict[str, float]:
    """Tokens/s if nothing but the bytes took time, at `rate` bytes/s, and what is reached of it.

    generated: how many tokens each request of the paper's rows writes."""
    # 1. A step's bytes at that rate, kernel by kernel.
    shape = shape_of(config)
    seconds = 0.0
    for _, when, times, moved, _ in kernels.work(shape, row["batch"], row["budget"], generated):
        share = 1.0
        if when != "step":  # once a period
            share = kernels.PERIODS / row["budget"]
        seconds += share * times * moved / rate
    # 2. Each step gives every request a token.
    floor = row["batch"] / seconds
    reached = row["tokens_per_s"] / floor
    return {"floor_tokens_per_s": round(floor, 1), "of_floor": round(reached, 3)}


def shape_of(config: ModelConfig) -> kernels.Shape:
    """What of a model decides its floors; weights in bf16."""
    return kernels.Shape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        dim=config.head_dim,
        vocabulary=config.vocab_size,
    )


# ------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Part:
    """What is measured in one go: from the job, what was found so far, and until when."""

    measure: Callable[[Namespace, dict[str, Any], float], Any]
    share: float  # of all the time, at most


# In the order in which they run: Table 4's rows stand beside what `bandwidth` has found
PARTS = {
    "tests": Part(tests, 0.25),
    "bandwidth": Part(bandwidth, 0.06),
    "kernels": Part(kernel_times, 0.12),
    "profile": Part(profile, 0.15),
    "graphs": Part(graphs, 0.12),
    "largest": Part(largest_batches, 0.15),
    "table4": Part(table4, 1.0),
}


def table(result: dict[str, Any]) -> str:
    """How the parts ended, then what each found; a part that did not run has no section."""
    sections = [_rows(result["parts"])]
    if "tests" in result:
        sections.append(_tests_told(result["tests"]))
    if "bandwidth" in result:
        rate = result["bandwidth"]["bytes_per_second"] / 1e9
        sections.append(f"bandwidth: a copy reads and writes {rate:,.1f} GB/s")
    if "kernels" in result:
        sections.append(f"kernels\n{_rows(result['kernels'])}")
    for row in result.get("profile", ()):
        # The names that took most are a table of their own.
        numbers = {name: value for name, value in row.items() if name != "most"}
        sections.append(f"profile\n{_rows([numbers])}\n{_rows(row['most'])}")
    for name in ("graphs", "largest", "table4"):
        if name in result:
            sections.append(f"{name}\n{_rows(result[name])}")
    return "\n\n".join(sections)


def _tests_told(found: dict[str, Any]) -> str:
    """Tests by outcome in one line, and below it the names of those that went wrong."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found["counts"].items())
    ended = "" if found["in_time"] else " (stopped: its time was over)"
    lines = [f"tests: {counts}{ended}"]
    for name in found["wrong"]:
        lines.append(f"  {name}")
    return "\n".join(lines)


def _rows(rows: Sequence[dict[str, Any]]) -> str:
    """Rows whose columns are whatever any of them has, in the order of their first appearance."""
    names: list[str] = []
    for row in rows:
        names += [name for name in row if name not in names]
    return columns(names, [[row.get(name) for name in names] for row in rows])
