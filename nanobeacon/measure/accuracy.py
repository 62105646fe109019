"""What `bench.py accuracy` measures: how often a model is right under each eviction policy and budget.

On the embedded reasoner's problems, whose every look-back is graded, or on those of a file, for real models.
A cell is a policy, or a variant of beacon, at one budget and one protection: a row of the table. Knows the
engine's public API and, for `selections`, where its evictor is; shows no more than a progress bar.
"""

import hashlib
import json
import os
import random
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from .. import LLM, SamplingParams
from ..policies import POLICIES, EvictionSettings, Policy, policy_named, settle
from ..reasoner import folder, task
from ..reasoner.solve import solve, solve_forced
from ..request import Request
from ..tokenizer import are_messages
from . import common, grading, plots, selections
from .common import filled, listed, read_lines, refuse

REASONER = dict(model=str(folder()), n=128, policies=[*POLICIES], protect=["prompt", 4], window=16)
REASONER |= dict(budgets=[48, 64, 96, 128, 192, 256], length=768)
FILE = dict(n=8, policies=["full", "beacon"], protect=["prompt"], window=32, budgets=[2048])
OF_REASONER = ("length", "no_recitation", "teacher_forced")  # options that a file's problems do not have
OF_FILE = ("paper", "max_tokens", "temperature", "top_p", "raw")
PAPER = dict(temperature=0.6, top_p=0.95, top_k=0, min_p=0.0, max_tokens=32768)  # the paper's, section 5.1


def _name_of(function: Any) -> str:
    """What JSON has in a function's place: a policy's own score."""
    return f"{function.__module__}.{function.__qualname__}"


_json = partial(json.dumps, sort_keys=True, ensure_ascii=False, default=_name_of)
PROBLEM = "an object with answer (text or number) and prompt (text) or messages (each with a role)"
CHARTED = {  # a measure -> its chart's title and vertical axis
    "whole": ("Whole traces right", "share of problems whose whole trace is right"),
    "look_backs": ("Look-backs right", "share of look-backs that are right"),
    "pass_at_1": ("Answers right (pass@1)", "share of runs whose answer is right"),
}
FINDERS = ("fps", "random", *selections.SELECTIONS)  # of beacons


