"""What `bench.py accuracy` measures: how often a model is right under each eviction
policy and budget.

On the embedded reasoner's problems, whose every look-back is graded, or on those of a file, for
real models. A cell is a policy, or a variant of beacon, at one budget and one protection: a row of
the table. Knows the engine's public API and, for `selections`, where its evictor is; shows no more
than a progress bar.
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

# What an option is where it was not given: for the reasoner's problems, and for those of a file
REASONER = {
    "model": str(folder()),
    "n": 128,
    "policies": list(POLICIES),
    "protect": ["prompt", 4],
    "window": 16,
    "budgets": [48, 64, 96, 128, 192, 256],
    "length": 768,
}
FILE = {
    "n": 8,
    "policies": ["full", "beacon"],
    "protect": ["prompt"],
    "window": 32,
    "budgets": [2048],
}
# Options that only one of the two has
OF_REASONER = ("length", "no_recitation", "teacher_forced")
OF_FILE = ("paper", "max_tokens", "temperature", "top_p", "raw")
# How the paper samples, section 5.1
PAPER = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "max_tokens": 32768}


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
    """The options in four groups: of every run, of the reasoner, variants of beacon, of a file."""
    add = p.add_argument
    prompt_or_number = listed(lambda text: text if text == "prompt" else int(text))
    add("--model", help="folder or hub id (default: the embedded reasoner)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    add("--batch", type=int, default=32, help="requests that run together (default: %(default)s)")
    add("--seed", type=int, default=0, help="of problems and draws (default: %(default)s)")
    how_many = "problems (default: 128); with --problems, runs of each (default: 8)"
    add("--n", "--runs", type=int, help=how_many)
    how = "module:name for one of your own (default: all; for a file full,beacon)"
    add("--policies", type=listed(_policy_name), metavar="A,B", help=how)
    add("--budgets", type=listed(int), metavar="N,N", help="default: 48 to 256; for a file 2048")
    add("--protect", type=prompt_or_number, metavar="A,B", help="default: prompt,4; for a file prompt")
    add("--window", type=int, help="newest tokens that always stay (default: 16; for a file 32)")

    add = p.add_argument_group("the reasoner's problems").add_argument
    add("--length", type=int, help="tokens of prompt and trace (default: 768)")
    recitation = "the variant whose facts are not looked up at the start"
    add("--no-recitation", action="store_true", help=recitation)
    forced = "feed the true trace, grade what would have been said"
    add("--teacher-forced", action="store_true", help=forced)

    add = p.add_argument_group("variants of beacon; then --policies only if named").add_argument
    add("--splits", type=listed(_split), default=[], metavar="B:R,B:R", help="beacons:recents, like 24:8")
    add("--pooling", type=listed(str, ("max", "mean")), default=[], metavar="A,B", help="max, mean")
    add("--select", type=listed(str, FINDERS), default=[], metavar="A,B", help=", ".join(FINDERS))
    windows = "newest tokens that stay, like 16,32"
    add("--windows", type=listed(int), default=[], metavar="N,N", help=windows)
    buffers = "rows of the query buffer, like 32,64"
    add("--buffers", type=listed(int), default=[], metavar="N,N", help=buffers)

    of_file = "problems of a file; FILE.results.jsonl keeps the runs, to go on"
    add = p.add_argument_group(of_file).add_argument
    add("--problems", type=Path, metavar="FILE", help="JSON lines with answer and prompt (or messages)")
    paper = "sample like the paper: 0.6, top-p 0.95, up to 32,768 tokens"
    add("--paper", action="store_true", help=paper)
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
    """How the query buffer's rows are split, `24:8`: 24 beacons and 8 recents."""
    beacons, recents = text.split(":")
    return int(beacons), int(recents)


