"""What `bench.py throughput` measures: tokens per second, time per step and memory, of systems that take turns.

Every system of a batch size stands ready in its own process, and they run one repeat each in turn, never two at once, so
that a slow minute of the machine hits all alike. Knows the paper's Table 4; how a system runs is `systems.py`.
"""

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from nanobeacon.config import read_config
from nanobeacon.policies import settle

from . import plots, systems
from .common import WorkerError, names, numbers, show, spread, table
from .systems import System

TABLE_4 = [  # the paper's, Qwen3-4B on an A100 80 GB: policy, budget, batch, tokens/s, GB
    ("full", None, 14, 82.3, 77.0),
    ("beacon", 2048, 14, 356.4, 13.3),
    ("rpc", 2048, 192, 725.4, 79.0),
    ("beacon", 2048, 192, 704.8, 79.3),
    ("rpc", 1024, 320, 1380.8, 72.0),
    ("snapkv", 1024, 320, 1380.7, 72.4),
    ("beacon", 1024, 320, 1345.9, 72.5),
]
GENERATED = 32768  # tokens of a request in Table 4


def add_arguments(p: ArgumentParser) -> None:
    systems.add_arguments(p, prompt_length=64, output_length=512)
    p.add_argument("--batch", type=numbers, default=[8], metavar="N,N", help="requests at once (default: 8)")
    p.add_argument("--policies", type=names, default=["full", "beacon"], metavar="A,B", help="default: full,beacon")
    p.add_argument("--budgets", type=numbers, default=[256], metavar="N,N", help="default: 256")
    p.add_argument("--vs", type=names, default=[], metavar="A,B", help="transformers, kvpress")
    p.add_argument("--table4", action="store_true", help="the rows of the paper's Table 4, beside its numbers")
    p.add_argument("--scale", type=int, default=1, help="divides Table 4's batch, budget and output length")
    p.add_argument("--max-batch", action="store_true", help="first find the largest batch that fits, per policy")
    p.add_argument("--memory", type=float, metavar="GB", help="for --max-batch: the cache's (default: 80 %% of what is free)")


def run(options: Namespace) -> dict[str, Any]:
    """Rows, one for each system and batch. ValueError for whatever cannot be measured."""
    if options.table4 and options.model is None:
        options.preset = options.preset or "qwen3-4b"
    if min(*options.batch, options.scale) < 1:
        raise ValueError(f"batch={options.batch}, scale={options.scale}: numbers of at least 1 are possible")
    chosen = systems.systems_of(options.policies, options.budgets, options.vs)
    with systems.job_of(options) as job:
        if options.table4:
            rows = _table4(job)
        elif options.max_batch:
            rows = [row for s in chosen if s.name == "nanobeacon" for row in _largest(s, job)]
        else:
            rows = [row for batch in options.batch for row in alternate(chosen, with_(job, batch=batch))]
    keys = ("load", "device", "dtype", "seed", "prompt_length", "output_length")
    return {"model": options.model or options.preset or "smollm2-135m", "n": options.repeats, "rows": rows} | {
        key: getattr(job, key) for key in keys
    }


def with_(job: Namespace, **changes: Any) -> Namespace:
    return Namespace(**vars(job) | changes)


def alternate(chosen: list[System], job: Namespace) -> list[dict[str, Any]]:
    """Measure systems in turn (A B A B …): one row each."""
    runs: list[list[dict]] = [[] for _ in chosen]
    with ExitStack() as stack, tqdm(total=len(chosen) * (1 + job.repeats), unit="run", leave=False, disable=None) as bar:
        workers = []
        for system in chosen:
            bar.set_description(f"batch {job.batch}: loading {system.label}")
            workers.append(stack.enter_context(systems.start(system, job, job.threads)))
            bar.update()
        for repeat in range(job.repeats):
            for worker, kept in zip(workers, runs, strict=True):
                bar.set_description(f"batch {job.batch}: {worker.name}")
                kept.append(worker.call("measure", repeat))
                bar.update()
    rows = [_row(system, job, kept) for system, kept in zip(chosen, runs, strict=True)]
    for row in rows:  # each repeat against the other system's same repeat
        row["ratios"] = {}
        for other in rows:
            same = other["budget"] in (None, row["budget"])
            if other["system"] != "nanobeacon" and same and row["system"] == "nanobeacon":
                pairs = zip(other["decode_seconds"], row["decode_seconds"], strict=True)
                row["ratios"][other["label"]] = spread([theirs / ours for theirs, ours in pairs])
    return rows