def add_arguments(p: ArgumentParser) -> None:
    add, prompt_or_number = p.add_argument, listed(lambda text: text if text == "prompt" else int(text))
    add("--model", help="folder or hub id (default: the embedded reasoner)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    add("--batch", type=int, default=32, help="requests that run together (default: %(default)s)")
    add("--seed", type=int, default=0, help="of problems and draws (default: %(default)s)")
    add("--n", "--runs", type=int, help="problems (default: 128); with --problems, runs of each (default: 8)")
    how = "module:name for one of your own (default: all; for a file full,beacon)"
    add("--policies", type=listed(_policy_name), metavar="A,B", help=how)
    add("--budgets", type=listed(int), metavar="N,N", help="default: 48 to 256; for a file 2048")
    add("--protect", type=prompt_or_number, metavar="A,B", help="default: prompt,4; for a file prompt")
    add("--window", type=int, help="newest tokens that always stay (default: 16; for a file 32)")
    add = p.add_argument_group("the reasoner's problems").add_argument
    add("--length", type=int, help="tokens of prompt and trace (default: 768)")
    add("--no-recitation", action="store_true", help="the variant whose facts are not looked up at the start")
    add("--teacher-forced", action="store_true", help="feed the true trace, grade what would have been said")
    add = p.add_argument_group("variants of beacon; then --policies only if named").add_argument
    add("--splits", type=listed(_split), default=[], metavar="B:R,B:R", help="beacons:recents, like 24:8")
    add("--pooling", type=listed(str, ("max", "mean")), default=[], metavar="A,B", help="max, mean")
    add("--select", type=listed(str, FINDERS), default=[], metavar="A,B", help=", ".join(FINDERS))
    add("--windows", type=listed(int), default=[], metavar="N,N", help="newest tokens that stay, like 16,32")
    add("--buffers", type=listed(int), default=[], metavar="N,N", help="rows of the query buffer, like 32,64")
    add = p.add_argument_group("problems of a file; FILE.results.jsonl keeps the runs, to go on").add_argument
    add("--problems", type=Path, metavar="FILE", help="JSON lines with answer and prompt (or messages)")
    add("--paper", action="store_true", help="sample like the paper: 0.6, top-p 0.95, up to 32,768 tokens")
    add("--max-tokens", type=int, help="default: what the context leaves")
    add("--temperature", type=float, help="default: the checkpoint's")
    add("--top-p", type=float, help="default: the checkpoint's")
    add("--raw", action="store_true", help="no chat template around a prompt")


def _policy_name(text: str) -> str:
    """A name of a policy that exists, checked while the command line is read."""
    try:
        policy_named(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


def _split(text: str) -> tuple[int, int]:
    beacons, recents = text.split(":")
    return int(beacons), int(recents)


@dataclass(frozen=True)
class Cell:
    """A row to be measured."""

    label: str
    settings: EvictionSettings | None  # the policy with its budget; None: the full cache
    select: str | None = None  # a name in SELECTIONS: who finds the beacons in the engine's place

    def open(self, options: Namespace, length: int | None = None) -> tuple[LLM, int]:
        """(an LLM that runs this cell, bytes of queries that it keeps of a request)."""
        under: dict[str, Any] = {"policy": "full"}
        if s := self.settings:
            policy = selections.keep_history(s.policy, length) if self.select else s.policy
            under = {"policy": policy, "budget": s.budget, "protect": s.protect}
        named = {"max_num_seqs": options.batch, "max_model_len": length, "seed": options.seed}
        llm = LLM(options.model, options.device, options.dtype, **named, **under)
        if not self.select:
            return llm, llm.engine.queries.row_bytes
        llm.engine.evictor = selections.SelectingEvictor(llm.engine, self.select, s.policy.beacons)
        return llm, llm.engine.evictor.row_bytes

    def described(self) -> dict[str, Any]:
        """The row's first columns. The split, beacons:recents, is the one in force at this budget."""
        row = {"policy": self.label, "budget": None, "protect": None, "window": None, "split": None}
        if s := self.settings:
            row |= {"budget": s.budget, "protect": s.protect, "window": s.window}
            row["split"] = f"{s.policy.beacons}:{s.recents}" if s.capacity else None
        return row


def cells(options: Namespace) -> list[Cell]:
    """Every cell asked for, checked: ValueError before anything runs."""
    found = []
    for label, policy, select in _variants(options):
        if policy.ranking == "none":
            found.append(Cell(label, None))
            continue
        for protect, budget in product(options.protect, options.budgets):
            # Rivals of FPS get as many recents as FPS has: those since the freeze.
            recents = min(policy.recents, max(1, budget // 8)) if select else policy.recents
            settings = settle(replace(policy, recents=recents), budget, protect=protect)
            found.append(Cell(label, settings, select if select in selections.SELECTIONS else None))
    return found


def _variants(options: Namespace) -> Iterator[tuple[str, Policy, str | None]]:
    """(label, policy, rival of FPS) of every line asked for: policies, and variants of beacon."""
    for name in options.policies:
        policy = policy_named(name)
        if policy.ranking in ("queries", "random"):  # all that have a window get the same
            policy = replace(policy, window=options.window)
        yield name, policy, None
    beacon = replace(POLICIES["beacon"], window=options.window)
    for beacons, recents in options.splits:
        yield f"{beacons}:{recents}", replace(beacon, beacons=beacons, recents=recents), None
    for pool in options.pooling:
        yield f"pooling {pool}", replace(beacon, pool=pool), None
    for name in options.select:
        beacons = len(selections.DECAYS) if name == "ema" else beacon.beacons
        rival = replace(beacon, select="reservoir", beacons=beacons), name
        yield f"select {name}", *((beacon, None) if name == "fps" else rival)
    for window in options.windows:
        yield f"window {window}", replace(beacon, window=window), None
    for rows in options.buffers:
        yield f"buffer {rows}", replace(beacon, buffer=rows), None


def run(options: Namespace) -> dict[str, Any]:
    """Measure every cell: a row each, with means and their 95 % intervals over problems."""
    o, on_file = options, options.problems is not None
    if on_file:
        refuse(o, OF_REASONER, "only the reasoner's problems have it, not those of --problems")
    else:
        refuse(o, OF_FILE, "only for --problems; the reasoner's are greedy and of one length")
    ablated = o.splits or o.pooling or o.select or o.windows or o.buffers
    o = filled(o, (FILE if on_file else REASONER) | ({"policies": []} if ablated else {}))
    if min(o.n, o.batch) < 1:
        raise ValueError(f"n={o.n}, batch={o.batch}: at least 1 is possible")
    if on_file and not o.model:
        raise ValueError("model=None: --problems needs a model, a folder or a hub id")
    if on_file and set(o.select) & set(selections.SELECTIONS):
        raise ValueError(f"select={','.join(o.select)}: with --problems fps and random are possible")
    todo, rows = cells(o), []
    settings = [cell.settings for cell in todo if cell.settings]
    if not settings:
        refuse(options, ("budgets", "protect"), "none of the policies has a budget")
    if o.window not in [s.policy.window for s in settings]:
        refuse(options, ("window",), "no row would have it")
    if on_file:
        measure, problems = _on_file, read_lines(o.problems, _is_problem, PROBLEM)
    else:
        measure, problems = _on_reasoner, task.problems(o.n, o.length, o.seed, not o.no_recitation)
    with tqdm(total=len(todo) * len(problems), unit="problem", disable=None) as bar:
        for cell in todo:
            bar.set_description(cell.label)
            rows.append(cell.described() | measure(cell, o, problems, bar))
    about = ("model", "n", "seed", "length", "no_recitation", "teacher_forced", "paper")
    problems = {"problems": str(o.problems or "reasoner"), "num_problems": len(problems)}
    errors = [error for row in rows if (error := row.pop("first_error", None))]
    problems["first_error"] = errors[0] if errors else None
    return {name: getattr(o, name) for name in about} | problems | {"rows": rows}


def _on_reasoner(cell: Cell, options: Namespace, problems: list[task.Problem], bar: tqdm) -> dict[str, Any]:
    """`look_backs` is the mean of each problem's share, 0 where an output has none."""
    llm, query_bytes = cell.open(options, options.length)
    if llm.model_config.vocab_size != len(task.WORDS):
        raise ValueError(
            f"model={options.model!r} does not speak the reasoner's words; --problems FILE is for it"
        )
    grades, local = (solve_forced if options.teacher_forced else solve)(llm, problems, bar.update)
    return {
        "look_backs": common.bootstrap([grade.right / max(grade.look_backs, 1) for grade in grades]),
        "whole": common.bootstrap([float(grade.whole) for grade in grades]),
        **({"local": common.bootstrap(local)} if local else {}),
        "output_tokens": llm.stats.output_tokens / len(problems),
        "cached_tokens": llm.stats.peak_cached_tokens,
        "query_bytes": query_bytes,
        "seconds": llm.stats.prefill_seconds + llm.stats.decode_seconds,
    }


def _is_problem(line: dict[str, Any]) -> bool:
    answer, messages = line.get("answer"), line.get("messages")
    asked = isinstance(line.get("prompt"), str) if messages is None else are_messages(messages)
    return asked and isinstance(answer, str | int | float) and not isinstance(answer, bool)


def _on_file(cell: Cell, options: Namespace, problems: list[dict], bar: tqdm) -> dict[str, Any]:
    """pass@1 and lengths over a file. What its results hold under the same settings is not run again."""
    given = {name: getattr(options, name) for name in ("temperature", "top_p", "max_tokens")}
    given = (PAPER if options.paper else {}) | {name: v for name, v in given.items() if v is not None}
    params = SamplingParams(**given, n=options.n)
    settings = {name: getattr(options, name) for name in ("model", "dtype", "seed", "raw")}
    settings |= {"sampling": asdict(params), "eviction": cell.settings and asdict(cell.settings)}
    keys = [hashlib.sha256(_json([problem, settings]).encode()).hexdigest()[:16] for problem in problems]
    path = options.problems.with_suffix(".results.jsonl")
    path.touch()
    cut_off = path.read_bytes().rpartition(b"\n")[2]
    os.truncate(path, path.stat().st_size - len(cut_off))
    wanted = {"key", "attempts", "cached_tokens", "query_bytes"}
    said = "what an earlier run wrote (delete the file to begin anew)"
    earlier = read_lines(path, wanted.issubset, said) if path.stat().st_size else []
    done = {record["key"]: record for record in earlier}
    missing = {key: problem for key, problem in zip(keys, problems, strict=True) if key not in done}
    bar.update(len(problems) - len(missing))
    with open(path, "a", encoding="utf-8") as file:
        for record in _answers(cell, options, params, missing) if missing else ():
            done[record["key"]] = record
            bar.update()
            if not any(attempt["error"] for attempt in record["attempts"]):  # the next run tries those again
                print(_json(record | {"settings": settings}), file=file, flush=True)
    return _summary([done[key] for key in keys])


def _answers(cell: Cell, options: Namespace, params: SamplingParams, problems: dict) -> Iterator[dict]:
    """A record of each problem (key -> problem), when the last of its attempts has ended."""
    llm, query_bytes = cell.open(options)
    if llm.tokenizer is None:
        raise ValueError(f"model={options.model!r}: problems are text, and the folder has no tokenizer")
    waiting = {}
    for key, problem in problems.items():
        plain = "prompt" in problem and (options.raw or llm.tokenizer.chat_template is None)
        messages = problem.get("messages") or [{"role": "user", "content": problem["prompt"]}]
        seed = random.Random(f"{options.seed} {_json(problem)}").getrandbits(60)  # whatever ran before it
        prompt = llm.tokenizer.encode(problem["prompt"]) if plain else llm.chat_prompt(messages)
        most = params.max_tokens
        if options.paper and options.max_tokens is None:  # the paper's length, or what the context leaves
            most = min(most, max(1, llm.engine.max_model_len - len(prompt)))
        waiting[key] = llm.submit([prompt], replace(params, seed=seed, max_tokens=most))
    for _ in llm.run([request for requests in waiting.values() for request in requests]):
        for key in [key for key, requests in waiting.items() if all(r.finish_reason for r in requests)]:
            attempts = [_attempt(request, problems[key]["answer"]) for request in waiting.pop(key)]
            cached = {"cached_tokens": llm.stats.peak_cached_tokens, "query_bytes": query_bytes}
            yield {"key": key, "attempts": attempts} | cached


def _attempt(request: Request, answer: Any) -> dict[str, Any]:
    text = request.text or ""
    said = {"text": text, "answer": grading.answer_in(text), "right": grading.is_right(text, answer)}
    ended = {"finish_reason": request.finish_reason, "error": request.error}
    return said | ended | {"output_tokens": len(request.output_token_ids)}


def _summary(records: list[dict]) -> dict[str, Any]:
    attempts = [attempt for record in records for attempt in record["attempts"]]
    ended = [attempt for attempt in attempts if not attempt["error"]]
    failed = [attempt["error"] for attempt in attempts if attempt["error"]]
    if not ended:
        raise ValueError(failed[0])
    return {
        "pass_at_1": common.bootstrap([fmean(a["right"] for a in record["attempts"]) for record in records]),
        "output_tokens": fmean(attempt["output_tokens"] for attempt in ended),
        "longest": max(attempt["output_tokens"] for attempt in ended),
        "cut": fmean(attempt["finish_reason"] == "length" for attempt in ended),
        "errors": len(failed),
        "cached_tokens": max(record["cached_tokens"] for record in records),
        "query_bytes": records[0]["query_bytes"],
        "first_error": failed[0] if failed else None,
    }


def table(result: dict[str, Any]) -> str:
    """The rows for people: shares with their intervals; query bytes are those kept for each request."""
    shown = {dict: lambda value: common.show(value, ".3f"), float: "{:.4g}".format}
    rows = [[shown.get(type(v), lambda v: v)(v) for v in row.values()] for row in result["rows"]]
    return common.columns([name.replace("_", " ") for name in result["rows"][0]], rows)


def charts(result: dict[str, Any]) -> list[plots.Chart]:
    """Accuracy over budget, a line for each policy (the paper's Figure 8), a chart for each protection."""
    under = [row for row in result["rows"] if row["budget"]]
    measures = [name for name in CHARTED if name in result["rows"][0]]
    note = common.chart_note(result, _sample(result))
    found = []
    for name, protect in product(measures, dict.fromkeys(row["protect"] for row in under)):
        series: dict[str, list] = {}
        for row in [row for row in result["rows"] if row["protect"] in (protect, None)]:
            y = [row[name][bound] for bound in ("mean", "low", "high")]
            at = [row["budget"]] if row["budget"] else {r["budget"] for r in under}  # the full cache is level
            series.setdefault(row["policy"], []).extend((x, *y) for x in at)
        called, y = CHARTED[name]
        kept = "the prompt" if protect == "prompt" else f"the first {protect} tokens"
        title = f"{called}; always kept: {kept}"
        found.append(plots.lines(title, common.BUDGET_AXIS, y, series, log_x=True, note=note))
    return found


def _sample(result: dict[str, Any]) -> str:
    """How much was measured, in words."""
    if result["problems"] == "reasoner":
        return f"n = {result['n']} problems of {result['length']} tokens"
    return f"n = {result['num_problems']} problems, {result['n']} runs of each"
