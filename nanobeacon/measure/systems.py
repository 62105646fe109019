"""The systems timed beside each other, each in a process of its own: nanobeacon,
transformers, kvpress.

All run the same job: a static batch of random token ids of equal length, greedy, EOS ignored; ids
in, ids out. They are driven step by step, so that they can take turns. Knows how to run and what to
count, not what is compared. A `job` holds a subcommand's options, settled: model (a folder),
device, batch, prompt_length …
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

PAGE = 16  # tokens of a page
WARM_UP = 8  # tokens of a run before the first that counts
# prefill seconds, decode seconds, tokens decoded (first ones are prefill's)
Step = tuple[float, float, int]


@dataclass(frozen=True)
class System:
    """What is timed: a program, and how much of the context it keeps."""

    name: str = "nanobeacon"  # or transformers, kvpress
    policy: str = "full"
    budget: int | None = None
    # Only where prompts share a header: there is nothing to find elsewhere
    prefix_cache: bool = False

    @property
    def label(self) -> str:
        """What tables call it: beacon 256, transformers, kvpress snapkv 256."""
        parts = []
        if self.name != "nanobeacon":
            parts.append(self.name)
        if self.policy != "full":
            parts.append(self.policy)
        if self.budget:
            parts.append(str(self.budget))
        label = " ".join(parts) or "full"
        return f"{label}, prefix cache" if self.prefix_cache else label


def systems_of(policies: list[str], budgets: list[int], others: list[str]) -> list[System]:
    """The others, then every policy under every budget. ValueError for what is impossible."""
    for name in others:
        if name not in ("transformers", "kvpress") or util.find_spec(name) is None:
            raise ValueError(f"--vs {name}: possible are transformers and kvpress, where installed")
    systems = []
    if "transformers" in others:
        systems.append(System("transformers"))
    if "kvpress" in others:
        systems += [System("kvpress", "snapkv", budget) for budget in budgets]
    for policy in policies:
        if policy == "full":
            systems.append(System())
        else:
            systems += [System(policy=policy, budget=budget) for budget in budgets]
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
    """The job with other values for these options."""
    return Namespace(**vars(job) | options)


def pages_of(job: Namespace, budget: int | None) -> int:
    """Pages that one request needs at most: a budget counts beside the prompt, which is
    protected."""
    tokens = job.prompt_length + job.output_length
    if budget is not None:
        tokens = min(tokens, job.prompt_length + budget)
    return -(-tokens // PAGE)  # rounded up


def start(system: System, job: Namespace) -> Worker:
    """A system's process, ready once entered. ValueError for a job longer than the
    model's context."""
    most = read_config(job.model).context
    if job.prompt_length + job.output_length > most:
        asked = f"prompt_length={job.prompt_length}, output_length={job.output_length}"
        raise ValueError(f"{asked}: {most} tokens together are possible (the model's positions)")
    make = Nanobeacon if system.name == "nanobeacon" else Transformers
    return Worker(system.label, job.threads, make, system, job)


