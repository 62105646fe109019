"""The options of generate.py: named, explained, and checked together before anything is loaded.

Knows words and numbers, and which of them go together. It knows nothing about models, texts or
processes and imports no torch: --help and most mistakes are answered at once. What an option does
is the program's business; whether a value suits the model is found where it is used.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any, NoReturn

from . import __version__
from .policies import POLICIES, check

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
DTYPES = ("auto", "float32", "bfloat16", "float16")
Add = Callable[..., Any]  # `add_argument` of a parser or of a group of options


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, where argparse would print all options first."""

    def error(self, message: str) -> NoReturn:
        """End with status 2, as for every mistake of the user's."""
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def parser() -> Parser:
    """All options, in the order and the groups in which --help shows them.

    A default of None means that the option was not given: then the checkpoint, the policy or the
    engine has its own number.
    """
    p = Parser(
        prog="generate.py",
        description="Generate text with a Qwen, Llama or Mistral checkpoint, its KV cache within a budget.",
    )
    _add_general(p)
    _add_cache(p.add_argument_group("what the cache keeps").add_argument)
    sampled = "how it is sampled (default: as the checkpoint says, else greedy)"
    _add_sampling(p.add_argument_group(sampled).add_argument)
    _add_output(p.add_argument_group("where it runs and what is printed").add_argument)
    _add_processes(p.add_argument_group("several processes, which torchrun starts").add_argument)
    return p


def _add_general(p: Parser) -> None:
    """The model, and what it is asked: a prompt, a file of prompts, or a conversation."""
    add = p.add_argument
    add("--version", action="version", version=f"nanobeacon {__version__}")
    add("--model", help=f"folder or hub id (with a prompt {DEFAULT_MODEL}, else a demonstration)")

    # Where the prompt comes from: at most one of these
    add_one_of = p.add_mutually_exclusive_group().add_argument
    from_input = "the prompt; - reads it from standard input"
    add_one_of("text", nargs="?", metavar="PROMPT", help=from_input)
    add_one_of("--prompt", metavar="TEXT", help="the same")
    add_one_of("--prompt-file", metavar="FILE", help="- is standard input")
    together = "JSON lines, answered together into --output"
    add_one_of("--prompts-file", metavar="FILE", help=together)
    conversation = "hold a conversation; /help in it lists its commands"
    add_one_of("--chat", action="store_true", help=conversation)

    # How it is read, and where the answers to a file go
    add("--raw", action="store_true", help="no chat template: the model continues the text")
    how = "whether the chat template lets the model think first (default: the template's own)"
    add("--thinking", action=argparse.BooleanOptionalAction, help=how)
    add("--output", metavar="FILE", help="of --prompts-file: JSON lines; what it holds is skipped")
    add("--max-num-seqs", type=int, help="requests at once (default: --n, 16 with --prompts-file)")


def _add_cache(add: Add) -> None:
    """The budget, and what is kept within it.

    --policy has no list of choices: a policy of the user's own is named by its module. What goes
    together here is checked by `policies.settle`, for every user of the package alike.
    """
    own = "(default: the policy's own, beacon's is {})"
    add("--budget", type=int, help="output tokens kept in the cache (default: all)")
    policies = f"{', '.join(POLICIES)}, or module:name of your own (default: %(default)s)"
    add("--policy", default="beacon", help=policies)
    add("--window", type=int, help=f"newest tokens always kept {own.format(32)}")
    add("--beacons", type=int, help=f"past queries asked {own.format(16)}")
    add("--recents", type=int, help=f"newest queries asked {own.format(16)}")
    protected = "prompt, or a number of first tokens kept (default: prompt)"
    add("--protect", default="prompt", help=protected)
    how = "compute every prompt anew, also what was read before (as the turns of --chat were)"
    add("--no-prefix-cache", action="store_true", help=how)


