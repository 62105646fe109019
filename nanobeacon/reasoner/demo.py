"""What `generate.py` shows without a model, offline: the reasoner at work on a budget of a few dozen tokens.

One problem's trace streams under beacon, each look-back marked right or wrong; then a table has the same
problem under other policies. Knows the engine's public API and the task; nothing of command lines.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TextIO

from .. import LLM, SamplingParams
from . import folder, task
from .solve import solve

POLICIES = ("full", "beacon", "recent", "rkv", "random")
LENGTH, WINDOW, SEED = 768, 16, 0
INTRODUCTION = """\
A model of 0.6 M parameters walks over the registers A to H. `| F 4` reads F, which is 4 by now; then it
counts four steps, and now and then writes a register (`= D 15`). What it reads may stand hundreds of tokens
back: a look-back. Under a budget that works only if eviction has kept the right tokens."""
CLOSING = """\
One problem is an anecdote; `python bench.py accuracy` has the table over 128 of them. With a real model:
  python generate.py --model Qwen/Qwen3-0.6B --budget 1024 --prompt "How many primes are there below 100?"
  python generate.py --model Qwen/Qwen3-0.6B --budget 1024 --chat"""


def run(stream: TextIO | None = None, budget: int = 64) -> int:
    """Show it all; returns the exit status. ValueError where the checkpoint is missing."""
    if not (folder() / "config.json").exists():
        raise ValueError(f"the embedded reasoner is missing: no checkpoint in {folder()}")
    stream = stream or sys.stdout
    say, (right, wrong) = partial(print, file=stream, flush=True), _marks(stream)
    (problem,) = task.problems(1, LENGTH, SEED)
    say(f"{INTRODUCTION}\n")
    say(f"Under beacon, with the prompt and at most {budget} of {len(problem.trace)} tokens in the cache:")
    say(f"look-backs are {right('right')} or {wrong('wrong')}.\n\n{task.decode(problem.prompt)}", end="")
    beacon = _open("beacon", budget)
    output = _show(beacon, problem, say, right, wrong)
    say(f"\n\n{'':8}look-backs right   trace   tokens cached        KV   queries")
    for policy in POLICIES:
        if policy == "beacon":
            llm, grade = beacon, task.grade(problem, output)
        else:
            llm = _open(policy, budget)
            (grade,), _ = solve(llm, [problem])
        looked, trace = f"{grade.right} of {grade.look_backs}", "whole" if grade.whole else "strays"
        stats = llm.stats
        memory = f"{stats.peak_kv_bytes / 1e3:6.0f} kB {stats.query_buffer_bytes / 1e3:6.0f} kB"
        say(f"{policy:8}{looked:>16} {trace:>7} {stats.peak_cached_tokens:15} {memory}")
    say(f"\n{CLOSING}")
    return 0


def _open(policy: str, budget: int) -> LLM:
    """An engine for one request. The budget is the policy's, if it has one."""
    under = {} if policy == "full" else {"budget": budget, "window": WINDOW}
    return LLM(str(folder()), seed=SEED, max_num_seqs=1, max_model_len=LENGTH, policy=policy, **under)


def _marks(stream: TextIO) -> tuple[Callable, Callable]:
    """(right, wrong): functions that mark a word by colour on a terminal, by a symbol elsewhere."""
    if stream.isatty() and "NO_COLOR" not in os.environ:
        return (lambda word: f"\033[1;32m{word}\033[0m"), (lambda word: f"\033[1;37;41m{word}\033[0m")
    try:
        "✓✗".encode(stream.encoding or "utf-8")
        return (lambda word: f"{word}✓"), (lambda word: f"{word}✗")
    except UnicodeEncodeError:
        return (lambda word: f"{word}+"), (lambda word: f"{word}!")


def _show(llm: LLM, problem: task.Problem, say: Callable, right: Callable, wrong: Callable) -> list[int]:
    """Print the trace as it grows, a line for each read; returns its tokens."""
    tokens: list[int] = []

    def written() -> Iterator[int]:
        params = SamplingParams(temperature=0.0, max_tokens=len(problem.trace))
        (request,) = llm.submit([list(problem.prompt)], params)
        for token in chain(problem.prompt, (r.output_token_ids[-1] for r, _ in llm.run([request]))):
            tokens.append(token)
            yield token

    for verdict in task.follow(written()):  # takes a token, gives its verdict, takes the next
        if len(tokens) > len(problem.prompt):
            word = task.WORDS[tokens[-1]]
            if verdict is not None:
                word = right(word) if verdict else wrong(word)
            say("\n" if tokens[-1] == task.READ else " ", word, sep="", end="")
    return tokens[len(problem.prompt) :]
