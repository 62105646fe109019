"""What `bench.py throughput` measures: tokens/s, time per step and memory, of systems that take turns.

Every system of a batch size stands ready in its own process, and they run one repeat each in turn, never two
at once, so that a slow minute of the machine hits all alike. Knows the paper's Table 4.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

from tqdm import tqdm

from nanobeacon.config import read_config
from nanobeacon.parallel import launched
from nanobeacon.policies import settle

from . import GENERATED, TABLE_4, plots
from .common import chart_note, columns, filled, names, numbers, refuse, show, spread
from .systems import PAGE, System, changed, pages_of, start, systems_of, with_prefix_cache

DEFAULTS = dict(batch=[8], policies=["full", "beacon"], budgets=[256], vs=[], output_length=512, scale=1)


def add_arguments(p: ArgumentParser) -> None:
    p.set_defaults(prompt_length=64)
    p.add_argument("--output-length", type=int, help="tokens (default: 512)")
    p.add_argument("--batch", type=numbers, metavar="N,N", help="requests at once (default: 8)")
    p.add_argument("--policies", type=names, metavar="A,B", help="default: full,beacon")
    p.add_argument("--budgets", type=numbers, metavar="N,N", help="default: 256")
    p.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N",
        help="first tokens that all prompts of a repeat share: what the prefix cache saves (default: none)",
    )  # fmt: skip
    p.add_argument("--no-prefix-cache", action="store_true", help="of --shared-prefix: no rows with it")
    p.add_argument("--vs", type=names, metavar="A,B", help="transformers, kvpress")
    p.add_argument("--table4", action="store_true", help="the paper's Table 4, mostly with --preset qwen3-4b")
    p.add_argument("--scale", type=int, help="divides Table 4's batch, budget and output length")
    p.add_argument("--max-batch", action="store_true", help="the largest batch that fits, for each policy")
    p.add_argument(
        "--memory", type=float, metavar="GB", help="of --max-batch (default: 80 %% of what is free)"
    )


def run(options: Namespace) -> dict[str, Any]:
    """One row for each system and batch. ValueError for whatever cannot be measured."""
    if launched() > 1:
        refuse(options, ("vs", "max_batch", "plot", "output"), "this needs one process, without torchrun")
    if options.table4:
        if options.shared_prefix:
            raise ValueError("--shared-prefix: Table 4's prompts have nothing in common")
        fixed = ("max_batch", "batch", "policies", "budgets", "vs", "output_length")
        refuse(options, fixed, "Table 4 has its own; --scale divides them")
    else:
        refuse(options, ("scale",), "only --table4 can be scaled")
    if options.max_batch:
        refuse(options, ("batch", "vs"), "--max-batch looks for the engine's own")
    else:
        refuse(options, ("memory",), "only --max-batch asks for it")
    if options.memory is not None and not 0 < options.memory < float("inf"):
        raise ValueError(f"--memory {options.memory}: a number of GB above 0 is possible")
    asked, options = options, filled(options, DEFAULTS)
    if min(*options.batch, options.scale) < 1:
        raise ValueError(f"batch={options.batch}, scale={options.scale}: numbers of at least 1 are possible")
    if not 0 <= options.shared_prefix <= options.prompt_length:
        possible = f"0 to {options.prompt_length} are possible (the prompt's length)"
        raise ValueError(f"--shared-prefix {options.shared_prefix}: {possible}")
    systems, rows = systems_of(options.policies, options.budgets, options.vs), []
    if not options.shared_prefix:
        refuse(asked, ("no_prefix_cache",), "only --shared-prefix has anything to find")
    elif not options.no_prefix_cache:
        systems = with_prefix_cache(systems)
    if not any(system.budget for system in systems):
        refuse(asked, ("budgets",), "none of the policies has a budget")
    if options.table4:
        rows = _table4(options)
    elif options.max_batch:
        own = [system for system in systems if system.name == "nanobeacon"]
        for system in own:

            def measured(batch: int, system: System = system) -> dict[str, Any]:
                return alternate([system], options, batch=batch)[0]

            rows.append(largest(system, options, measured))
    else:
        for batch in options.batch:
            rows += alternate(systems, options, batch=batch)
    return {"n": options.repeats, "seed": options.seed, "rows": rows}


def alternate(systems: list[System], options: Namespace, **changes: int) -> list[dict[str, Any]]:
    """Measure systems in turn, A B A B …; one row each. `changes` replace options."""
    job, rows, waiting = changed(options, **changes), [], {"leave": False, "disable": None}
    with ExitStack() as stack:
        workers = [stack.enter_context(start(s, job)) for s in tqdm(systems, "loading", **waiting)]
        runs: list[list[dict[str, Any]]] = [[] for _ in systems]
        order = [(repeat, i) for repeat in range(job.repeats) for i in range(len(systems))]
        for repeat, i in tqdm(order, f"batch {job.batch}", **waiting):
            runs[i].append(workers[i].call("measure", repeat))
    for system, taken in zip(systems, runs, strict=True):
        row = {"label": system.label, "system": system.name, "policy": system.policy, "budget": system.budget}
        row |= {name: getattr(job, name) for name in ("batch", "prompt_length", "output_length")}
        row |= {name: [run[name] for run in taken] for name in taken[0]}  # one of each for a repeat
        for phase in ("prefill", "decode"):
            pairs = zip(row[f"{phase}_tokens"], row[f"{phase}_seconds"], strict=True)
            row[f"{phase}_tokens_per_second"] = spread([tokens / seconds for tokens, seconds in pairs])
        row["ratios"] = {}
        rows.append(row)
        for other in rows:  # those under the same budget or none, repeat by repeat
            if system.name == "nanobeacon" != other["system"] and other["budget"] in (None, system.budget):
                pairs = zip(other["decode_seconds"], row["decode_seconds"], strict=True)
                row["ratios"][other["label"]] = spread([theirs / ours for theirs, ours in pairs])
    return rows


def _table4(options: Namespace) -> list[dict[str, Any]]:
    """The paper's rows, one after the other, since some fill the machine."""
    rows, length = [], max(2, GENERATED // options.scale)
    systems = [System(policy=p, budget=budget and budget // options.scale) for p, budget, _, _ in TABLE_4]
    for system in systems:
        try:
            settle(system.policy, system.budget)
        except ValueError as error:
            raise ValueError(f"--scale {options.scale} is too large: {error}") from None
    for system, (_, _, batch, rate) in zip(systems, TABLE_4, strict=True):
        (row,) = alternate([system], options, batch=max(1, batch // options.scale), output_length=length)
        rows.append(row | {"paper": rate})
    return rows


def request_bytes(system: System, options: Namespace) -> int:
    """What one more request takes at most: its pages, and its row of the query buffer."""
    shape = read_config(options.model)
    settings = settle(system.policy, system.budget)
    itemsize = 4 if options.dtype == "float32" else 2
    vector = shape.num_layers * (shape.head_dim * itemsize + 2)  # and half a position, of four bytes
    pages = pages_of(options, system.budget) + 1
    found = pages * PAGE * shape.num_kv_heads * 2 * vector
    if settings is not None:
        found += settings.capacity * shape.num_heads * vector
    return found


def largest(system: System, options: Namespace, measured: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """`measured` of the largest batch that fits: reckoned from what is free, run, lowered if that fails."""
    with start(system, changed(options, batch=1)) as worker:
        room = options.memory * 1e9 if options.memory else 0.8 * worker.call("free")
    batch = int(room // request_bytes(system, options))
    while batch:
        try:
            return measured(batch)
        except RuntimeError as error:
            if "OutOfMemory" not in str(error) and "killed" not in str(error):
                raise
            batch = batch * 9 // 10
    raise ValueError(f"{system.label}: not even one request fits into {room / 1e9:.1f} GB")


def table(result: dict[str, Any]) -> str:
    """A line a row; for Table 4 the paper's tokens/s too, and how many times the first row both are."""
    rows, lines = result["rows"], []
    first, others = rows[0], sorted({name for row in rows for name in row["ratios"]})
    head = [
        "system",
        "batch",
        "prefill tok/s",
        "decode tok/s",
        "ms/step first 1/8",
        "ms/step last 1/8",
        "KV MB",
    ]
    head += ["peak MB", "evictions", "their share", *(f"x {name}" for name in others)]
    head += ["x full", "paper tok/s", "x full"] if "paper" in first else []
    for row in rows:
        rate = row["decode_tokens_per_second"]
        spent = zip(row["eviction_seconds"], row["decode_seconds"], strict=True)
        line = [row["label"], row["batch"], show(row["prefill_tokens_per_second"]), show(rate)]
        line += [f"{median(row[name]):.1f}" for name in ("step_ms_start", "step_ms_end")]
        line += [f"{max(row[name]) / 1e6:,.1f}" for name in ("kv_bytes", "memory_bytes")]
        counted = [max(row["evictions"]), f"{median(e / d for e, d in spent):.1%}"]
        line += counted if row["system"] == "nanobeacon" else [None, None]
        line += [show(row["ratios"][name], ".2f") if name in row["ratios"] else None for name in others]
        if "paper" in row:
            line.append(f"{rate['median'] / first['decode_tokens_per_second']['median']:.2f}")
            line += [row["paper"], f"{row['paper'] / first['paper']:.2f}"]
        lines.append(line)
    return columns(head, lines)


def charts(result: dict[str, Any]) -> list[plots.Chart]:
    """Tokens per second, a bar for each row."""
    groups: dict[str, dict[str, tuple]] = {}
    for row in result["rows"]:
        rate = row["decode_tokens_per_second"]
        groups.setdefault(f"batch {row['batch']}", {})[row["label"]] = tuple(rate.values())
    note = chart_note(result, f"n = {result['n']} repeats")
    title = "Decoding: median, least and most of the repeats"
    return [plots.rows(title, "tokens per second", groups, from_zero=True, note=note)]
