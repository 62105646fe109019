"""What `bench.py throughput` measures: tokens/s, time per step and memory, of systems
that take turns.

Every system of a batch size stands ready in its own process, and they run one repeat each in turn,
never two at once, so that a slow minute of the machine hits all alike. Knows the paper's Table 4.
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

DEFAULTS = {
    "batch": [8],
    "policies": ["full", "beacon"],
    "budgets": [256],
    "vs": [],
    "output_length": 512,
    "scale": 1,
}


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
    # 1. The options: what was asked for, and with defaults
    asked = options
    _refuse_what_changes_nothing(asked)
    options = filled(asked, DEFAULTS)
    if min(*options.batch, options.scale) < 1:
        given = f"batch={options.batch}, scale={options.scale}"
        raise ValueError(f"{given}: numbers of at least 1 are possible")
    if not 0 <= options.shared_prefix <= options.prompt_length:
        possible = f"0 to {options.prompt_length} are possible (the prompt's length)"
        raise ValueError(f"--shared-prefix {options.shared_prefix}: {possible}")

    # 2. The systems
    systems = systems_of(options.policies, options.budgets, options.vs)
    if options.shared_prefix and not options.no_prefix_cache:
        systems = with_prefix_cache(systems)
    if not any(system.budget for system in systems):
        refuse(asked, ("budgets",), "none of the policies has a budget")

    # 3. Their rows
    if options.table4:
        rows = _table4(options)
    elif options.max_batch:
        rows = _largest_batches(systems, options)
    else:
        rows = []
        for batch in options.batch:
            rows += alternate(systems, options, batch=batch)
    return {"n": options.repeats, "seed": options.seed, "rows": rows}


def _refuse_what_changes_nothing(options: Namespace) -> None:
    """ValueError for an option given where another one leaves nothing for it to decide."""
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
    if not options.shared_prefix:
        refuse(options, ("no_prefix_cache",), "only --shared-prefix has anything to find")


def alternate(systems: list[System], options: Namespace, **changes: int) -> list[dict[str, Any]]:
    """Measure systems in turn, A B A B …; one row each. `changes` replace options."""
    job = changed(options, **changes)

    # 1. The runs of each system, one repeat of all before the next one's
    runs: list[list[dict[str, Any]]] = [[] for _ in systems]
    with ExitStack() as stack:
        workers = []
        for system in tqdm(systems, "loading", leave=False, disable=None):
            workers.append(stack.enter_context(start(system, job)))
        order = [(repeat, i) for repeat in range(job.repeats) for i in range(len(systems))]
        for repeat, i in tqdm(order, f"batch {job.batch}", leave=False, disable=None):
            runs[i].append(workers[i].call("measure", repeat))

    # 2. A row of each, and how it compares with the other systems of this job
    rows = [_row(system, taken, job) for system, taken in zip(systems, runs, strict=True)]
    for i, row in enumerate(rows):
        row["ratios"] = _ratios(row, rows[:i])
    return rows


def _row(system: System, runs: list[dict[str, Any]], job: Namespace) -> dict[str, Any]:
    """What a system's runs took: a list of one value a repeat, and tokens per second of
    both phases."""
    row = {
        "label": system.label,
        "system": system.name,
        "policy": system.policy,
        "budget": system.budget,
        "batch": job.batch,
        "prompt_length": job.prompt_length,
        "output_length": job.output_length,
    }
    for name in runs[0]:
        row[name] = [run[name] for run in runs]
    for phase in ("prefill", "decode"):
        pairs = zip(row[f"{phase}_tokens"], row[f"{phase}_seconds"], strict=True)
        row[f"{phase}_tokens_per_second"] = spread([tokens / seconds for tokens, seconds in pairs])
    return row


def _ratios(row: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How many times as fast as each other system the engine decodes, repeat by repeat.

    Compared are those under the same budget or none. Other systems' rows have no ratios.
    """
    found = {}
    if row["system"] != "nanobeacon":
        return found
    for other in others:
        if other["system"] == "nanobeacon" or other["budget"] not in (None, row["budget"]):
            continue
        pairs = zip(other["decode_seconds"], row["decode_seconds"], strict=True)
        found[other["label"]] = spread([theirs / ours for theirs, ours in pairs])
    return found


