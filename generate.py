"""Text from a model, at the command line: streams to stdout; progress and statistics go to stderr.

Parses and prints; what it does is `nanobeacon.LLM`. Exit status: 0, 2 for a user's mistake (one line), 130
for Ctrl-C, with what was generated so far kept.
"""

import argparse
import codecs
import io
import json
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from nanobeacon import __version__
from nanobeacon.policies import POLICIES

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEMONSTRATION = ("budget", "threads", "trace", "compare")
LAST_WORDS = 5.0  # seconds that the first of several processes gets to say why it ends
PATIENCE = 1.0  # seconds that standard input may take without a word about it
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
        description="Generate text with a Qwen, Llama or Mistral checkpoint, its KV cache within a budget.",
    )
    add = p.add_argument
    add("--version", action="version", version=f"nanobeacon {__version__}")
    add("--model", help=f"folder or hub id (with a prompt {DEFAULT_MODEL}, else a demonstration)")

    add = p.add_mutually_exclusive_group().add_argument
    add("text", nargs="?", metavar="PROMPT", help="the prompt; - reads it from standard input")
    add("--prompt", metavar="TEXT", help="the same")
    add("--prompt-file", metavar="FILE", help="- is standard input")
    add("--prompts-file", metavar="FILE", help="JSON lines, answered together into --output")
    add("--chat", action="store_true", help="hold a conversation; /help in it lists its commands")

    add = p.add_argument
    add("--raw", action="store_true", help="no chat template: the model continues the text")
    how = "whether the chat template lets the model think first (default: the template's own)"
    add("--thinking", action=argparse.BooleanOptionalAction, help=how)
    add("--output", metavar="FILE", help="of --prompts-file: JSON lines; what it holds is skipped")
    add("--max-num-seqs", type=int, help="requests at once (default: --n, 16 with --prompts-file)")

    add = p.add_argument_group("what the cache keeps").add_argument
    add("--budget", type=int, help="output tokens kept in the cache (default: all)")
    policies = f"{', '.join(POLICIES)}, or module:name of your own (default: %(default)s)"
    add("--policy", default="beacon", help=policies)
    add("--window", type=int, help="newest tokens always kept (default: the policy's own, beacon's is 32)")
    add("--beacons", type=int, help="past queries asked (default: the policy's own, beacon's is 16)")
    add("--recents", type=int, help="newest queries asked (default: the policy's own, beacon's is 16)")
    add("--protect", default="prompt", help="prompt, or a number of first tokens kept (default: prompt)")

    how = "compute every prompt anew, also what was read before (as the turns of --chat were)"
    add("--no-prefix-cache", action="store_true", help=how)

    add = p.add_argument_group(
        "how it is sampled (default: as the checkpoint says, else greedy)"
    ).add_argument
    add("--max-tokens", type=int, help="default: what the context leaves")
    add("--temperature", type=float, help="0 is greedy")
    add("--top-p", type=float, help="above 0, up to 1, which is off")
    add("--top-k", type=int, help="0 is off")
    add("--min-p", type=float, help="from 0, which is off, to 1")
    add("--repetition-penalty", type=float, help="1 is off")
    add("--min-tokens", type=int, help="no end and no stop string before so many")
    add("--seed", type=int, help="the same seed gives the same draws (default: new ones each time)")
    add("--n", type=int, default=1, help="completions of the prompt (default: %(default)s)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the text before it; repeatable")
    add("--stop-token-id", action="append", type=int, default=[], metavar="ID", help="ends it; repeatable")

    add = p.add_argument_group("where it runs and what is printed").add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N (default: %(default)s)")
    add("--dtype", default="auto", choices=DTYPES, help=f"{', '.join(DTYPES)} (default: %(default)s)")
    add("--threads", type=int, help="of the CPU (default: torch's own, 1 for tiny models)")
    add("--json", action="store_true", help="one JSON object per completion instead of text")
    add("--trace", metavar="FILE", help="write a page (HTML) that shows what the cache kept")
    add("--compare", metavar="POLICY", help="with --trace: run a second policy, on the same page")

    add = p.add_argument_group("several processes, which torchrun starts").add_argument
    how = "so many compute one model together (default: all; 1 with --data-parallel)"
    add("--tensor-parallel", type=int, metavar="T", help=how)
    how = "each T of them have a model of their own and take lines of --prompts-file"
    add("--data-parallel", action="store_true", help=how)
    return p


