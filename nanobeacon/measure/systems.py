"""The systems timed beside each other, each in a process of its own: nanobeacon, transformers, kvpress.

All run the same job: a static batch of random token ids of equal length, greedy, EOS ignored; ids in, ids
out. They are driven step by step, so that they can take turns. Knows how to run and what to count, not what
is compared. A `job` holds a subcommand's options, settled: model (a folder), device, batch, prompt_length …
"""

import inspect
import logging
import random
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from importlib import metadata, util
from itertools import islice
from typing import Any

import torch

from nanobeacon import LLM, SamplingParams
from nanobeacon.config import read_config
from nanobeacon.parallel import join
from nanobeacon.policies import settle

from .common import Worker, free_memory, peak_memory

PAGE, WARM_UP = 16, 8  # tokens of a page; tokens of a run before the first that counts
Step = tuple[float, float, int]  # prefill seconds, decode seconds, tokens decoded (first ones are prefill's)


@dataclass(frozen=True)
class System:
    name: str = "nanobeacon"
    policy: str = "full"
    budget: int | None = None
    prefix_cache: bool = False  # only where prompts share a header: there is nothing to find elsewhere

    @property
    def label(self) -> str:
        """What tables call it: beacon 256, transformers, kvpress snapkv 256."""
        parts = (self.name.replace("nanobeacon", ""), self.policy.replace("full", ""), str(self.budget or ""))
        label = " ".join(filter(None, parts)) or "full"
        return f"{label}, prefix cache" if self.prefix_cache else label


def systems_of(policies: list[str], budgets: list[int], others: list[str]) -> list[System]:
    """The others, then every policy under every budget. ValueError for what is impossible."""
    for name in others:
        if name not in ("transformers", "kvpress") or util.find_spec(name) is None:
            raise ValueError(f"--vs {name}: possible are transformers and kvpress, where installed")
    systems = [System(name) for name in others if name == "transformers"]
    systems += [System(name, "snapkv", b) for name in others if name == "kvpress" for b in budgets]
    systems += [System(policy=p, budget=b) for p in policies for b in ([None] if p == "full" else budgets)]
    for system in systems:
        settle(system.policy, system.budget)
    return systems


def with_prefix_cache(systems: list[System]) -> list[System]:
    """Each of the engine's own systems twice: without its prefix cache and with it."""
    both = []
    for system in systems:
        both.append(system)
        if system.name == "nanobeacon":
            both.append(replace(system, prefix_cache=True))
    return both


def changed(job: Namespace, **options: Any) -> Namespace:
    return Namespace(**vars(job) | options)


