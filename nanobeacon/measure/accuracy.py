"""What `bench.py accuracy` measures: how often a model is right under each eviction policy and budget.

Two kinds of problems: the embedded reasoner's, whose every look-back is graded, and with --problems those of a
file, for real models. A cell is a policy, or one variant of beacon, at one budget and one protection; it becomes
a row. Knows the engine by its public API, but for the seam of `selections`; shows only a progress bar.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import LLM, Policy, SamplingParams
from ..policies import POLICIES, EvictionSettings, settle
from ..reasoner import folder, task
from . import common, grading, plots, selections

BUDGETS = [48, 64, 96, 128, 192, 256]
REASONER = dict(model=str(folder()), n=128, budgets=BUDGETS, window=16, protect=["prompt", task.FIRST_TOKENS])
FILE = dict(n=8, budgets=[2048], window=32, protect=["prompt"])
PAPER = dict(temperature=0.6, top_p=0.95, top_k=0, min_p=0.0, max_tokens=32768)  # section 5.1
SELECTIONS = ("fps", "random", *selections.SELECTIONS)
ABLATIONS = ("splits", "pooling", "select", "windows", "buffers")


def names(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def protections(text: str) -> list[str | int]:
    return [part if part == "prompt" else int(part) for part in text.split(",")]


def splits(text: str) -> list[tuple[int, int]]:
    pairs = (part.split(":") for part in text.split(","))
    return [(int(beacons), int(recents)) for beacons, recents in pairs]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="folder or hub id (default: the embedded reasoner)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    add("--batch", type=int, default=32, help="requests that run together (default: %(default)s)")
    add("--seed", type=int, default=0, help="of problems and draws (default: %(default)s)")
    add("--n", "--runs", type=int, help="problems (default: 128); with --problems: runs of each (default: 8)")
    add("--policies", type=names, metavar="A,B", help="default: all; with --problems full,beacon")
    add("--budgets", type=numbers, metavar="N,N", help="default: 48 to 256; with --problems 2048")
    add("--protect", type=protections, metavar="A,B", help="default: prompt,4; with --problems prompt")
    add("--window", type=int, help="newest tokens that always stay (default: 16; with --problems 32)")
    add = parser.add_argument_group("the reasoner's problems").add_argument
    add("--length", type=int, default=768, help="tokens of prompt and trace (default: %(default)s)")
    add("--no-recitation", action="store_true", help="the variant whose facts are not looked up at the start")
    add("--teacher-forced", action="store_true", help="feed the true trace, grade what would have been said")
    about = "variants of beacon; --policies are then rows only if named"
    add = parser.add_argument_group("ablations", about).add_argument
    add("--splits", type=splits, default=[], metavar="B:R,B:R", help="beacons:recents, like 24:8,16:16")
    add("--pooling", type=names, default=[], metavar="A,B", help="over the queries: max, mean")
    add("--select", type=names, default=[], metavar="A,B", help="how to find beacons: " + ", ".join(SELECTIONS))
    add("--windows", type=numbers, default=[], metavar="N,N", help="newest tokens that always stay: 16,32")
    add("--buffers", type=numbers, default=[], metavar="N,N", help="rows of the query buffer: 32,48,64")
    add = parser.add_argument_group("problems of a file").add_argument
    add("--problems", type=Path, metavar="FILE", help="JSON lines with prompt (or messages) and answer")
    add("--results", type=Path, metavar="FILE", help="where runs are kept and found again (default: beside it)")
    add("--paper", action="store_true", help="sample as the paper: 0.6, top-p 0.95, at most 32,768 tokens")
    add("--max-tokens", type=int, help="default: what the context leaves")
    add("--temperature", type=float, help="default: the checkpoint's")
    add("--top-p", type=float, help="default: the checkpoint's")
    add("--raw", action="store_true", help="no chat template around a prompt")


@dataclass(frozen=True)
class Cell:
    """A row before it is measured: its name, the policy as the engine gets it, and the settings in force."""

    label: str
    policy: Policy
    settings: EvictionSettings | None  # None: the full cache
    select: str | None = None  # a name of selections.SELECTIONS, which finds the beacons in the engine's place

    def open(self, options: argparse.Namespace, length: int | None = None) -> tuple[LLM, int]:
        """(an LLM that runs this cell, bytes of queries that it keeps of each request)."""
        policy = selections.keep_history(self.policy, length) if self.select else self.policy
        under = dict(budget=self.settings.budget, protect=self.settings.protect) if self.settings else {}
        llm = LLM(
            options.model, options.device, options.dtype, seed=options.seed, policy=policy,
            max_num_seqs=options.batch, max_model_len=length, **under,
        )  # fmt: skip
        if self.select:
            return llm, selections.attach(llm, self.select, self.policy.beacons)
        return llm, llm.engine.queries.row_bytes

    def described(self) -> dict[str, Any]:
        """The row's first columns. The split, beacons:recents, is the one in force at this budget."""
        settings = self.settings
        if settings is None:
            return {"policy": self.label, "budget": None, "protect": None, "window": None, "split": None}
        split = f"{settings.policy.beacons}:{settings.recents}" if settings.capacity else None
        numbers = {"budget": settings.budget, "protect": settings.protect, "window": settings.window}
        return {"policy": self.label, **numbers, "split": split}