def spoken_once(program: Callable[[], int]) -> int:
    """Run a program; its exit status. Of the processes that torchrun starts only the first prints: the others
    have the same to say, unless they crash.

    Where one fails torchrun ends all, so one that is silent lets the first speak out."""
    if os.environ.get("RANK", "0") == "0":
        return program()
    status = 1
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            status = program()
    except Exception:
        traceback.print_exc()
    finally:
        if status != 0:
            time.sleep(LAST_WORDS)
    return status


@contextmanager
def processes(options: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """The group of all processes that torchrun has started, and the group of those that compute one model
    together with this one. Without torchrun both are this process alone."""
    from nanobeacon.llm import device_of
    from nanobeacon.parallel import join

    device = device_of(options.device)
    with join(device.type) as everyone:
        if everyone.size > 1 and device.index is not None:
            raise ValueError(
                f"--device {options.device}: each process has a GPU of its own; cuda is possible"
            )
        together = options.tensor_parallel
        if together is None:
            together = 1 if getattr(options, "data_parallel", False) else everyone.size
        yield everyone, everyone.split(together)


def read_prompt(options: argparse.Namespace) -> str | None:
    """The prompt: the option, a file or a pipe; None where there is none.

    The newline that ends a file or a pipe, and a byte order mark, are no part of it.
    """
    given = options.prompt if options.text in (None, "-") else options.text
    if given is not None:
        return given
    path = "-" if options.text == "-" else options.prompt_file
    try:
        if path not in (None, "-"):
            with open(path, encoding="utf-8") as file:
                text = file.read()
        elif path == "-" or not sys.stdin.isatty():
            text = read_standard_input()
        else:
            text = ""
        text.encode()  # what could not be decoded may have become surrogates
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--prompt-file {path or '-'}: {error}") from error
    text = text.removeprefix(codecs.BOM_UTF8.decode())
    text = text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")
    return text if text.strip() else None


def read_standard_input() -> str:
    """All of standard input; one that keeps somebody waiting is said on stderr."""
    notice = "Reading the prompt from standard input; Ctrl-D at a terminal ends it."
    waits = threading.Timer(PATIENCE, print, (notice,), {"file": sys.stderr, "flush": True})
    waits.daemon = True
    waits.start()
    try:
        return sys.stdin.read()
    finally:
        waits.cancel()


def demonstrate(options: argparse.Namespace) -> int:
    """The embedded reasoner at work; of the options only those of DEMONSTRATION mean something to it."""
    plain = vars(parser().parse_args([]))
    for name, value in vars(options).items():
        if value != plain[name] and name not in DEMONSTRATION:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} needs --model or a prompt: without them this is a demonstration")
    from nanobeacon.measure import retention
    from nanobeacon.reasoner import demo, folder

    set_threads(options, str(folder()))
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
    tell(f"What the cache kept: {file}")


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
    from nanobeacon.policies import check

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


def check_processes(options: argparse.Namespace, everyone: Any, group: Any) -> None:
    """What several processes can do, said before anything is loaded."""
    if everyone.size > group.size and options.prompts_file is None:
        several = f"--tensor-parallel {group.size} of {everyone.size} processes"
        raise ValueError(f"{several}: the others are for the lines of --prompts-file")
    if options.data_parallel and options.prompts_file is None:
        raise ValueError("--data-parallel: it shares out the lines of --prompts-file")
    if everyone.size > 1 and options.chat:
        raise ValueError("--chat: a conversation needs one process, without torchrun")


