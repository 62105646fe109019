"""What `bench.py prefix` measures: what the prefix cache saves, in a conversation and under a common header.

Two engines of one process take turns, one with the prefix cache and one without. Knows the public API; how a
prefix is found is not its business.
"""

import random
import time
from argparse import ArgumentParser, Namespace
from statistics import median
from typing import Any

from nanobeacon import LLM, SamplingParams
from nanobeacon.pages import PagePool
from nanobeacon.prefix import PrefixCache
from nanobeacon.request import Request

from .common import columns

LOOKUP_TOKENS = 32768  # of the prompt whose look-up is timed
LOOKUP_REPEATS = 50


def add_arguments(p: ArgumentParser) -> None:
    p.set_defaults(prompt_length=500, output_length=64)
    p.add_argument("--budget", type=int, help="output tokens kept in the cache (default: all)")
    p.add_argument("--turns", type=int, default=6, help="of the conversation (default: %(default)s)")
    p.add_argument("--requests", type=int, default=32, help="that share a header (default: %(default)s)")
    p.add_argument("--header", type=int, default=1024, help="its tokens (default: %(default)s)")


def run(options: Namespace) -> dict[str, Any]:
    """Three parts: turns of a conversation, requests under one header, the host's time for a look-up.

    Each message adds `prompt_length` tokens to the conversation; a tenth of that follows the header.
    """
    for name in ("turns", "requests", "header"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)}: at least 1 is possible")
    turns = []
    headers = []
    for repeat in range(options.repeats):
        # A fresh pair each time: what one repeat leaves in the cache would be found by the next.
        turns.append(_conversation(options, f"{options.seed} {repeat}"))
        headers.append(_headers(options, f"{options.seed} {repeat}"))
    return {
        "n": options.repeats,
        "budget": options.budget,
        "turns": [_medians(rows) for rows in zip(*turns, strict=True)],
        "header": [_medians(rows) for rows in zip(*headers, strict=True)],
        "lookup_tokens": LOOKUP_TOKENS,
        "lookup_ms": _lookup_ms(),
    }


def _engines(options: Namespace) -> list[LLM]:
    """[without, with] the prefix cache."""
    place = {"device": options.device, "dtype": options.dtype, "load": options.load}
    return [LLM(options.model, budget=options.budget, prefix_cache=on, **place) for on in (False, True)]


def _conversation(options: Namespace, seed: str) -> list[dict[str, Any]]:
    """A row a turn: time to the first token and prompt tokens computed, without and with."""
    draw = random.Random(seed)
    engines = _engines(options)
    ids = range(engines[0].model_config.vocab_size)
    prompts: list[list[int]] = [[], []]  # each engine goes on with what it has answered itself
    rows = []
    for turn in range(options.turns):
        message = draw.choices(ids, k=options.prompt_length)
        row: dict[str, Any] = {"turn": turn + 1, "prompt": len(prompts[0]) + len(message)}
        for name, llm, prompt in zip(("without", "with"), engines, prompts, strict=True):
            prompt += message
            before = llm.stats.prompt_tokens
            began = time.perf_counter()
            first = None
            (request,) = llm.submit([list(prompt)], _greedy(options.output_length))
            for _ in llm.run([request]):
                first = first or time.perf_counter()
            row[f"{name}_ms"] = 1000 * (first - began)
            row[f"{name}_computed"] = llm.stats.prompt_tokens - before
            prompt += request.output_token_ids
        rows.append(row)
    return rows


def _headers(options: Namespace, seed: str) -> list[dict[str, Any]]:
    """One row: prefill seconds and prompt tokens computed of requests that share a header."""
    draw = random.Random(seed)
    row: dict[str, Any] = {"requests": options.requests, "header": options.header}
    for name, llm in zip(("without", "with"), _engines(options), strict=True):
        ids = range(llm.model_config.vocab_size)
        state = draw.getstate()
        header = draw.choices(ids, k=options.header)
        own = max(1, options.prompt_length // 10)
        prompts = [header + draw.choices(ids, k=own) for _ in range(options.requests)]
        draw.setstate(state)  # the same prompts for both
        llm.generate(prompts, _greedy(1))
        row[f"{name}_ms"] = 1000 * llm.stats.prefill_seconds
        row[f"{name}_computed"] = llm.stats.prompt_tokens
    return [row]


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def _medians(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The medians of the times over repeats; all else is the same in each."""
    times = {name: median(row[name] for row in rows) for name in rows[0] if name.endswith("_ms")}
    return rows[0] | times


def _lookup_ms() -> float:
    """The host's time to find a known prompt of LOOKUP_TOKENS."""
    tokens = random.Random(0).choices(range(150_000), k=LOOKUP_TOKENS)
    pool = PagePool(LOOKUP_TOKENS // 16 + 2)
    prefix = PrefixCache(pool, page_size=16, chunk=512)
    known = Request(0, tokens, SamplingParams(), 1, len(tokens))
    known.pages = pool.allocate(LOOKUP_TOKENS // 16)
    known.num_computed = len(tokens)
    prefix.insert(known)
    asking = Request(1, [*tokens, 5], SamplingParams(), 1, len(tokens) + 1)
    times = []
    for _ in range(LOOKUP_REPEATS):
        began = time.perf_counter()
        found = prefix.find(asking)
        times.append(1000 * (time.perf_counter() - began))
        assert len(found.pages) == len(known.pages)
    return median(times)


def table(result: dict[str, Any]) -> str:
    """The conversation's turns, the header, the look-up."""
    shown = {"without_ms": "ms without", "with_ms": "ms with"}
    shown |= {"without_computed": "tokens computed without", "with_computed": "with"}
    parts = []
    for rows in (result["turns"], result["header"]):
        first = [name for name in rows[0] if name not in shown]
        head = [*first, *shown.values(), "times as fast"]
        lines = []
        for row in rows:
            line = [row[name] for name in first]
            line += [f"{row[name]:,.1f}" if name.endswith("_ms") else row[name] for name in shown]
            lines.append([*line, f"{row['without_ms'] / row['with_ms']:.2f}"])
        parts.append(columns(head, lines))
    found = f"A look-up of {result['lookup_tokens']:,} tokens takes {result['lookup_ms']:.2f} ms of the host."
    return "\n\n".join([*parts, found])