def cells(options: argparse.Namespace) -> list[Cell]:
    """Every cell asked for, checked: ValueError before anything runs."""
    found = []
    for label, given, select in _variants(options):
        if given.ranking == "none":
            found.append(Cell(label, given, None))
            continue
        for protect in options.protect:
            for budget in options.budgets:
                # Rivals of FPS get as many recents as FPS has: those since the freeze.
                recents = min(given.recents, max(1, budget // 8)) if select else given.recents
                settings = settle(replace(given, recents=recents), budget, protect=protect)
                found.append(Cell(label, settings.policy, settings, select))
    return found


def _variants(options: argparse.Namespace) -> Iterator[tuple[str, Policy, str | None]]:
    """(label, policy, selection) of every line asked for: policies, and ablations of beacon."""
    for name in options.policies:
        policy = POLICIES[_known("policies", name, POLICIES)]
        has_window = policy.ranking in ("queries", "random")
        yield name, replace(policy, window=options.window) if has_window else policy, None
    beacon = replace(POLICIES["beacon"], window=options.window)
    for beacons, recents in options.splits:
        select = "fps" if beacons else "none"
        yield f"split {beacons}:{recents}", replace(beacon, beacons=beacons, recents=recents, select=select), None
    for pool in options.pooling:
        yield f"pooling {pool}", replace(beacon, pool=_known("pooling", pool, ("max", "mean"))), None
    for name in options.select:
        if _known("select", name, SELECTIONS) == "fps":
            yield "select fps", beacon, None
            continue
        beacons = len(selections.DECAYS) if name == "ema" else beacon.beacons
        policy = replace(beacon, select="reservoir", beacons=beacons)
        yield f"select {name}", policy, name
    for window in options.windows:
        yield f"window {window}", replace(beacon, window=window), None
    for rows in options.buffers:
        if rows < beacon.beacons + beacon.recents:
            raise ValueError(f"buffers={rows}: {beacon.beacons + beacon.recents} rows or more are possible")
        yield f"buffer {rows}", replace(beacon, buffer=rows), None


def _known(option: str, name: str, possible: Sequence[str]) -> str:
    if name not in possible:
        raise ValueError(f"{option}={name!r}: possible are {', '.join(possible)}")
    return name


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every cell: a row each, with means and their 95 % intervals over problems."""
    options = _with_defaults(options)
    todo = cells(options)
    if options.problems:
        problems, measure = read_problems(options.problems), _answers
    else:
        problems = task.problems(options.n, options.length, options.seed, not options.no_recitation)
        measure = _forced_traces if options.teacher_forced else _traces
    rows = []
    with tqdm(total=len(todo) * len(problems), unit="problem", disable=None) as bar:
        for cell in todo:
            bar.set_description(cell.label)
            rows.append(cell.described() | measure(cell, options, problems, bar))
    kept = ("model", "n", "seed", "length", "no_recitation", "teacher_forced", "paper")
    about = {name: getattr(options, name) for name in kept}
    return about | {"problems": str(options.problems or "reasoner"), "count": len(problems), "rows": rows}


def _with_defaults(options: argparse.Namespace) -> argparse.Namespace:
    given = {name: value for name, value in vars(options).items() if value is not None}
    defaults = FILE if options.problems else REASONER
    policies = ["full", "beacon"] if options.problems else list(POLICIES)
    ablated = any(getattr(options, name) for name in ABLATIONS)
    if options.problems and not options.model:
        raise ValueError("model=None: --problems needs a model, a folder or a hub id")
    if options.problems and set(options.select) & set(selections.SELECTIONS):
        raise ValueError(f"select={options.select}: possible for --problems are fps, random")
    if given.get("n", 1) < 1:
        raise ValueError(f"n={options.n}: a whole number of at least 1 is possible")
    return argparse.Namespace(**vars(options) | defaults | {"policies": [] if ablated else policies} | given)


# --- the reasoner's problems ---


def _traces(cell: Cell, options: argparse.Namespace, problems: list[task.Problem], bar: tqdm) -> dict[str, Any]:
    """What a cell measures where the model writes the trace, greedily."""
    llm, query_bytes = cell.open(options, options.length)
    params = SamplingParams(temperature=0.0, max_tokens=len(problems[0].trace))
    requests = llm.submit([list(problem.prompt) for problem in problems], params)
    for request, _ in llm.run(requests):
        bar.update(request.finish_reason is not None)
        if request.error:
            raise ValueError(f"model={options.model!r}: {request.error}")
    outputs = [request.output_token_ids for request in requests]
    grades = [task.grade(problem, output) for problem, output in zip(problems, outputs, strict=True)]
    return _graded(grades, llm) | {"output_tokens": _mean(map(len, outputs)), "query_bytes": query_bytes}


def _forced_traces(
    cell: Cell, options: argparse.Namespace, problems: list[task.Problem], bar: tqdm
) -> dict[str, Any]:
    """The same where the true trace is fed, so that no slip leads to another; `local`: the other tokens."""
    llm, query_bytes = cell.open(options, options.length)
    right = [[False] * len(problem.trace) for problem in problems]

    def compare(i: int, index: int, logits: Any) -> None:
        right[i][index] = int(logits.argmax()) == problems[i].trace[index]
        bar.update(index + 1 == len(right[i]))

    llm.score([list(p.prompt) for p in problems], [list(p.trace) for p in problems], compare)
    grades, local = [], []
    for problem, tokens in zip(problems, right, strict=True):
        looked = sum(tokens[place] for place in problem.look_backs)
        grades.append(task.Grade(len(problem.look_backs), looked, all(tokens)))
        local.append((sum(tokens) - looked) / (len(tokens) - len(problem.look_backs)))
    return _graded(grades, llm) | {"local": common.bootstrap(local), "query_bytes": query_bytes}


def _graded(grades: list[task.Grade], llm: LLM) -> dict[str, Any]:
    """`look_backs` is the mean of each problem's share, 0 where an output has none."""
    return {
        "look_backs": common.bootstrap([grade.right / max(grade.look_backs, 1) for grade in grades]),
        "whole": common.bootstrap([float(grade.whole) for grade in grades]),
        "seconds": llm.stats.prefill_seconds + llm.stats.decode_seconds,
        "cached_tokens": llm.stats.peak_cached_tokens,
    }


def _mean(values: Iterator[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


# --- problems of a file ---


def read_problems(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, checked, each with a `key` made from its content."""
    problems = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            where, problem = f"{path}, line {number}", json.loads(line)
            asked = isinstance(problem, dict) and ("prompt" in problem) != ("messages" in problem)
            if not asked or "answer" not in problem:
                raise ValueError(f"{where}: an object with answer and either prompt or messages is possible")
            digest = hashlib.sha256(json.dumps(problem, sort_keys=True).encode()).hexdigest()
            problems.append(problem | {"key": digest[:16]})
    except OSError as error:
        raise ValueError(f"problems={str(path)!r}: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: {error}") from error
    if not problems:
        raise ValueError(f"problems={str(path)!r}: the file has no problem")
    return problems