def answer_prompts_file(options: argparse.Namespace, everyone: Any, group: Any) -> int:
    """Answer a file of prompts into a file; returns the exit status."""
    from nanobeacon import batchfile

    source, output = Path(options.prompts_file), Path(options.output)
    batchfile.read_lines(source)  # a file that cannot be read is said before a model is loaded
    how = thinking(options)
    llm = load(options, group)
    outcome = batchfile.answer_file(llm, source, output, params(options), options.raw, how, everyone)
    done = f"{outcome.answered:,} lines answered, {outcome.failed:,} failed, {outcome.skipped:,} skipped"
    print(f"{done}: {output}", file=sys.stderr)
    return 130 if outcome.interrupted else 1 if outcome.failed else 0


def set_threads(options: argparse.Namespace, model: str) -> None:
    """Give torch the threads that the user wants, or one for a tiny model."""
    import torch

    from nanobeacon.config import read_config
    from nanobeacon.hub import resolve
    from nanobeacon.threads import threads_for

    most = max(os.cpu_count() or 1, torch.get_num_threads())
    if options.threads is not None and not 1 <= options.threads <= most:
        raise ValueError(f"--threads {options.threads}: 1 to {most} are possible on this machine")
    if options.threads is None and not os.path.isfile(os.path.join(model, "config.json")):
        return  # a hub's model is none of the tiny ones
    wanted = threads_for(read_config(resolve(model, config_only=True)), options.n, options.threads)
    if wanted is not None:
        torch.set_num_threads(wanted)


def cut_to_context(options: argparse.Namespace, model: str) -> None:
    """--max-tokens beyond the context becomes what the context leaves, with a word on stderr."""
    from nanobeacon.config import read_config
    from nanobeacon.hub import resolve

    if options.max_tokens is None:
        return
    context = read_config(resolve(model, config_only=True)).context
    if options.max_tokens >= context:
        said = f"--max-tokens {options.max_tokens:,}: the context holds {context:,} tokens with the prompt"
        tell(f"{said}; what it leaves is used")
        options.max_tokens = None


def load(options: argparse.Namespace, group: Any) -> Any:
    """The LLM that the options describe, computed by a group of processes."""
    from nanobeacon import LLM

    model = DEFAULT_MODEL if options.model is None else options.model
    cut_to_context(options, model)
    set_threads(options, model)
    logging.getLogger("nanobeacon").setLevel(logging.INFO)
    names = ("device", "dtype", "seed", "budget", "policy", "window", "beacons", "recents")
    chosen = {name: getattr(options, name) for name in names}
    protect = int(options.protect) if options.protect.lstrip("-").isdigit() else options.protect
    seats = options.max_num_seqs or (16 if options.prompts_file else min(options.n, 64))
    return LLM(
        model,
        max_num_seqs=seats,
        protect=protect,
        progress=sys.stderr.isatty(),
        trace=options.trace is not None,
        prefix_cache=not options.no_prefix_cache,
        group=group,
        **chosen,
    )


def params(options: argparse.Namespace) -> Any:
    from nanobeacon import SamplingParams

    names = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    names += ("seed", "stop", "n")
    chosen = {name: getattr(options, name) for name in names}
    return SamplingParams(stop_token_ids=options.stop_token_id, **chosen)


def show(pieces: Iterator[tuple[Any, str]], requests: Sequence[Any]) -> None:
    """Print completions as they grow: the first at once, the next one when those before it have ended."""
    held = dict.fromkeys(requests, "")
    ended = set()
    current = 0
    announce(0, len(requests))
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
            announce(current, len(requests))


def announce(completion: int, n: int) -> None:
    """Say on stderr which completion follows, where there are several."""
    if 1 < n and completion < n:
        print(f"--- completion {completion + 1} of {n}", file=sys.stderr, flush=True)