class Subject:
    """A system at work in its process; what the systems share.

    Each has `_load()`; `_steps(prompts, output_length)`, which runs as its steps are asked for; and
    `_counts()`, what the process has had so far: evictions, their seconds, bytes of cache.
    """

    def __init__(self, system: System, job: Namespace) -> None:
        self.system = system
        self.job = job
        self.shape = read_config(job.model)
        self._load()
        # A short run that does not count: it compiles kernels and takes memory
        warm_up = WARM_UP
        if system.name != "nanobeacon" and job.device.startswith("cuda"):
            # an eviction too; the engine has had its own at the start
            warm_up += system.budget or 0
        self.begin(-1, min(warm_up, job.output_length))
        self.advance()

    def begin(self, repeat: int, output_length: int | None = None) -> None:
        """Pose the prompts of a repeat, the same for every system. -1 is the warm-up, whose prompts
        no other repeat has."""
        job = self.job
        draw = random.Random(f"{job.seed} {repeat}")
        ids = range(self.shape.vocab_size)
        header = draw.choices(ids, k=job.shared_prefix)
        own = job.prompt_length - len(header)
        prompts = [header + draw.choices(ids, k=own) for _ in range(job.batch)]
        self._before = self._counts()
        self._run = self._steps(prompts, output_length or job.output_length)

    def advance(self, steps: int | None = None) -> list[Step]:
        """The next steps of the run, all that are left unless a number is said."""
        return list(islice(self._run, steps))

    def measure(self, repeat: int) -> dict[str, Any]:
        """One whole run and what it took.

        step_ms_start, step_ms_end: milliseconds of a step, means over the first and the last eighth
        of those that decode the whole batch; NaN where there is none.
        """
        self.begin(repeat)
        steps = self.advance()
        whole = [decode for _, decode, tokens in steps if tokens == self.job.batch] or [float("nan")]
        eighth = max(1, len(whole) // 8)
        took = {
            "prefill_tokens": self.job.batch * self.job.prompt_length,
            "prefill_seconds": sum(prefill for prefill, _, _ in steps),
            "decode_tokens": sum(tokens for _, _, tokens in steps),
            "decode_seconds": sum(decode for _, decode, _ in steps),
            "step_ms_start": 1000 * sum(whole[:eighth]) / eighth,
            "step_ms_end": 1000 * sum(whole[-eighth:]) / eighth,
        }
        return took | self.report()

    def report(self) -> dict[str, Any]:
        """What the latest run has counted so far, and the process's peak of memory."""
        now = self._counts()
        for name in ("evictions", "eviction_seconds"):
            now[name] -= self._before[name]
        return now | {"memory_bytes": peak_memory(self.job.device)}

    def free(self) -> int:
        """Bytes that can still be taken."""
        return free_memory(self.job.device)


class Nanobeacon(Subject):
    """The engine; under torchrun every process has its own worker, and these compute one
    model together."""

    def _load(self) -> None:
        # 1. The processes of torchrun find each other, for as long as the worker lives
        job = self.job
        self._joined = ExitStack()
        group = self._joined.enter_context(join(torch.device(job.device).type))
        if group.rank > 0:  # the first one says the same
            logging.getLogger("nanobeacon").setLevel(logging.ERROR)

        # 2. The engine, with pages for all of the batch at once
        # so much for every seat: each grows as one run
        each = pages_of(job, self.system.budget) + 1
        self.llm = LLM(
            job.model,
            device=job.device,
            dtype=job.dtype,
            load=job.load,
            page_size=PAGE,
            num_pages=job.batch * each,
            max_num_seqs=job.batch,
            cuda_graphs=not job.no_cuda_graphs,
            overlap=False if job.no_overlap else None,
            group=group,
            policy=self.system.policy,
            budget=self.system.budget,
            prefix_cache=self.system.prefix_cache,
        )

    def _steps(self, prompts: list[list[int]], output_length: int) -> Iterator[Step]:
        params = SamplingParams(max_tokens=output_length, temperature=0.0, ignore_eos=True)
        requests = self.llm.submit(prompts, params)
        for request in requests:
            if request.error:
                raise ValueError(request.error)
        stats = self.llm.stats
        # these three: at the end of the step before
        tokens = stats.output_tokens
        decode_tokens = stats.decode_tokens
        prefill_seconds = stats.prefill_seconds
        began = time.perf_counter()
        # `run` yields once for each request of a step: the first of them tells that it is over
        for _ in self.llm.run(requests):
            if stats.output_tokens == tokens:
                continue
            seconds = time.perf_counter() - began
            prefill = stats.prefill_seconds - prefill_seconds
            decoded = stats.decode_tokens - decode_tokens
            tokens = stats.output_tokens
            decode_tokens = stats.decode_tokens
            prefill_seconds = stats.prefill_seconds
            yield prefill, seconds - prefill, decoded
            began = time.perf_counter()  # what others did in their turn is not this one's

    def _counts(self) -> dict[str, Any]:
        stats = self.llm.stats
        return {
            "evictions": stats.evictions,
            "eviction_seconds": stats.eviction_seconds,
            "kv_bytes": stats.peak_kv_bytes,
        }


class Transformers(Subject):
    """A plain loop of forward passes with sdpa, DynamicCache and argmax (its `generate` is
    slower); for kvpress under a DecodingPress that caches as many tokens as the engine does at
    that budget."""

    def _load(self) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        job = self.job
        auto = transformers.AutoModelForCausalLM
        options = {"dtype": getattr(torch, job.dtype), "attn_implementation": "sdpa"}
        if job.load == "dummy":
            with torch.device(job.device):
                model = auto.from_config(transformers.AutoConfig.from_pretrained(job.model), **options)
        else:
            model = auto.from_pretrained(job.model, **options).to(job.device)
        self.model = model.eval()
        self.longest = 0  # tokens cached of a request, at most so far
        self.press = self._press() if self.system.name == "kvpress" else None

    def _press(self) -> Any:
        """kvpress's SnapKV, which evicts as often and keeps as much as the engine's does."""
        from packaging.requirements import Requirement

        # 1. A kvpress made for another transformers fails somewhere inside: better said here
        here = metadata.version("transformers")
        needed = [line for line in metadata.requires("kvpress") if line.startswith("transformers")]
        needs = Requirement(needed[0])
        if here not in needs.specifier:
            raise ValueError(f"--vs kvpress: it needs {needs}, not {here}; its own environment helps")
        from kvpress import DecodingPress, SnapKVPress

        # 2. Its window cannot reach back beyond the last eviction: it has no older queries
        settings = settle("snapkv", self.system.budget)
        base = SnapKVPress(window_size=min(settings.window, settings.period - 1))
        kept = self.job.prompt_length + settings.kept
        return DecodingPress(base, settings.period, target_size=kept)

    @torch.inference_mode()
    def _steps(self, prompts: list[list[int]], output_length: int) -> Iterator[Step]:
        from transformers import DynamicCache

        device = self.job.device
        ids = torch.tensor(prompts, device=device)
        cache = DynamicCache()
        known = inspect.signature(self.model.forward).parameters
        cache_name = "cache" if "cache" in known else "past_key_values"  # the old name goes in 5.40
        options = {cache_name: cache, "use_cache": True, "logits_to_keep": 1}
        with self.press(self.model) if self.press else nullcontext():
            for i in range(output_length):
                began = time.perf_counter()
                if self.press and i > 0:
                    # The cache is shorter than the text, so the position has to be told
                    position = self.job.prompt_length + i - 1
                    options["position_ids"] = torch.full((1, 1), position, device=device)
                logits = self.model(ids, **options).logits
                ids = logits[:, -1].argmax(-1, keepdim=True)
                ids.tolist()  # whoever serves tokens reads each of them
                seconds = time.perf_counter() - began
                self.longest = max(self.longest, cache.get_seq_length())
                if i == 0:
                    yield seconds, 0.0, 0
                else:
                    yield 0.0, seconds, len(ids)

    def _counts(self) -> dict[str, Any]:
        """Bytes from shapes: keys and values of the longest cache that there has been."""
        shape = self.shape
        vector = shape.head_dim * getattr(torch, self.job.dtype).itemsize
        token = 2 * shape.num_layers * shape.num_kv_heads * vector
        held = self.job.batch * self.longest * token
        return {"evictions": 0, "eviction_seconds": 0.0, "kv_bytes": held}
