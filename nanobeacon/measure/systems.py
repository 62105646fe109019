"""The systems timed beside each other, each in a process of its own: nanobeacon, transformers, kvpress.

All run the same job: a static batch of random token ids of equal length, greedy, EOS ignored; ids in, ids out. They are
driven step by step, so that they can take turns. Knows how to run and what to count, not what is compared. A `job` is
the options of a subcommand: model (a folder), load, device, dtype, batch, prompt_length, output_length, seed …
"""

import json
import random
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata, util
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from nanobeacon import LLM, SamplingParams
from nanobeacon.checkpoint import resolve
from nanobeacon.config import read_config
from nanobeacon.policies import settle

from .common import Worker, peak_memory, reset_peak_memory

PAGE, WARM_UP = 16, 8  # tokens of a page; tokens of a run before the first that counts
FIELDS = "model_type num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim"
FIELDS += " vocab_size tie_word_embeddings max_position_embeddings rope_theta"
PRESETS = {
    "smollm2-135m": ("llama", 30, 576, 1536, 9, 3, 64, 49152, True, 8192, 1e5),
    "qwen3-0.6b": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True, 40960, 1e6),
    "qwen3-4b": ("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, True, 40960, 1e6),
    "qwen3-14b": ("qwen3", 40, 5120, 17408, 40, 8, 128, 151936, False, 40960, 1e6),
    "r1-qwen-7b": ("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False, 131072, 1e4),
    "r1-llama-8b": ("llama", 32, 4096, 14336, 32, 8, 128, 128256, False, 131072, 5e5),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE_SCALING = {"r1-llama-8b": LLAMA3 | {"original_max_position_embeddings": 8192}}
Step = tuple[float, float, int]  # prefill seconds, decode seconds, tokens decoded; a first token is its prompt's


@dataclass(frozen=True)
class System:
    name: str = "nanobeacon"
    policy: str = "full"
    budget: int | None = None

    @property
    def label(self) -> str:
        """What tables call it: beacon 256, transformers, kvpress snapkv 256."""
        parts = [self.name] * (self.name != "nanobeacon") + [self.policy] * (self.name != "transformers")
        return " ".join([*parts, *([str(self.budget)] if self.budget else [])])


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


def add_arguments(p: ArgumentParser, prompt_length: int, output_length: int) -> None:
    which = p.add_mutually_exclusive_group()
    which.add_argument("--model", help="folder or hub id")
    which.add_argument("--preset", choices=PRESETS, help="its shape, random weights (default: smollm2-135m)")
    p.add_argument("--load", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    p.add_argument("--prompt-length", type=int, default=prompt_length, help="tokens (default: %(default)s)")
    p.add_argument("--output-length", type=int, default=output_length, help="tokens (default: %(default)s)")
    p.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    p.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    p.add_argument("--seed", type=int, default=0, help="of the prompts' token ids")
    p.add_argument("--no-cuda-graphs", action="store_true")


@contextmanager
def job_of(options: Namespace) -> Iterator[Namespace]:
    """The options with model, load, device and dtype settled; a preset's folder lives as long as the context."""
    for name, least in (("prompt_length", 1), ("output_length", 2), ("repeats", 1)):
        if getattr(options, name) < least:
            raise ValueError(f"{name}={getattr(options, name)}: at least {least} is possible")
    job = Namespace(**vars(options))
    with tempfile.TemporaryDirectory() as scratch:
        if job.model is None:
            name, job.model, job.load = job.preset or "smollm2-135m", scratch, "dummy"
            config = dict(zip(FIELDS.split(), PRESETS[name], strict=True)) | {"dtype": "bfloat16"}
            config |= {"rms_norm_eps": 1e-6, "rope_scaling": ROPE_SCALING.get(name)}
            Path(scratch, "config.json").write_text(json.dumps(config))
        job.model = str(resolve(job.model, config_only=job.load == "dummy"))
        if job.device == "auto":
            job.device = "cuda" if torch.cuda.is_available() else "cpu"
        if job.dtype == "auto":
            job.dtype = read_config(job.model).dtype or "bfloat16"
            job.dtype = "bfloat16" if (job.device, job.dtype) == ("cpu", "float16") else job.dtype
        yield job


def pages_of(job: Namespace, budget: int | None) -> int:
    """Pages that one request needs at most."""
    total = job.prompt_length + job.output_length
    return -(-(total if budget is None else min(total, job.prompt_length + budget)) // PAGE)


def start(system: System, job: Namespace, threads: int) -> Worker:
    return Worker(system.label, threads, Nanobeacon if system.name == "nanobeacon" else Transformers, system, job)


class Subject:
    """What the systems share; each has `_load`, `_steps(prompts, output_length)` and `counts()`."""

    def __init__(self, system: System, job: Namespace) -> None:
        self.system, self.job, self.vocabulary = system, job, read_config(job.model).vocab_size
        self._load()
        # On a GPU the first run compiles kernels, those of an eviction too
        warm_up = (system.budget or 0) + WARM_UP if job.device.startswith("cuda") else WARM_UP
        self.begin(0, min(warm_up, job.output_length))
        self.advance()
        self.ready = peak_memory(job.device)
        reset_peak_memory(job.device)

    def begin(self, repeat: int, output_length: int | None = None) -> None:
        """Pose the prompts of a repeat, the same for every system."""
        job, draw = self.job, random.Random(f"{self.job.seed} {repeat}")
        prompts = [[draw.randrange(self.vocabulary) for _ in range(job.prompt_length)] for _ in range(job.batch)]
        self._run, self._before = self._steps(prompts, output_length or job.output_length), self.counts()

    def advance(self, steps: int | None = None) -> list[Step]:
        return list(islice(self._run, steps))

    def measure(self, repeat: int) -> dict[str, Any]:
        """One whole run and what it took."""
        self.begin(repeat)
        steps = self.advance()
        full = [s for _, s, tokens in steps if tokens == self.job.batch] or [float("nan")]
        eighth = max(1, len(full) // 8)
        prefill, decode, tokens = (sum(column) for column in zip(*steps, strict=True))
        return self.report() | {
            "prefill_seconds": prefill,
            "decode_seconds": decode,
            "decode_tokens": tokens,
            "step_ms_start": 1000 * sum(full[:eighth]) / eighth,
            "step_ms_end": 1000 * sum(full[-eighth:]) / eighth,
        }

    def report(self) -> dict[str, Any]:
        """What the run that was begun last has counted, and the process's peak of memory."""
        now = self.counts()
        for name in ("evictions", "eviction_seconds"):
            now[name] -= self._before[name]
        return now | {"memory_bytes": max(self.ready, peak_memory(self.job.device))}


class Nanobeacon(Subject):
    def _load(self) -> None:
        job, budget = self.job, self.system.budget
        pages = job.batch * (pages_of(job, budget) + 1)
        if budget is None and job.device == "cpu":  # room for each to grow as one run, as a pool by default has
            pages = 2 ** (job.batch - 1).bit_length() * (pages_of(job, None) + job.prompt_length // PAGE + 2)
        named = {"device": job.device, "dtype": job.dtype, "load": job.load, "page_size": PAGE, "num_pages": pages}
        named |= {"max_num_seqs": job.batch, "cuda_graphs": not job.no_cuda_graphs}
        self.llm = LLM(job.model, policy=self.system.policy, budget=budget, **named)

    def _steps(self, prompts: list[list[int]], output_length: int) -> Iterator[Step]:
        params = SamplingParams(max_tokens=output_length, temperature=0.0, ignore_eos=True)
        requests = self.llm.submit(prompts, params)
        for error in filter(None, (r.error for r in requests)):
            raise ValueError(error)
        then, began = vars(self.llm.stats).copy(), time.perf_counter()
        for _ in self.llm.run(requests):  # once for each request of a step: the first tells that it is over
            if self.llm.stats.output_tokens > then["output_tokens"]:
                seconds, now = time.perf_counter() - began, vars(self.llm.stats).copy()
                tokens, prefill, decode = (
                    now[name] - then[name] for name in ("output_tokens", "prefill_seconds", "decode_seconds")
                )
                yield prefill, seconds - prefill, tokens if decode else 0
                then, began = now, time.perf_counter()

    def counts(self) -> dict[str, Any]:
        s = self.llm.stats
        return {"evictions": s.evictions, "eviction_seconds": s.eviction_seconds, "kv_bytes": s.peak_kv_bytes}


class Transformers(Subject):
    """A plain loop of forward passes with sdpa, DynamicCache and argmax (its `generate` is slower); for kvpress the same
    loop under a DecodingPress that caches as many tokens as the engine does at that budget."""

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
            raise ValueError(f"--vs kvpress: it needs {needs}, not {here}; an environment of its own helps")
        from kvpress import DecodingPress, SnapKVPress

        settings = settle("snapkv", self.system.budget)
        base = SnapKVPress(window_size=min(settings.window, settings.period - 1))  # it has no older queries
        return DecodingPress(base, settings.period, target_size=self.job.prompt_length + settings.kept)

    @torch.inference_mode()
    def _steps(self, prompts: list[list[int]], output_length: int) -> Iterator[Step]:
        from transformers import DynamicCache

        ids, cache, device = torch.tensor(prompts, device=self.job.device), DynamicCache(), self.job.device
        with self.press(self.model) if self.press else nullcontext():
            for position in range(self.job.prompt_length - 1, self.job.prompt_length - 1 + output_length):
                began, first, where = time.perf_counter(), not cache.get_seq_length(), {}
                if self.press and not first:  # the cache is shorter than the text, so the position has to be told
                    where["position_ids"] = torch.full((1, 1), position, device=device)
                logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **where).logits
                ids = logits[:, -1].argmax(-1, keepdim=True)
                ids.tolist()  # whoever serves tokens reads each of them
                seconds, self.longest = time.perf_counter() - began, max(self.longest, cache.get_seq_length())
                yield (seconds, 0.0, 0) if first else (0.0, seconds, len(ids))

    def counts(self) -> dict[str, Any]:
        c = read_config(self.job.model)
        slot = 2 * c.num_layers * c.num_kv_heads * c.head_dim * getattr(torch, self.job.dtype).itemsize
        return {"evictions": 0, "eviction_seconds": 0.0, "kv_bytes": self.job.batch * self.longest * slot}