def answer(llm: Any, prompt: Any, sampling: Any, as_json: bool) -> tuple[list[Any], bool]:
    """Generate and print the completions of one prompt: their requests, and whether Ctrl-C ended them."""
    requests = llm.submit([prompt], sampling)
    interrupted = False
    if requests[0].error:
        raise ValueError(requests[0].error)
    pieces = llm.run(requests)
    try:
        if as_json:
            for _ in tqdm(pieces, unit=" tokens", leave=False, disable=None):
                pass
        else:
            show(pieces, requests)
    except KeyboardInterrupt:
        interrupted = True
        pieces.close()
        print(file=sys.stderr if as_json else sys.stdout, flush=True)
    if as_json:
        for request in requests:
            print(json_line(fields_of(llm, request)), flush=True)
    return requests, interrupted


def fields_of(llm: Any, request: Any) -> dict[str, Any]:
    """What --json prints of a completion."""
    from nanobeacon.llm import output_of

    fields = asdict(output_of(request, request.arrival)) | {"stats": asdict(llm.stats)}
    fields.pop("trace")
    return fields


def json_line(value: Any) -> str:
    """JSON on one line, escaped where the encoding of stdout has not all of its characters."""
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(value)
    return line


def complete(llm: Any, text: str, options: argparse.Namespace) -> int:
    """One prompt, through the chat template where there is one; returns the exit status."""
    raw = options.raw or llm.tokenizer is None or llm.tokenizer.chat_template is None
    prompt = text if raw else llm.chat_prompt([{"role": "user", "content": text}], **thinking(options))
    sampling = params(options)
    if llm.tokenizer is not None and sampling.max_tokens is not None:
        length = len(llm.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
        left = llm.engine.max_model_len - length
        if 0 < left < sampling.max_tokens:
            tell(f"--max-tokens {sampling.max_tokens:,}: the context leaves {left:,} beside the prompt")
            sampling = replace(sampling, max_tokens=left)
    requests, interrupted = answer(llm, prompt, sampling, options.json)
    if len(requests) > 1 and (requests[0].params.temperature == 0 or requests[0].params.top_k == 1):
        tell(f"--n {len(requests)}: without sampling (temperature 0) all completions are equal")
    for request in requests:
        if request.finish_reason == "length" and not options.json:
            tell(f"{name_of(request, len(requests))} was cut at {len(request.output_token_ids):,} tokens")
    tell(closing_lines(llm, [requests]))
    errors = [request.error for request in requests if request.error]
    if errors:
        tell(f"generate.py: {errors[0]}")
    if options.trace is not None and not errors:
        records = [record(llm, requests[0], options)]
        if options.compare is not None and not interrupted:
            records.append(compared(prompt, options, llm.engine.group))
        llm.engine.group.by_first(lambda: write_page(records, options.trace))
    return 130 if interrupted else 1 if errors else 0


def compared(prompt: Any, options: argparse.Namespace, group: Any) -> dict[str, Any]:
    """The same prompt under the policy of --compare, silently; what the page shows of it."""
    changes: dict[str, Any] = {"policy": options.compare}
    if options.compare == "full":
        changes |= {"budget": None, "window": None, "beacons": None, "recents": None, "protect": "prompt"}
    second = argparse.Namespace(**vars(options) | changes)
    llm = load(second, group)
    requests = llm.submit([prompt], params(second))
    for _ in llm.run(requests):
        pass
    if requests[0].error:
        raise ValueError(f"--compare {options.compare}: {requests[0].error}")
    return record(llm, requests[0], second)


def name_of(request: Any, n: int) -> str:
    return "The answer" if n == 1 else f"Completion {request.completion + 1}"


def thinking(options: argparse.Namespace) -> dict[str, Any]:
    """What the chat template is told about thinking: nothing unless the user says so."""
    return {} if options.thinking is None else {"enable_thinking": options.thinking}


def converse(llm: Any, options: argparse.Namespace) -> int:
    """Hold a conversation on standard input; returns the exit status."""
    from nanobeacon import chat

    turns: list[list[Any]] = []

    def answer_turn(prompt: list[int], sampling: Any) -> Any:
        written, seconds = llm.stats.output_tokens, llm.stats.decode_seconds
        requests, _ = answer(llm, prompt, sampling, options.json)
        turns.append(requests)
        written = llm.stats.output_tokens - written
        speed = max(written - 1, 0) / max(llm.stats.decode_seconds - seconds, 1e-9)
        (request,) = requests
        cut = ", cut there" if request.finish_reason == "length" else ""
        tell(
            f"[{written:,} tokens{cut}, {speed:.1f} tokens/s; "
            f"{request.cached_length:,} of {request.num_computed:,} tokens cached]"
        )
        return request

    try:
        chat.converse(llm, params(options), answer_turn, thinking(options))
        return 0
    except KeyboardInterrupt:
        return 130
    finally:
        tell(closing_lines(llm, turns))


def closing_lines(llm: Any, groups: Sequence[Sequence[Any]]) -> str:
    """What it took: speed, what was kept of the tokens, and what the cache held.

    groups: requests that ran together; those of different groups ran one after the other.
    """
    stats = llm.stats
    requests = [request for group in groups for request in group]
    decoded = max(stats.output_tokens - len(requests), 0)
    seconds = stats.prefill_seconds + stats.decode_seconds
    longest = max((request.num_computed for request in requests), default=0)
    token_bytes = llm.engine.page_bytes / llm.engine.config.page_size
    most = stats.peak_cached_tokens
    held = max((sum(min(r.num_computed, most) for r in group) for group in groups), default=0)
    used = min(held * token_bytes, stats.peak_kv_bytes)  # completions share the pages of their prompt
    known = f", {stats.prefix_tokens:,} prompt tokens known from before" if stats.prefix_tokens else ""
    return (
        f"prefill {stats.prompt_tokens / max(stats.prefill_seconds, 1e-9):.1f} tokens/s{known}, "
        f"decode {decoded / max(stats.decode_seconds, 1e-9):.1f} tokens/s "
        f"({stats.output_tokens} new tokens)\n"
        f"kept {most:,} of {longest:,} tokens a head ({100 * most / max(longest, 1):.1f} %); "
        f"KV {stats.peak_kv_bytes / 1e6:,.1f} MB reserved, {used / 1e6:,.1f} MB used, "
        f"{stats.full_kv_bytes / 1e6:,.1f} MB without a budget; "
        f"{stats.evictions} evictions, {100 * stats.eviction_seconds / max(seconds, 1e-9):.1f} % of the time"
    )


def tell(text: str) -> None:
    """What is no part of the answer goes to stderr."""
    print(text, file=sys.stderr, flush=True)


def open_streams() -> None:
    """Where a stream is closed nothing is read or said; what stdout cannot express is replaced."""
    for name in ("stdin", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def serve(options: argparse.Namespace, everyone: Any, group: Any) -> int:
    """Do what the options ask for; returns the exit status."""
    if options.prompts_file is not None:
        return answer_prompts_file(options, everyone, group)
    if options.chat:
        return converse(load(options, group), options)
    text = everyone.by_first(lambda: read_prompt(options))  # standard input can be read once
    if text is None:
        if options.model is None:
            if everyone.size > 1:
                raise ValueError("--model is needed, or a prompt: the demonstration is for one process")
            return demonstrate(options)
        tell(f"No prompt given; a built-in example is used:\n{EXAMPLE}\n")
        text = EXAMPLE
    return complete(load(options, group), text, options)


def main(arguments: list[str] | None = None) -> int:
    return spoken_once(lambda: run(arguments))


def run(arguments: list[str] | None) -> int:
    """The program; returns its exit status."""
    open_streams()
    options = parser().parse_args(arguments)
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # which nothing here needs
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        params(options)  # what is wrong with them is said before a model is loaded
        check_page(options)
        check_batch(options)
        if options.chat and (options.n != 1 or options.raw):
            raise ValueError("--chat: a conversation has one answer a turn, through the chat template")
        with processes(options) as (everyone, group):
            check_processes(options, everyone, group)
            return serve(options, everyone, group)
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