def _table4(options: Namespace) -> list[dict[str, Any]]:
    """The paper's rows, one after the other, since some fill the machine."""
    # 1. The systems, all of which must be possible before the first one runs for long
    systems = []
    for policy, budget, _, _ in TABLE_4:
        scaled = None if budget is None else budget // options.scale
        systems.append(System(policy=policy, budget=scaled))
        try:
            settle(policy, scaled)
        except ValueError as error:
            raise ValueError(f"--scale {options.scale} is too large: {error}") from None

    # 2. Their rows, each beside the paper's tokens per second
    rows = []
    output_length = max(2, GENERATED // options.scale)
    for system, (_, _, paper_batch, paper_rate) in zip(systems, TABLE_4, strict=True):
        batch = max(1, paper_batch // options.scale)
        (row,) = alternate([system], options, batch=batch, output_length=output_length)
        rows.append(row | {"paper": paper_rate})
    return rows


def _largest_batches(systems: list[System], options: Namespace) -> list[dict[str, Any]]:
    """A row of each of the engine's own systems, at the largest batch that fits."""
    rows = []
    for system in systems:
        if system.name != "nanobeacon":
            continue

        def measured(batch: int, system: System = system) -> dict[str, Any]:
            (row,) = alternate([system], options, batch=batch)
            return row

        rows.append(largest(system, options, measured))
    return rows


def request_bytes(system: System, options: Namespace) -> int:
    """What one more request takes at most: its pages, and its row of the query buffer."""
    shape = read_config(options.model)
    settings = settle(system.policy, system.budget)
    itemsize = 4 if options.dtype == "float32" else 2
    # A key, a value or a query of every layer
    # and half a position, of four bytes
    vector = shape.num_layers * (shape.head_dim * itemsize + 2)
    pages = pages_of(options, system.budget) + 1
    found = pages * PAGE * shape.num_kv_heads * 2 * vector
    if settings is not None:
        found += settings.capacity * shape.num_heads * vector
    return found


def largest(system: System, options: Namespace, measured: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """`measured` of the largest batch that fits: reckoned from what is free, run, lowered
    if that fails.

    ValueError where not even one request fits.
    """
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
    """A line a row; for Table 4 the paper's tokens/s too, and how many times the first
    row both are."""
    rows = result["rows"]
    others = sorted({name for row in rows for name in row["ratios"]})
    head = [
        "system",
        "batch",
        "prefill tok/s",
        "decode tok/s",
        "ms/step first 1/8",
        "ms/step last 1/8",
        "KV MB",
        "peak MB",
        "evictions",
        "their share",
        *(f"x {name}" for name in others),
    ]
    if "paper" in rows[0]:
        head += ["x full", "paper tok/s", "x full"]
    return columns(head, [_line(row, rows[0], others) for row in rows])


def _line(row: dict[str, Any], first: dict[str, Any], others: list[str]) -> list[Any]:
    """A row's cells. Times are medians of the repeats, bytes and evictions the most of them."""
    evictions = None
    share = None  # of decoding that the evictions take
    if row["system"] == "nanobeacon":
        evictions = max(row["evictions"])
        spent = zip(row["eviction_seconds"], row["decode_seconds"], strict=True)
        share = f"{median(evicting / decoding for evicting, decoding in spent):.1%}"
    line = [
        row["label"],
        row["batch"],
        show(row["prefill_tokens_per_second"]),
        show(row["decode_tokens_per_second"]),
        f"{median(row['step_ms_start']):.1f}",
        f"{median(row['step_ms_end']):.1f}",
        f"{max(row['kv_bytes']) / 1e6:,.1f}",
        f"{max(row['memory_bytes']) / 1e6:,.1f}",
        evictions,
        share,
    ]
    for name in others:
        line.append(show(row["ratios"][name], ".2f") if name in row["ratios"] else None)
    if "paper" in row:
        rate = row["decode_tokens_per_second"]["median"]
        full_rate = first["decode_tokens_per_second"]["median"]
        line.append(f"{rate / full_rate:.2f}")
        line.append(row["paper"])
        line.append(f"{row['paper'] / first['paper']:.2f}")
    return line


def charts(result: dict[str, Any]) -> list[plots.Chart]:
    """Tokens per second, a bar for each row."""
    groups: dict[str, dict[str, tuple]] = {}
    for row in result["rows"]:
        rate = row["decode_tokens_per_second"]
        bars = groups.setdefault(f"batch {row['batch']}", {})
        bars[row["label"]] = (rate["median"], rate["low"], rate["high"])
    note = chart_note(result, f"n = {result['n']} repeats")
    title = "Decoding: median, least and most of the repeats"
    return [plots.rows(title, "tokens per second", groups, from_zero=True, note=note)]
