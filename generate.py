"""Text from a model, at the command line: streams to stdout; progress and statistics go to stderr.

Parses and prints; what it does is `nanobeacon.LLM`. Exit status: 0, 2 for a user's mistake (one line), 130
for Ctrl-C, with what was generated so far kept.
"""

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
EXAMPLE = (
    "A baker fills 17 trays with 164 rolls: a small tray holds 8, a large one 12. The oven takes 4 trays at "
    "a time, all of one size; small trays bake for 14 minutes, large ones for 18. How many of each size "
    "are there, and how long does the baking take at least? Work step by step and check the result."
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def parser() -> Parser:
    p = Parser(
        prog="generate.py",
        description="Generate text with a Qwen3, Qwen2 or Llama checkpoint, its KV cache within a budget.",
    )
    p.add_argument("--model", help=f"folder or hub id (with a prompt {DEFAULT_MODEL}, else a demonstration)")
    what = p.add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT")
    what.add_argument("--prompt-file", metavar="FILE", help="- is standard input")
    what.add_argument(
        "stdin", nargs="?", choices=["-"], metavar="-", help="read the prompt from standard input"
    )
    what.add_argument("--prompts-file", metavar="FILE", help="JSON lines, answered together into --output")
    what.add_argument("--chat", action="store_true", help="hold a conversation; each turn is a fresh request")
    p.add_argument("--output", metavar="FILE", help="of --prompts-file: JSON lines; what it holds is skipped")
    p.add_argument("--max-num-seqs", type=int, help="requests at once (default: --n, 16 with --prompts-file)")
    p.add_argument("--raw", action="store_true", help="no chat template: the model continues the text")
    thinking = "--thinking / --no-thinking: enable_thinking for the chat template (default: its own)"
    p.add_argument("--thinking", action=argparse.BooleanOptionalAction, help=thinking)
    p.add_argument("--budget", type=int, help="output tokens kept in the cache (default: all)")
    p.add_argument("--policy", default="beacon", help="what is kept under the budget (default: %(default)s)")
    p.add_argument("--window", type=int, help="newest tokens always kept (default: the policy's own)")
    p.add_argument("--beacons", type=int, help="past queries asked (default: the policy's own)")
    p.add_argument("--recents", type=int, help="newest queries asked (default: the policy's own)")
    p.add_argument("--protect", default="prompt", help="'prompt', or a number of first tokens never evicted")
    p.add_argument("--max-tokens", type=int, help="default: what the context leaves")
    p.add_argument("--temperature", type=float, help="0 is greedy; default: the checkpoint's")
    p.add_argument("--top-p", type=float)
    p.add_argument("--top-k", type=int)
    p.add_argument("--min-p", type=float)
    p.add_argument("--repetition-penalty", type=float, help="1 is off; default: the checkpoint's")
    p.add_argument("--min-tokens", type=int, help="no end and no stop string before so many")
    p.add_argument("--seed", type=int, help="the same seed gives the same draws")
    p.add_argument("--n", type=int, default=1, help="completions of the prompt")
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be repeated")
    p.add_argument(
        "--stop-token-id", action="append", type=int, default=[], metavar="ID", help="may be repeated"
    )
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    p.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    p.add_argument("--json", action="store_true", help="one JSON object per completion instead of text")
    p.add_argument("--trace", metavar="FILE", help="write a page (HTML) that shows what the cache kept")
    p.add_argument("--compare", metavar="POLICY", help="with --trace: run a second policy, on the same page")
    return p


def read_prompt(options: argparse.Namespace) -> str | None:
    """The prompt: the option, a file or a pipe; None where there is none."""
    if options.prompt is not None:
        return options.prompt
    path = "-" if options.stdin else options.prompt_file
    try:
        if path not in (None, "-"):
            with open(path, encoding="utf-8") as file:
                return file.read()
        text = sys.stdin.read() if path == "-" or not sys.stdin.isatty() else ""
        text.encode()  # what could not be decoded may have become surrogates
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--prompt-file {path or '-'}: {error}") from error
    return text if text.strip() else None


def demonstrate(options: argparse.Namespace) -> int:
    """The embedded reasoner at work; --budget, --trace and --compare mean something to it."""
    plain = vars(parser().parse_args([]))
    for name, value in vars(options).items():
        if value != plain[name] and name not in ("budget", "trace", "compare"):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} needs --model or a prompt: without them this is a demonstration")
    from nanobeacon.measure import retention
    from nanobeacon.reasoner import demo

    chosen = {} if options.budget is None else {"budget": options.budget}
    status = demo.run(**chosen)
    if options.trace is not None:
        policies = ["beacon"] if options.compare is None else ["beacon", options.compare]
        settings = {"model": "the embedded reasoner", "temperature": 0}
        runs = [demo.traced(policy, **chosen) for policy in policies]
        write_page([retention.record(*run, settings) for run in runs], options.trace)
    return status