@dataclass(frozen=True)
class Cell:
    """A row to be measured."""

    label: str
    settings: EvictionSettings | None  # the policy with its budget; None: the full cache
    select: str | None = None  # a name in SELECTIONS: who finds the beacons in the engine's place

    def open(self, options: Namespace, length: int | None = None) -> tuple[LLM, int]:
        """(an LLM that runs this cell, bytes of queries that it keeps of a request).

        length: positions of the longest request, None where the model's own limit is enough. A
        rival of FPS needs it, since its history keeps as many queries.
        """
        # 1. The policy; a rival's is made to keep every query
        settings = self.settings
        eviction: dict[str, Any] = {"policy": "full"}
        if settings is not None:
            policy = settings.policy
            if self.select:
                policy = selections.keep_history(policy, length)
            eviction = {"policy": policy, "budget": settings.budget, "protect": settings.protect}
        llm = LLM(
            options.model,
            options.device,
            options.dtype,
            max_num_seqs=options.batch,
            max_model_len=length,
            seed=options.seed,
            **eviction,
        )
        if not self.select:
            return llm, llm.engine.queries.row_bytes

        # 2. A rival takes the evictor's place, which is all that differs from the engine's way
        evictor = selections.SelectingEvictor(llm.engine, self.select, settings.policy.beacons)
        llm.engine.evictor = evictor
        return llm, evictor.row_bytes

    def described(self) -> dict[str, Any]:
        """The row's first columns. The split, beacons:recents, is the one in force at
        this budget."""
        settings = self.settings
        if settings is None:
            nothing = dict.fromkeys(("budget", "protect", "window", "split"))
            return {"policy": self.label, **nothing}
        split = None
        if settings.capacity:  # policies that ask no queries have no buffer to split
            split = f"{settings.policy.beacons}:{settings.recents}"
        return {
            "policy": self.label,
            "budget": settings.budget,
            "protect": settings.protect,
            "window": settings.window,
            "split": split,
        }