def _row(system: System, job: Namespace, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A system's repeats, summed up. Lists hold one number a repeat."""
    prompt = job.batch * job.prompt_length
    prefill, decode = ([r[name] for r in runs] for name in ("prefill_seconds", "decode_seconds"))
    row = {"label": system.label, "system": system.name, "policy": system.policy, "budget": system.budget}
    row |= {"batch": job.batch, "prompt_length": job.prompt_length, "output_length": job.output_length}
    row |= {"prefill_tokens": prompt, "prefill_seconds": prefill, "decode_tokens": runs[0]["decode_tokens"]}
    row |= {"decode_seconds": decode, "prefill_tokens_per_second": spread([prompt / s for s in prefill])}
    row["decode_tokens_per_second"] = spread([r["decode_tokens"] / r["decode_seconds"] for r in runs])
    row |= {name: spread([r[name] for r in runs]) for name in ("step_ms_start", "step_ms_end")}
    row |= {name: max(r[name] for r in runs) for name in ("kv_bytes", "memory_bytes", "evictions")}
    # A prompt's evictions, where there are any, lie in its prefill
    shares = [r["eviction_seconds"] / (r["prefill_seconds"] + r["decode_seconds"]) for r in runs]
    return row | {"eviction_share": spread(shares)}


def _table4(job: Namespace) -> list[dict[str, Any]]:
    """The paper's rows, one after the other, since some fill the machine."""
    rows = []
    for policy, budget, batch, rate, gigabytes in TABLE_4:
        smaller = {"batch": max(1, round(batch / job.scale)), "output_length": max(2, GENERATED // job.scale)}
        system = System(policy=policy, budget=budget // job.scale if budget else None)
        settle(system.policy, system.budget)
        (row,) = alternate([system], with_(job, **smaller))
        rows.append(row | {"paper_tokens_per_second": rate, "paper_gigabytes": gigabytes})
    return rows


def _largest(system: System, job: Namespace) -> list[dict[str, Any]]:
    """The row of the largest batch that fits: reckoned from what is free, then tried, and lowered while it fails."""
    shape, settings = read_config(job.model), settle(system.policy, system.budget)
    size = 2 if job.dtype != "float32" else 4
    slot = shape.num_layers * shape.num_kv_heads * (2 * shape.head_dim * size + 4)  # and its position
    queries = settings.capacity * shape.num_layers * shape.num_heads * (shape.head_dim * size + 4) if settings else 0
    with systems.start(system, with_(job, batch=1), job.threads) as worker:
        room = job.memory * 1e9 if job.memory else 0.8 * worker.call("free")
    batch = int(room // ((systems.pages_of(job, system.budget) + 1) * systems.PAGE * slot + queries))
    while batch:
        try:
            return alternate([system], with_(job, batch=batch))
        except WorkerError as error:
            if "OutOfMemory" not in error.kind and "ended" not in error.kind:
                raise
            batch = batch * 9 // 10
    raise ValueError(f"{system.label}: not even one request fits into {room / 1e9:.1f} GB")


def table_(result: dict[str, Any]) -> str:
    """A line a row; where there is a paper's number, it and both ratios to the first row."""
    rows, others = result["rows"], sorted({name for r in result["rows"] for name in r["ratios"]})
    paper, lines = "paper_tokens_per_second" in rows[0], []
    head = ["system", "batch", "prefill tok/s", "decode tok/s", "ms/step first", "last eighth", "KV MB", "peak MB"]
    head += ["evictions", "share %", *(f"x {name}" for name in others)]
    for r in rows:
        line = [r["label"], r["batch"], show(r["prefill_tokens_per_second"]), show(r["decode_tokens_per_second"])]
        line += [f"{r[name]['median']:.1f}" for name in ("step_ms_start", "step_ms_end")]
        line += [f"{r[name] / 1e6:,.0f}" for name in ("kv_bytes", "memory_bytes")]
        line += [r["evictions"], f"{100 * r['eviction_share']['median']:.1f}"]
        line += [show(r["ratios"][name], ".2f") if name in r["ratios"] else None for name in others]
        if paper:
            ours, theirs = (x["decode_tokens_per_second"]["median"], x["paper_tokens_per_second"]
            line += []
        lines.append(line)
    return table(head, lines)
