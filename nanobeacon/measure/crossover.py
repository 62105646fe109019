"""What `bench.py crossover` measures: from which output length on a budget pays, and what
it costs before.

Full cache and budgets decode the same batch in turns of a few dozen steps, each in its own process,
never two at once. Knows seconds and lengths.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from statistics import median
from typing import Any

from tqdm import tqdm

from . import plots
from .common import chart_note, columns, names, numbers
from .systems import System, changed, start, systems_of


def add_arguments(p: ArgumentParser) -> None:
    p.set_defaults(prompt_length=64, output_length=2048, repeats=1, shared_prefix=0)
    p.add_argument("--batch", type=numbers, default=[1, 8], metavar="N,N", help="requests at once (1,8)")
    p.add_argument("--policies", type=names, default=["beacon"], metavar="A,B", help="default: beacon")
    p.add_argument("--budgets", type=numbers, default=[256, 512], metavar="N,N", help="default: 256,512")
    p.add_argument("--turn", type=int, default=64, help="steps until the next one's turn (default: 64)")


def run(options: Namespace) -> dict[str, Any]:
    """One row for each batch, policy and budget, with the curves that it was read from."""
    if min(*options.batch, options.turn) < 1:
        raise ValueError(f"batch={options.batch}, turn={options.turn}: numbers of at least 1 are possible")
    policies = [policy for policy in options.policies if policy != "full"]
    if not policies:
        raise ValueError("policies=full: a policy that evicts is needed, to be compared with it")
    if max(options.budgets) >= options.output_length:
        said = f"budgets={max(options.budgets)}: {options.output_length} output tokens never reach it"
        raise ValueError(f"{said}; smaller ones or a longer --output-length are possible")
    systems = systems_of(["full", *policies], options.budgets, [])
    rows = []
    for batch in options.batch:
        lengths, curves, reports = _curves(systems, changed(options, batch=batch))
        full_seconds = curves[0]  # the first system is the full cache
        for i, system in enumerate(systems[1:], 1):
            row = {
                "label": system.label,
                "policy": system.policy,
                "budget": system.budget,
                "batch": batch,
                **verdict(lengths, full_seconds, curves[i]),
                "evictions": reports[i]["evictions"],
                "kv_bytes": reports[i]["kv_bytes"],
                "full_kv_bytes": reports[0]["kv_bytes"],
                "lengths": lengths,
                "full_seconds": full_seconds,
                "seconds": curves[i],
            }
            rows.append(row)
    return {"n": options.repeats, "seed": options.seed, "turn": options.turn, "rows": rows}


def _curves(systems: list[System], job: Namespace) -> tuple[list[int], list[list[float]], list[dict]]:
    """(tokens decoded of a request by the end of each turn, each system's seconds of the turns as
    medians over the repeats, the systems' last reports)."""
    taken: list[list[list[float]]] = [[] for _ in systems]  # of each system and repeat
    with ExitStack() as stack, tqdm(total=job.repeats * job.output_length, leave=False, disable=None) as bar:
        bar.set_description(f"batch {job.batch}")
        workers = [stack.enter_context(start(system, job)) for system in systems]
        for repeat in range(job.repeats):
            tokens = []
            for worker, repeats in zip(workers, taken, strict=True):
                worker.call("begin", repeat)
                repeats.append([])

            # Turns until the full cache has no step left; then none of the others has
            while True:
                turns = [worker.call("advance", job.turn) for worker in workers]
                if not turns[0]:
                    break
                for repeats, steps in zip(taken, turns, strict=True):
                    repeats[-1].append(sum(step[1] for step in steps))
                tokens.append(sum(step[2] for step in turns[0]))
                bar.update(len(turns[0]))
                left_over = len(turns[0]) < job.turn
            # too few steps for a verdict: part of the turn before
            if left_over and len(tokens) > 1:
                for turns in (tokens, *(repeats[-1] for repeats in taken)):
                    turns[-2:] = [sum(turns[-2:])]
        reports = [worker.call("report") for worker in workers]
    lengths = [count // job.batch for count in accumulate(tokens)]
    curves = []
    for repeats in taken:
        curves.append([median(seconds) for seconds in zip(*repeats, strict=True)])
    return lengths, curves, reports


def verdict(lengths: Sequence[int], full: Sequence[float], budget: Sequence[float]) -> dict[str, Any]:
    """What the seconds of each turn, ending at `lengths`, say. None: not within them.

    pays_in_total: from here on all so far took no longer than with the full cache; pays_per_step:
    from here on each turn was faster; worst_cost: the most by which all so far took longer, as a
    share, at_length.
    """
    costs = [b / f - 1 for b, f in zip(accumulate(budget), accumulate(full), strict=True)]
    worst = max(range(len(costs)), key=costs.__getitem__)
    return {
        "pays_in_total": _from_here_on([cost <= 0 for cost in costs], lengths),
        "pays_per_step": _from_here_on([b < f for b, f in zip(budget, full, strict=True)], lengths),
        "worst_cost": costs[worst],
        "at_length": lengths[worst],
        "speedup": sum(full) / sum(budget),
    }


def _from_here_on(good: Sequence[bool], lengths: Sequence[int]) -> int | None:
    """The first length from which on everything is good."""
    bad = max((i for i, yes in enumerate(good) if not yes), default=-1)
    return lengths[bad + 1] if bad + 1 < len(good) else None


def table(result: dict[str, Any]) -> str:
    """A line for each batch, policy and budget."""
    head = ["policy", "batch", "pays in total from", "per step from", "worst cost", "at length"]
    head += ["speed-up over all", "KV MB", "full KV MB"]
    lines = []
    for row in result["rows"]:
        never = f"not by {row['lengths'][-1]}"
        line = [
            row["label"],
            row["batch"],
            row["pays_in_total"] or never,
            row["pays_per_step"] or never,
            f"{max(row['worst_cost'], 0):.1%}",
            row["at_length"],
            f"{row['speedup']:.2f}",
            f"{row['kv_bytes'] / 1e6:,.1f}",
            f"{row['full_kv_bytes'] / 1e6:,.1f}",
        ]
        lines.append(line)
    note = "Lengths: tokens decoded of a request. Cost: time beyond the full cache's, up to that length."
    return f"{columns(head, lines)}\n\n{note}"


def charts(result: dict[str, Any]) -> list[plots.Chart]:
    """A step's time over the length, a chart for each batch."""
    found: dict[int, dict[str, list[tuple]]] = {}
    for row in result["rows"]:
        series = found.setdefault(row["batch"], {})
        for name, seconds in (("full", row["full_seconds"]), (row["label"], row["seconds"])):
            points = []
            before = 0  # the length at which a turn begins
            for length, taken in zip(row["lengths"], seconds, strict=True):
                steps = length - before
                before = length
                if steps > 0:
                    points.append((length, 1000 * taken / steps))
            series[name] = points
    x = "tokens decoded of each request"
    y = "milliseconds a step"
    note = chart_note(result, f"n = {result['n']} repeats")
    return [
        plots.lines(f"Decoding, batch {batch}", x, y, series, from_zero=True, note=note)
        for batch, series in found.items()
    ]