def cells(options: Namespace) -> list[Cell]:
    """Every cell asked for, checked: ValueError before anything runs."""
    found = []
    for label, policy, select in _variants(options):
        if policy.ranking == "none":
            found.append(Cell(label, None))
            continue
        for protect, budget in product(options.protect, options.budgets):
            recents = policy.recents
            if select:  # rivals get as many recents as FPS has: those since the freeze
                recents = min(recents, max(1, budget // 8))
            settings = settle(replace(policy, recents=recents), budget, protect=protect)
            # `random` is a reservoir, which the engine has itself: no other evictor is needed
            in_its_place = select if select in selections.SELECTIONS else None
            found.append(Cell(label, settings, in_its_place))
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
        if name == "fps":  # beacon's own way
            yield "select fps", beacon, None
            continue
        beacons = len(selections.DECAYS) if name == "ema" else beacon.beacons
        yield f"select {name}", replace(beacon, select="reservoir", beacons=beacons), name
    for window in options.windows:
        yield f"window {window}", replace(beacon, window=window), None
    for rows in options.buffers:
        yield f"buffer {rows}", replace(beacon, buffer=rows), None


def run(options: Namespace) -> dict[str, Any]:
    """Measure every cell: a row each, with means and their 95 % intervals over problems.

    `whole_beyond_first` (and so on) is the difference to the first row of the same budget and
    protection, problem by problem.

    ValueError before anything runs for what is impossible, and for options that change nothing.
    """
    # 1. The options, with the defaults of where the problems come from
    asked = options
    options = _settled(asked)

    # 2. The cells; an option of which none of them has anything is a mistake
    todo = cells(options)
    settings = [cell.settings for cell in todo if cell.settings]
    if not settings:
        refuse(asked, ("budgets", "protect"), "none of the policies has a budget")
    if options.window not in [each.policy.window for each in settings]:
        refuse(asked, ("window",), "no row would have it")

    # 3. The problems: every cell gets the same ones
    if options.problems is not None:
        measure = _on_file
        problems = read_lines(options.problems, _is_problem, PROBLEM)
    else:
        measure = _on_reasoner
        problems = task.problems(
            options.n, options.length, options.seed, recitation=not options.no_recitation
        )

    # 4. A row for each cell
    rows = []
    errors = []
    firsts: dict[tuple, dict[str, list[float]]] = {}  # the first row of each budget and protection
    with tqdm(total=len(todo) * len(problems), unit="problem", disable=None) as bar:
        for cell in todo:
            bar.set_description(cell.label)
            row = cell.described() | measure(cell, options, problems, bar)
            errors.append(row.pop("first_error", None))
            # Problem by problem beside the first row: its interval says whether the two differ
            shares = row.pop("shares")
            first = firsts.setdefault((row["budget"], row["protect"]), shares)
            for name, values in shares.items():
                differences = [a - b for a, b in zip(values, first[name], strict=True)]
                row[f"{name}_beyond_first"] = common.bootstrap(differences)
            rows.append(row)

    about = ("model", "n", "seed", "length", "no_recitation", "teacher_forced", "paper")
    return {
        **{name: getattr(options, name) for name in about},
        "problems": str(options.problems or "reasoner"),
        "num_problems": len(problems),
        "first_error": next(filter(None, errors), None),  # bench.py ends with it
        "rows": rows,
    }


def _settled(options: Namespace) -> Namespace:
    """The options with their defaults: those of the reasoner's problems, or of a file's."""
    on_file = options.problems is not None
    if on_file:
        defaults = FILE
        refuse(options, OF_REASONER, "only the reasoner's problems have it, not those of --problems")
    else:
        defaults = REASONER
        refuse(options, OF_FILE, "only for --problems; the reasoner's are greedy and of one length")
    variants = (options.splits, options.pooling, options.select, options.windows, options.buffers)
    if any(variants):  # whoever asks for variants of beacon wants no other rows, unless named
        defaults = defaults | {"policies": []}
    options = filled(options, defaults)
    if min(options.n, options.batch) < 1:
        raise ValueError(f"n={options.n}, batch={options.batch}: at least 1 is possible")
    if on_file and not options.model:
        raise ValueError("model=None: --problems needs a model, a folder or a hub id")
    if on_file and set(options.select) & set(selections.SELECTIONS):
        # their history is as long as the context, which on a file may be anything
        named = ",".join(options.select)
        raise ValueError(f"select={named}: with --problems fps and random are possible")
    return options


def _on_reasoner(cell: Cell, options: Namespace, problems: list[task.Problem], bar: tqdm) -> dict[str, Any]:
    """One cell on the embedded reasoner's problems.

    What the figures say:
    - look_backs: the share of a problem's look-backs that are right (0 where its output has none),
      as a mean over problems;
    - whole: the share of problems whose trace is right to the end;
    - local, teacher-forced alone: the share right of all other tokens, which need no look-back;
    - query_bytes: of the query buffer, a request.
    """
    llm, query_bytes = cell.open(options, options.length)
    if llm.model_config.vocab_size != len(task.WORDS):
        raise ValueError(
            f"model={options.model!r} does not speak the reasoner's words; --problems FILE is for it"
        )
    work = solve_forced if options.teacher_forced else solve
    grades, local = work(llm, problems, bar.update)
    look_backs = [grade.right / max(grade.look_backs, 1) for grade in grades]
    whole = [float(grade.whole) for grade in grades]
    right = {"look_backs": common.bootstrap(look_backs), "whole": common.bootstrap(whole)}
    if local:
        right["local"] = common.bootstrap(local)
    return {
        **right,
        "shares": {"look_backs": look_backs, "whole": whole},
        "output_tokens": llm.stats.output_tokens / len(problems),
        "cached_tokens": llm.stats.peak_cached_tokens,
        "query_bytes": query_bytes,
        "seconds": llm.stats.prefill_seconds + llm.stats.decode_seconds,
    }


def _is_problem(line: dict[str, Any]) -> bool:
    """Whether a line of --problems is what PROBLEM says."""
    answer = line.get("answer")
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        return False
    messages = line.get("messages")
    if messages is None:
        return isinstance(line.get("prompt"), str)
    return are_messages(messages)


def _on_file(cell: Cell, options: Namespace, problems: list[dict], bar: tqdm) -> dict[str, Any]:
    """pass@1 and lengths over a file's problems.

    Its results lie beside it, one line a problem and settings. What they hold is not run again, so
    a study that was interrupted goes on where it stopped.
    """
    # 1. The sampling: what was said, over the paper's where that is asked for
    sampling = dict(PAPER) if options.paper else {}
    for name in ("temperature", "top_p", "max_tokens"):
        if getattr(options, name) is not None:
            sampling[name] = getattr(options, name)
    params = SamplingParams(**sampling, n=options.n)

    # 2. A result's key: the problem, and every setting that its answers depend on
    settings = {name: getattr(options, name) for name in ("model", "dtype", "seed", "raw")}
    settings["sampling"] = asdict(params)
    settings["eviction"] = asdict(cell.settings) if cell.settings else None
    keys = [_key(problem, settings) for problem in problems]

    # 3. What an earlier run has found
    path = options.problems.with_suffix(".results.jsonl")
    done = {record["key"]: record for record in _earlier(path)}
    missing = {key: problem for key, problem in zip(keys, problems, strict=True) if key not in done}
    bar.update(len(problems) - len(missing))

    # 4. The others, each written as soon as it is known. One that failed is left to the next run
    if missing:
        with open(path, "a", encoding="utf-8") as file:
            for record in _answers(cell, options, params, missing):
                done[record["key"]] = record
                bar.update()
                if not any(attempt["error"] for attempt in record["attempts"]):
                    print(_json(record | {"settings": settings}), file=file, flush=True)
    return _summary([done[key] for key in keys])


def _key(problem: dict, settings: dict[str, Any]) -> str:
    """What names a problem under these settings, the same in every run."""
    return hashlib.sha256(_json([problem, settings]).encode()).hexdigest()[:16]


def _earlier(path: Path) -> list[dict[str, Any]]:
    """The records of a results file, which is created where there is none yet.

    A last line without its end is what an interrupted run left of one, and is cut off.
    """
    path.touch()
    cut_off = path.read_bytes().rpartition(b"\n")[2]
    os.truncate(path, path.stat().st_size - len(cut_off))
    if path.stat().st_size == 0:
        return []
    wanted = {"key", "attempts", "cached_tokens", "query_bytes"}
    said = "what an earlier run wrote (delete the file to begin anew)"
    return read_lines(path, wanted.issubset, said)


def _answers(
    cell: Cell, options: Namespace, params: SamplingParams, problems: dict[str, dict]
) -> Iterator[dict[str, Any]]:
    """A record of each problem (key -> problem), when the last of its attempts has ended."""
    llm, query_bytes = cell.open(options)
    if llm.tokenizer is None:
        named = f"model={options.model!r}"
        raise ValueError(f"{named}: problems are text, and the folder has no tokenizer")

    # 1. Ask everything at once: the engine fills its batch from what waits
    waiting = {}
    for key, problem in problems.items():
        prompt = _prompt(llm, problem, options.raw)
        # A problem has draws of its own, whatever ran before it
        seed = random.Random(f"{options.seed} {_json(problem)}").getrandbits(60)
        most = params.max_tokens
        # the paper's length, or what the context leaves
        if options.paper and options.max_tokens is None:
            most = min(most, max(1, llm.engine.max_model_len - len(prompt)))
        waiting[key] = llm.submit([prompt], replace(params, seed=seed, max_tokens=most))

    # 2. Run, and hand out each problem as soon as all of its attempts have ended
    everything = [request for requests in waiting.values() for request in requests]
    for _ in llm.run(everything):
        over = [key for key, requests in waiting.items() if all(r.finish_reason for r in requests)]
        for key in over:
            requests = waiting.pop(key)
            answer = problems[key]["answer"]
            yield {
                "key": key,
                "attempts": [_attempt(request, answer) for request in requests],
                "cached_tokens": llm.stats.peak_cached_tokens,
                "query_bytes": query_bytes,
            }


def _prompt(llm: LLM, problem: dict, raw: bool) -> list[int]:
    """A problem's token ids: as a chat, unless the model has no template or `raw` refuses it."""
    plain = raw or llm.tokenizer.chat_template is None
    if plain and "prompt" in problem:
        return llm.tokenizer.encode(problem["prompt"])
    messages = problem.get("messages") or [{"role": "user", "content": problem["prompt"]}]
    return llm.chat_prompt(messages)


def _attempt(request: Request, answer: Any) -> dict[str, Any]:
    """What one run of a problem came to, as the results file keeps it."""
    text = request.text or ""
    return {
        "text": text,
        "answer": grading.answer_in(text),
        "right": grading.is_right(text, answer),
        "finish_reason": request.finish_reason,
        "error": request.error,
        "output_tokens": len(request.output_token_ids),
    }


def _summary(records: list[dict]) -> dict[str, Any]:
    """A row of a file's problems. `cut`: the share of attempts that --max-tokens or the
    context ended.

    pass@1 is the mean over problems of the share of attempts that are right; a failed one is wrong.
    ValueError where all attempts failed.
    """
    attempts = [attempt for record in records for attempt in record["attempts"]]
    ended = [attempt for attempt in attempts if not attempt["error"]]
    failed = [attempt["error"] for attempt in attempts if attempt["error"]]
    if not ended:
        raise ValueError(failed[0])
    shares = [fmean(attempt["right"] for attempt in record["attempts"]) for record in records]
    return {
        "pass_at_1": common.bootstrap(shares),
        "shares": {"pass_at_1": shares},
        "output_tokens": fmean(attempt["output_tokens"] for attempt in ended),
        "longest": max(attempt["output_tokens"] for attempt in ended),
        "cut": fmean(attempt["finish_reason"] == "length" for attempt in ended),
        "errors": len(failed),
        "cached_tokens": max(record["cached_tokens"] for record in records),
        "query_bytes": records[0]["query_bytes"],
        "first_error": failed[0] if failed else None,
    }


def table(result: dict[str, Any]) -> str:
    """The rows for people: shares with their intervals; query bytes are those kept for
    each request."""
    head = [name.replace("_", " ") for name in result["rows"][0]]
    rows = [[_shown(value) for value in row.values()] for row in result["rows"]]
    return common.columns(head, rows)


def _shown(value: Any) -> Any:
    """A cell of the table: a mean with its interval, a number, or a name as it is."""
    if isinstance(value, dict):
        return common.show(value, ".3f")
    if isinstance(value, float):
        return f"{value:.4g}"
    return value


def charts(result: dict[str, Any]) -> list[plots.Chart]:
    """Accuracy over budget, a line for each policy (the paper's Figure 8), a chart for each
    protection."""
    under = [row for row in result["rows"] if row["budget"]]
    budgets = {row["budget"] for row in under}
    protections = list(dict.fromkeys(row["protect"] for row in under))
    measures = [name for name in CHARTED if name in result["rows"][0]]
    note = common.chart_note(result, _sample(result))
    found = []
    for name, protect in product(measures, protections):
        # Points of a line: budget, mean, and the interval's two ends
        series: dict[str, list[tuple]] = {}
        for row in result["rows"]:
            if row["protect"] not in (protect, None):
                continue
            share = row[name]
            # The full cache has no budget: it is a level line over all of them
            at = [row["budget"]] if row["budget"] else budgets
            points = [(budget, share["mean"], share["low"], share["high"]) for budget in at]
            series.setdefault(row["policy"], []).extend(points)
        called, axis = CHARTED[name]
        kept = "the prompt" if protect == "prompt" else f"the first {protect} tokens"
        title = f"{called}; always kept: {kept}"
        found.append(plots.lines(title, common.BUDGET_AXIS, axis, series, log_x=True, note=note))
    return found


def _sample(result: dict[str, Any]) -> str:
    """How much was measured, in words."""
    if result["problems"] == "reasoner":
        return f"n = {result['n']} problems of {result['length']} tokens"
    return f"n = {result['num_problems']} problems, {result['n']} runs of each"
