"""What `generate.py` shows without a model, offline: the reasoner at work on a budget of a few dozen tokens.

One problem's trace streams under beacon, each look-back marked right or wrong; then a table has the same
problem under other policies. Knows the engine's public API and the task; nothing of command lines.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, tee
from typing import TextIO

from .. import LLM, SamplingParams
from ..llm import Output
from . import folder, task

POLICIES = ("full", "beacon", "recent", "rkv", "random")
LENGTH = 768
BUDGET = 64
WINDOW = 16
SEED = 1
INTRODUCTION = """\
A model of 0.6 M parameters walks over the registers A to H. `| F 4` reads F, which is 4 by now; then it
counts four steps, and now and then writes a register (`= D 15`). What it reads may stand hundreds of tokens
back: a look-back. Under a budget that works only if eviction has kept the right tokens."""
CLOSING = """\
One problem is an anecdote; `python bench.py accuracy` has the table over 128 of them. With a real model:
  python generate.py --model Qwen/Qwen3-0.6B --budget 1024 --prompt "How many primes are there below 100?"
  python generate.py --model Qwen/Qwen3-0.6B --budget 1024 --chat"""


def run(stream: TextIO | None = None, budget: int = BUDGET) -> int:
    """Show it all; returns the exit status. ValueError where the checkpoint is missing."""
    if not (folder() / "config.json").exists():
        raise ValueError(f"the embedded reasoner is missing: no checkpoint in {folder()}")
    stream = stream or sys.stdout
    say, (right, wrong) = partial(print, file=stream, flush=True), _marks(stream)
    (problem,) = task.problems(1, LENGTH, SEED)
    beacon = _open("beacon", budget)
    say(f"{INTRODUCTION}\n")
    length = len(problem.trace)
    say(f"Under beacon, with the prompt and at most {min(budget, length)} of {length} tokens in the cache:")
    say(f"look-backs are {right('right')} or {wrong('wrong')}.\n\n{task.decode(problem.prompt)}", end="")
    written = list(_shown(beacon, problem, say, right, wrong))
    say(f"\n\n{'':8}look-backs right   first slip   tokens cached        KV    queries")
    for policy in POLICIES:
        llm = beacon if policy == "beacon" else _open(policy, budget)
        output = written if policy == "beacon" else list(_written(llm, problem))
        grade, pairs = task.grade(problem, output), zip(output, problem.trace, strict=False)
        slip = next((f"token {i}" for i, (said, true) in enumerate(pairs, 1) if said != true), "none")
        looked, stats = f"{grade.right} of {grade.look_backs}", llm.stats
        memory = f"{stats.peak_kv_bytes / 1e3:6.0f} kB {stats.query_buffer_bytes / 1e3:7.0f} kB"
        say(f"{policy:8}{looked:>16} {slip:>12} {stats.peak_cached_tokens:15} {memory}")
    say(f"\n{CLOSING}")
    return 0


def traced(policy: str, budget: int = BUDGET) -> tuple[LLM, Output]:
    """The problem of the demonstration under a policy, with its evictions recorded."""
    (problem,) = task.problems(1, LENGTH, SEED)
    llm = _open(policy, budget, trace=True)
    params = SamplingParams(temperature=0.0, max_tokens=len(problem.trace))
    (output,) = llm.generate([list(problem.prompt)], params)
    return llm, output


def _open(policy: str, budget: int, trace: bool = False) -> LLM:
    """An engine for one request. The budget is the policy's, if it has one."""
    under = {} if policy == "full" else {"budget": budget}
    if policy not in ("full", "streaming"):  # which have no window
        under["window"] = WINDOW
    sizes = {"max_num_seqs": 1, "max_model_len": LENGTH}
    return LLM(str(folder()), seed=SEED, policy=policy, trace=trace, **sizes, **under)


def _marks(stream: TextIO) -> tuple[Callable, Callable]:
    """(right, wrong): functions that mark a word by colour on a terminal, by a symbol elsewhere."""
    if stream.isatty() and "NO_COLOR" not in os.environ:
        return (lambda word: f"\033[1;32m{word}\033[0m"), (lambda word: f"\033[1;37;41m{word}\033[0m")
    try:
        "✓✗".encode(stream.encoding or "utf-8")
        return (lambda word: f"{word}✓"), (lambda word: f"{word}✗")
    except UnicodeEncodeError:
        return (lambda word: f"{word}+"), (lambda word: f"{word}!")


def _written(llm: LLM, problem: task.Problem) -> Iterator[int]:
    """The model's trace, token by token."""
    params = SamplingParams(temperature=0.0, max_tokens=len(problem.trace))
    for request, _ in llm.run(llm.submit([list(problem.prompt)], params)):
        yield request.output_token_ids[-1]


def _shown(llm: LLM, problem: task.Problem, say: Callable, right: Callable, wrong: Callable) -> Iterator[int]:
    """The same, each token printed on its way, a line for each read."""
    told, written = tee(_written(llm, problem))
    verdicts = islice(task.follow(chain(problem.prompt, told)), len(problem.prompt), None)
    for token, verdict in zip(written, verdicts, strict=True):
        word = task.WORDS[token]
        if verdict is not None:
            word = right(word) if verdict else wrong(word)
        say("\n" if token == task.READ else " ", word, sep="", end="")
        yield token