def _add_sampling(add: Add) -> None:
    """The fields of SamplingParams that have an option; it checks their values."""
    add("--max-tokens", type=int, help="default: what the context leaves")
    add("--temperature", type=float, help="0 is greedy")
    add("--top-p", type=float, help="up to 1, which is off; 0 is the best token alone")
    add("--top-k", type=int, help="0 is off")
    add("--min-p", type=float, help="from 0, which is off, to 1")
    add("--repetition-penalty", type=float, help="1 is off")
    add("--min-tokens", type=int, help="no end and no stop string before so many")
    add("--seed", type=int, help="the same seed gives the same draws (default: new ones each time)")
    add("--n", type=int, default=1, help="completions of the prompt (default: %(default)s)")
    # Texts and ids that end an answer, besides the model's own
    stop = "ends the text before it; repeatable"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    stop = "ends it; repeatable"
    add("--stop-token-id", action="append", type=int, default=[], metavar="ID", help=stop)


def _add_output(add: Add) -> None:
    """The device, and what is written besides the text or instead of it."""
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N (default: %(default)s)")
    # torch's own dtypes have no names at the command line, so that these are all
    dtypes = f"{', '.join(DTYPES)} (default: %(default)s)"
    add("--dtype", default="auto", choices=DTYPES, help=dtypes)
    add("--threads", type=int, help="of the CPU (default: torch's own, 1 for tiny models)")
    add("--json", action="store_true", help="one JSON object per completion instead of text")
    add("--trace", metavar="FILE", help="write a page (HTML) that shows what the cache kept")
    second = "with --trace: run a second policy, on the same page"
    add("--compare", metavar="POLICY", help=second)


def _add_processes(add: Add) -> None:
    """How the processes that torchrun has started share the work.

    Both may be given: groups of T, each with a model and lines of its own.
    """
    how = "so many compute one model together (default: all; 1 with --data-parallel)"
    add("--tensor-parallel", type=int, metavar="T", help=how)
    how = "each T of them have a model of their own and take lines of --prompts-file"
    add("--data-parallel", action="store_true", help=how)


def check_together(options: argparse.Namespace) -> None:
    """ValueError, naming the option, for options that do not go together.

    An option that would have no effect is a mistake too: its user expects one.
    """
    _check_page(options)
    _check_batch(options)
    if options.chat and (options.n != 1 or options.raw):
        raise ValueError("--chat: a conversation has one answer a turn, through the chat template")


def _check_page(options: argparse.Namespace) -> None:
    """What --trace and --compare need: one completion, and a place for its page.

    The folder is looked for now, as the page is written when the whole answer is there.
    """
    if options.compare is not None:
        possible = f"a name of {', '.join(POLICIES)} is possible"
        check(options.compare in POLICIES, "--compare", options.compare, possible)
        if options.trace is None:
            raise ValueError("--compare: both policies are shown on the page that --trace FILE writes")
        if options.compare == options.policy:
            raise ValueError(f"--compare {options.compare}: that is the policy itself; another is possible")
    if options.trace is not None:
        if options.chat or options.n != 1:
            raise ValueError("--trace: a page shows one completion; it needs no --chat and --n 1")
        folder = os.path.dirname(options.trace) or "."
        possible = "a file in a folder that exists is possible"
        is_place = os.path.isdir(folder) and not os.path.isdir(options.trace)
        check(is_place, "--trace", options.trace, possible)


def _check_batch(options: argparse.Namespace) -> None:
    """What --prompts-file and --output need: each other, and no output of another kind."""
    if options.max_num_seqs is not None and options.max_num_seqs < 1:
        raise ValueError(f"--max-num-seqs {options.max_num_seqs}: at least 1 is possible")
    if (options.prompts_file is None) != (options.output is None):
        raise ValueError("--prompts-file and --output: each needs the other")
    if options.prompts_file is not None:
        if options.json or options.trace is not None:
            raise ValueError("--prompts-file writes JSON lines; --json and --trace are for one prompt")
        if options.model is None:
            raise ValueError("--prompts-file needs --model")


def check_processes(options: argparse.Namespace, processes: int, together: int) -> None:
    """ValueError for what several processes cannot do.

    processes: how many there are; together: how many of them compute one model.
    """
    if processes > together and options.prompts_file is None:
        several = f"--tensor-parallel {together} of {processes} processes"
        raise ValueError(f"{several}: the others are for the lines of --prompts-file")
    if options.data_parallel and options.prompts_file is None:
        raise ValueError("--data-parallel: it shares out the lines of --prompts-file")
    if processes > 1 and options.chat:
        raise ValueError("--chat: a conversation needs one process, without torchrun")