def pages_of(job: Namespace, budget: int | None) -> int:
    """Pages that one request needs at most."""
    total = job.prompt_length + job.output_length
    return -(-(total if budget is None else min(total, job.prompt_length + budget)) // PAGE)


def start(system: System, job: Namespace) -> Worker:
    """A system's process, ready once entered. ValueError for a job longer than the model's positions."""
    if job.prompt_length + job.output_length > (most := read_config(job.model).context):
        asked = f"prompt_length={job.prompt_length}, output_length={job.output_length}"
        raise ValueError(f"{asked}: {most} tokens together are possible (the model's positions)")
    make = Nanobeacon if system.name == "nanobeacon" else Transformers
    return Worker(system.label, job.threads, make, system, job)


class Subject:
    """What the systems share; each has `_load`, `_steps(prompts, output_length)` and `_counts`."""

    def __init__(self, system: System, job: Namespace) -> None:
        self.system, self.job, self.shape = system, job, read_config(job.model)
        self._load()
        warm_up = WARM_UP
        if system.name != "nanobeacon" and job.device.startswith("cuda"):
            warm_up += system.budget or 0  # an eviction too; the engine has had its own at the start
        self.begin(-1, min(warm_up, job.output_length))
        self.advance()

    def begin(self, repeat: int, output_length: int | None = None) -> None:
        """Pose the prompts of a repeat, the same for every system. -1 is the warm-up, whose prompts no other
        repeat has."""
        job = self.job
        draw = random.Random(f"{job.seed} {repeat}")
        ids = range(self.shape.vocab_size)
        header = draw.choices(ids, k=job.shared_prefix)
        own = job.prompt_length - len(header)
        prompts = [header + draw.choices(ids, k=own) for _ in range(job.batch)]
        self._before = self._counts()
        self._run = self._steps(prompts, output_length or job.output_length)

    def advance(self, steps: int | None = None) -> list[Step]:
        return list(islice(self._run, steps))

    def measure(self, repeat: int) -> dict[str, Any]:
        """One whole run and what it took; step_ms: means over the first and the last eighth of the steps."""
        self.begin(repeat)
        steps = self.advance()
        full = [s for _, s, tokens in steps if tokens == self.job.batch] or [float("nan")]
        eighth, (prefill, decode, tokens) = max(1, len(full) // 8), map(sum, zip(*steps, strict=True))
        took = {"prefill_tokens": self.job.batch * self.job.prompt_length, "prefill_seconds": prefill}
        took |= {"decode_tokens": tokens, "decode_seconds": decode}
        took["step_ms_start"], took["step_ms_end"] = (
            1000 * sum(some) / eighth for some in (full[:eighth], full[-eighth:])
        )
        return took | self.report()

    def report(self) -> dict[str, Any]:
        """What the latest run has counted so far, and the process's peak of memory."""
        now = self._counts()
        since = {name: now[name] - self._before[name] for name in ("evictions", "eviction_seconds")}
        return now | since | {"memory_bytes": peak_memory(self.job.device)}

    def free(self) -> int:
        return free_memory(self.job.device)


class Nanobeacon(Subject):
    """The engine; under torchrun every process has its own worker, and these compute one model together."""

    def _load(self) -> None:
        job, budget = self.job, self.system.budget
        pages = job.batch * (pages_of(job, budget) + 1)  # so much for every seat: each grows as one run
        place = {"device": job.device, "dtype": job.dtype, "load": job.load}
        sizes = {"page_size": PAGE, "num_pages": pages, "max_num_seqs": job.batch}
        graphs = not job.no_cuda_graphs
        eviction = {"policy": self.system.policy, "budget": budget}
        eviction["prefix_cache"] = self.system.prefix_cache
        self._joined = ExitStack()  # for as long as the worker lives
        group = self._joined.enter_context(join(torch.device(job.device).type))
        if group.rank > 0:  # the first one says the same
            logging.getLogger("nanobeacon").setLevel(logging.ERROR)
        self.llm = LLM(job.model, cuda_graphs=graphs, group=group, **place, **sizes, **eviction)

    def _steps(self, prompts: list[list[int]], output_length: int) -> Iterator[Step]:
        params = SamplingParams(max_tokens=output_length, temperature=0.0, ignore_eos=True)
        requests = self.llm.submit(prompts, params)
        for error in filter(None, (r.error for r in requests)):
            raise ValueError(error)
        then, began = vars(self.llm.stats).copy(), time.perf_counter()
        for _ in self.llm.run(requests):  # once for each request of a step: the first tells that it is over
            if self.llm.stats.output_tokens > then["output_tokens"]:
                seconds, now = time.perf_counter() - began, vars(self.llm.stats).copy()
                new = {name: now[name] - then[name] for name in now}
                prefill, decodes = new["prefill_seconds"], new["decode_seconds"] > 0
                yield prefill, seconds - prefill, new["output_tokens"] if decodes else 0
                then, began = now, time.perf_counter()

    def _counts(self) -> dict[str, Any]:
        s = self.llm.stats
        return {"evictions": s.evictions, "eviction_seconds": s.eviction_seconds, "kv_bytes": s.peak_kv_bytes}


class Transformers(Subject):
    """A plain loop of forward passes with sdpa, DynamicCache and argmax (its `generate` is slower); for
    kvpress under a DecodingPress that caches as many tokens as the engine does at that budget."""

    def _load(self) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        job, auto = self.job, transformers.AutoModelForCausalLM
        options = {"dtype": getattr(torch, job.dtype), "attn_implementation": "sdpa"}
        if job.load == "dummy":
            with torch.device(job.device):
                model = auto.from_config(transformers.AutoConfig.from_pretrained(job.model), **options)
        else:
            model = auto.from_pretrained(job.model, **options).to(job.device)
        self.model, self.longest = model.eval(), 0
        self.press = self._press() if self.system.name == "kvpress" else None

    def _press(self) -> Any:
        from packaging.requirements import Requirement

        here = metadata.version("transformers")
        needs = next(Requirement(r) for r in metadata.requires("kvpress") if r.startswith("transformers"))
        if here not in needs.specifier:
            raise ValueError(f"--vs kvpress: it needs {needs}, not {here}; its own environment helps")
        from kvpress import DecodingPress, SnapKVPress

        settings = settle("snapkv", self.system.budget)
        base = SnapKVPress(window_size=min(settings.window, settings.period - 1))  # it has no older queries
        return DecodingPress(base, settings.period, target_size=self.job.prompt_length + settings.kept)

    @torch.inference_mode()
    def _steps(self, prompts: list[list[int]], output_length: int) -> Iterator[Step]:
        from transformers import DynamicCache

        ids, cache, device = torch.tensor(prompts, device=self.job.device), DynamicCache(), self.job.device
        known = inspect.signature(self.model.forward).parameters
        cached = {"cache" if "cache" in known else "past_key_values": cache}  # the old name goes in 5.40
        with self.press(self.model) if self.press else nullcontext():
            for i in range(output_length):
                began, more = time.perf_counter(), {"use_cache": True, "logits_to_keep": 1}
                if self.press and i:  # the cache is shorter than the text, so the position has to be told
                    more["position_ids"] = torch.full((1, 1), self.job.prompt_length + i - 1, device=device)
                logits = self.model(ids, **cached, **more).logits
                ids = logits[:, -1].argmax(-1, keepdim=True)
                ids.tolist()  # whoever serves tokens reads each of them
                seconds, self.longest = time.perf_counter() - began, max(self.longest, cache.get_seq_length())
                yield (0.0, seconds, len(ids)) if i else (seconds, 0.0, 0)

    def _counts(self) -> dict[str, Any]:
        s, size = self.shape, getattr(torch, self.job.dtype).itemsize
        held = 2 * self.job.batch * self.longest * s.num_layers * s.num_kv_heads * s.head_dim * size
        return {"evictions": 0, "eviction_seconds": 0.0, "kv_bytes": held}