def write_page(records: list[dict[str, Any]], file: str) -> None:
    """The retention page of one run, or of two side by side."""
    from nanobeacon.measure import retention

    with open(file, "w", encoding="utf-8") as out:
        out.write(retention.page(records))
    print(f"What the cache kept: {file}", file=sys.stderr)


def record(llm: Any, request: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What the retention page shows of a finished request, with the settings that it ran under."""
    from nanobeacon.llm import output_of
    from nanobeacon.measure import retention

    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    sampling = {name: getattr(request.params, name) for name in names}
    model = options.model or DEFAULT_MODEL
    return retention.record(llm, output_of(request), {"model": os.path.basename(model), **sampling})


def check_page(options: argparse.Namespace) -> None:
    """What --trace and --compare need, said before anything is loaded."""
    from nanobeacon.policies import POLICIES, check

    if options.compare is not None:
        possible = f"a name of {', '.join(POLICIES)} is possible"
        check(options.compare in POLICIES, "--compare", options.compare, possible)
        if options.trace is None:
            raise ValueError("--compare: both policies are shown on the page that --trace FILE writes")
    if options.trace is not None:
        if options.chat or options.n != 1:
            raise ValueError("--trace: a page shows one completion; it needs no --chat and --n 1")
        folder = os.path.dirname(options.trace) or "."
        check(os.path.isdir(folder), "--trace", options.trace, "a file in a folder that exists is possible")


def check_batch(options: argparse.Namespace) -> None:
    """What --prompts-file and --output need, said before anything is loaded."""
    if options.max_num_seqs is not None and options.max_num_seqs < 1:
        raise ValueError(f"--max-num-seqs {options.max_num_seqs}: at least 1 is possible")
    if (options.prompts_file is None) != (options.output is None):
        raise ValueError("--prompts-file and --output: each needs the other")
    if options.prompts_file is not None:
        if options.json or options.trace is not None:
            raise ValueError("--prompts-file writes JSON lines; --json and --trace are for one prompt")
        if options.model is None:
            raise ValueError("--prompts-file needs --model")


def answer_prompts_file(options: argparse.Namespace) -> int:
    """Answer a file of prompts into a file; returns the exit status."""
    from nanobeacon import batchfile

    source, output = Path(options.prompts_file), Path(options.output)
    batchfile.read_lines(source)  # a file that cannot be read is said before a model is loaded
    thinking = {"enable_thinking": False} if options.no_thinking else {}
    outcome = batchfile.answer_file(load(options), source, output, params(options), options.raw, thinking)
    done = f"{outcome.answered:,} lines answered, {outcome.failed:,} failed, {outcome.skipped:,} skipped"
    print(f"{done}: {output}", file=sys.stderr)
    return 130 if outcome.interrupted else 1 if outcome.failed else 0


def load(options: argparse.Namespace) -> Any:
    from nanobeacon import LLM

    logging.getLogger("nanobeacon").setLevel(logging.INFO)
    names = ("device", "dtype", "seed", "budget", "policy", "window", "beacons", "recents")
    chosen = {name: getattr(options, name) for name in names}
    protect = int(options.protect) if options.protect.lstrip("-").isdigit() else options.protect
    bar = sys.stderr.isatty()
    seats = options.max_num_seqs or (16 if options.prompts_file else min(options.n, 64))
    return LLM(
        DEFAULT_MODEL if options.model is None else options.model,
        max_num_seqs=seats,
        protect=protect,
        progress=bar,
        trace=options.trace is not None,
        **chosen,
    )


def params(options: argparse.Namespace) -> Any:
    from nanobeacon import SamplingParams

    names = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    names += ("seed", "stop", "n")
    chosen = {name: getattr(options, name) for name in names}
    return SamplingParams(stop_token_ids=options.stop_token_id, **chosen)


def show(pieces: Iterator[tuple[Any, str]], requests: list[Any]) -> None:
    """Print completions as they grow: the first at once, the next one when those before it have ended."""
    held, ended, current = dict.fromkeys(requests, ""), set(), 0
    for request, piece in pieces:
        held[request] += piece
        if request.finish_reason is not None:
            ended.add(request)
        while current < len(requests):
            print(held[requests[current]], end="", flush=True)
            held[requests[current]] = ""
            if requests[current] not in ended:
                break
            print(flush=True)
            current += 1
            if current < len(requests):
                print(f"--- completion {current + 1} of {len(requests)}", file=sys.stderr)


def answer(llm: Any, prompt: Any, options: argparse.Namespace) -> tuple[list[Any], bool]:
    """Generate and print the completions of one prompt: their requests, and whether Ctrl-C ended them."""
    requests, interrupted = llm.submit([prompt], params(options)), False
    if requests[0].error:
        raise ValueError(requests[0].error)
    pieces = llm.run(requests)
    try:
        if options.json:
            for _ in tqdm(pieces, unit="token", disable=not sys.stderr.isatty()):
                pass
        else:
            show(pieces, requests)
    except KeyboardInterrupt:
        interrupted = True
        pieces.close()
        print(file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        from nanobeacon.llm import output_of

        for request in requests:
            fields = asdict(output_of(request)) | {
                "completion": request.completion,
                "stats": asdict(llm.stats),
            }
            fields.pop("trace")
            print(json.dumps(fields, ensure_ascii=False), flush=True)
    return requests, interrupted


def complete(llm: Any, text: str, options: argparse.Namespace) -> int:
    """One prompt, through the chat template where there is one; returns the exit status."""
    raw = options.raw or llm.tokenizer is None or llm.tokenizer.chat_template is None
    prompt = text if raw else llm.chat_prompt([{"role": "user", "content": text}], options.thinking)
    requests, interrupted = answer(llm, prompt, options)
    errors = [f"generate.py: {r.error}" for r in requests if r.error]
    print("\n".join([closing_lines(llm, requests), *errors[:1]]), file=sys.stderr)
    if options.trace is not None and not errors:
        records = [record(llm, requests[0], options)]
        if options.compare is not None and not interrupted:
            records.append(compared(prompt, options))
        write_page(records, options.trace)
    return 130 if interrupted else 1 if errors else 0


def compared(prompt: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The same prompt under the policy of --compare, silently; what the page shows of it."""
    changes: dict[str, Any] = {"policy": options.compare}
    if options.compare == "full":
        changes |= {"budget": None, "window": None, "beacons": None, "recents": None, "protect": "prompt"}
    second = argparse.Namespace(**vars(options) | changes)
    llm = load(second)
    requests = llm.submit([prompt], params(second))
    for _ in llm.run(requests):
        pass
    if requests[0].error:
        raise ValueError(f"--compare {options.compare}: {requests[0].error}")
    return record(llm, requests[0], second)


def converse(llm: Any, options: argparse.Namespace) -> int:
    """Turns from standard input until it ends; the prompt of each is the whole conversation.

    Ctrl-C ends an answer; at the prompt it ends the conversation.
    """
    messages, turns = [], []
    try:
        while True:
            print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                return 0
            if line.strip():
                messages.append({"role": "user", "content": line.strip()})
                requests, _ = answer(llm, llm.chat_prompt(messages, options.thinking), options)
                messages.append({"role": "assistant", "content": requests[0].stream.text})
                turns += requests
    except KeyboardInterrupt:
        return 130
    finally:
        print(closing_lines(llm, turns), file=sys.stderr)


def closing_lines(llm: Any, requests: list[Any]) -> str:
    """What it took: speed, what was kept of the tokens, and what the cache held."""
    s, decoded = llm.stats, max(llm.stats.output_tokens - len(requests), 0)
    seconds = s.prefill_seconds + s.decode_seconds
    longest = max((r.num_computed for r in requests), default=0)
    return (
        f"prefill {s.prompt_tokens / max(s.prefill_seconds, 1e-9):.1f} tokens/s, "
        f"decode {decoded / max(s.decode_seconds, 1e-9):.1f} tokens/s ({s.output_tokens} new tokens)\n"
        f"kept {s.peak_cached_tokens:,} of {longest:,} tokens a head "
        f"({100 * s.peak_cached_tokens / max(longest, 1):.1f} %), "
        f"KV {s.peak_kv_bytes / 1e6:,.1f} MB instead of {s.full_kv_bytes / 1e6:,.1f} MB, "
        f"{s.evictions} evictions, "
        f"{100 * s.eviction_seconds / max(seconds, 1e-9):.1f} % of the time"
    )


def main(arguments: list[str] | None = None) -> int:
    for name in ("stdin", "stderr"):  # where one is closed, nothing is read or said
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))
    options = parser().parse_args(arguments)
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # which nothing here needs
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        params(options)  # what is wrong with them is said before a model is loaded
        check_page(options)
        check_batch(options)
        if options.prompts_file is not None:
            return answer_prompts_file(options)
        if options.chat and (options.n != 1 or options.raw):
            raise ValueError("--chat: a conversation has one answer a turn, through the chat template")
        text = None if options.chat else read_prompt(options)
        if text is None and not options.chat:
            if options.model is None:
                return demonstrate(options)
            print(f"No prompt given; a built-in example is used:\n{EXAMPLE}\n", file=sys.stderr)
            text = EXAMPLE
        llm = load(options)
        return converse(llm, options) if options.chat else complete(llm, text, options)
    except ValueError as error:
        print(f"generate.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # the output cannot be written, or its reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"generate.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
