"""Text from a model, at the command line: streams to stdout; progress and statistics go to stderr.

Reads a prompt and has it answered. Options are `nanobeacon/options.py`'s, what is printed is
`printing.py`'s, what is done is `nanobeacon.LLM`'s. What needs torch is imported where it is used,
so that --help and mistakes do not wait for it.

Exit status: 0; 1 where a request or the output failed; 2 for a user's mistake (one line); 130 for
Ctrl-C, with what was generated so far kept.
"""

import argparse
import codecs
import io
import logging
import os
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanobeacon.options import DEFAULT_MODEL, check_processes, check_together, parser
from nanobeacon.printing import answer, closing_lines, name_of, rate, tell
from nanobeacon.processes import joined, spoken_once

# Options that mean something to the demonstration
DEMONSTRATION = ("budget", "threads", "trace", "compare")
PATIENCE = 1.0  # seconds that standard input may take without a word about it
EXAMPLE = (
    "A baker fills 17 trays with 164 rolls: a small tray holds 8, a large one 12. The oven takes 4 trays at "
    "a time, all of one size; small trays bake for 14 minutes, large ones for 18. How many of each size "
    "are there, and how long does the baking take at least? Work step by step and check the result."
)


def read_prompt(options: argparse.Namespace) -> str | None:
    """The prompt: the option, a file or a pipe; None where there is none, or only spaces.

    The newline that ends a file or a pipe, and a byte order mark, are no part of it. ValueError for
    a file that cannot be read or is no UTF-8.
    """
    # 1. On the command line.
    given = options.prompt if options.text in (None, "-") else options.text
    if given is not None:
        return given
    # 2. In a file, or on standard input unless somebody sits there.
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
    # 3. Without what editors and shells put around it.
    text = text.removeprefix(codecs.BOM_UTF8.decode())
    if text.endswith("\r\n"):
        text = text[:-2]
    else:
        text = text.removesuffix("\n")
    return text if text.strip() else None


def read_standard_input() -> str:
    """All of standard input; one that keeps somebody waiting is said on stderr."""
    notice = "Reading the prompt from standard input; Ctrl-D at a terminal ends it."
    waits = threading.Timer(PATIENCE, print, (notice,), {"file": sys.stderr, "flush": True})
    waits.daemon = True  # Ctrl-C does not wait for it
    waits.start()
    try:
        return sys.stdin.read()
    finally:
        waits.cancel()


def demonstrate(options: argparse.Namespace) -> int:
    """The embedded reasoner at work; of the options only those of DEMONSTRATION mean
    something to it."""
    # 1. An option that would do nothing is refused.
    plain = vars(parser().parse_args([]))
    for name, value in vars(options).items():
        if value != plain[name] and name not in DEMONSTRATION:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} needs --model or a prompt: without them this is a demonstration")
    from nanobeacon.measure import retention
    from nanobeacon.reasoner import demo, folder

    # 2. The demonstration.
    set_threads(options, str(folder()))
    chosen = {} if options.budget is None else {"budget": options.budget}
    status = demo.run(**chosen)
    # 3. Its page.
    if options.trace is not None:
        policies = ["beacon"] if options.compare is None else ["beacon", options.compare]
        settings = {"model": "the embedded reasoner", "temperature": 0}
        records = []
        for policy in policies:
            llm, output = demo.traced(policy, **chosen)
            records.append(retention.record(llm, output, settings))
        write_page(records, options.trace)
    return status


def write_page(records: list[dict[str, Any]], file: str) -> None:
    """The retention page of one run, or of two side by side. OSError where it cannot be written."""
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


def answer_prompts_file(options: argparse.Namespace, everyone: Any, group: Any) -> int:
    """Answer a file of prompts into a file; returns the exit status.

    everyone: all processes, which share out the lines; group: those that compute one model with
    this one.
    """
    from nanobeacon import batchfile

    source = Path(options.prompts_file)
    output = Path(options.output)
    batchfile.read_lines(source)  # a file that cannot be read is said before a model is loaded
    llm = load(options, group)
    outcome = batchfile.answer_file(
        llm,
        source,
        output,
        params(options),
        raw=options.raw,
        chat_options=thinking(options),
        everyone=everyone,
    )
    done = f"{outcome.answered:,} lines answered, {outcome.failed:,} failed, {outcome.skipped:,} skipped"
    print(f"{done}: {output}", file=sys.stderr)
    if outcome.interrupted:
        return 130
    return 1 if outcome.failed else 0


def set_threads(options: argparse.Namespace, model: str) -> None:
    """Give torch the threads that the user wants, or one for a tiny model.

    In a product of small matrices threads would mostly wait for each other.
    """
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
    """--max-tokens beyond the context becomes what the context leaves, with a word on stderr.

    For a number that no prompt could be short enough for; `within_context` sees to the others.
    """
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
    # The option is a text: a number in it is one of first tokens.
    protect = options.protect
    if protect.lstrip("-").isdigit():
        protect = int(protect)
    # Requests at once: each takes room in the cache, so that one prompt reserves for itself only.
    seats = options.max_num_seqs
    if not seats:
        seats = 16 if options.prompts_file else min(options.n, 64)
    return LLM(
        model,
        device=options.device,
        dtype=options.dtype,
        seed=options.seed,
        max_num_seqs=seats,
        budget=options.budget,
        policy=options.policy,
        window=options.window,
        beacons=options.beacons,
        recents=options.recents,
        protect=protect,
        trace=options.trace is not None,
        prefix_cache=not options.no_prefix_cache,
        progress=sys.stderr.isatty(),
        group=group,
    )


def params(options: argparse.Namespace) -> Any:
    """The SamplingParams that the options describe. ValueError for a value that is not possible."""
    from nanobeacon import SamplingParams

    return SamplingParams(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        stop=options.stop,
        stop_token_ids=options.stop_token_id,
        n=options.n,
    )


def complete(llm: Any, text: str, options: argparse.Namespace) -> int:
    """One prompt, through the chat template where there is one; returns the exit status."""
    # 1. The prompt as the model reads it, and no more tokens than the context leaves beside it.
    has_template = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    if not has_template and not options.raw:
        tell("The model has no chat template: it continues the text as it is.")
    if options.raw or not has_template:
        prompt = text
    else:
        prompt = llm.chat_prompt([{"role": "user", "content": text}], **thinking(options))
    sampling = within_context(llm, prompt, params(options))
    # 2. The text.
    requests, interrupted = answer(llm, prompt, sampling, options.json)
    # 3. What is to be said about it.
    greedy = requests[0].params.temperature == 0 or requests[0].params.top_k == 1
    if len(requests) > 1 and greedy:
        tell(f"--n {len(requests)}: without sampling (temperature 0) all completions are equal")
    for request in requests:
        if request.finish_reason == "length" and not options.json:
            tell(f"{name_of(request, len(requests))} was cut at {len(request.output_token_ids):,} tokens")
    tell(closing_lines(llm, [requests]))
    errors = [request.error for request in requests if request.error]
    if errors:
        tell(f"generate.py: {errors[0]}")
    # 4. The page of what the cache kept.
    if options.trace is not None and not errors:
        records = [record(llm, requests[0], options)]
        if options.compare is not None and not interrupted:
            records.append(compared(prompt, options, llm.engine.group))
        llm.engine.group.by_first(lambda: write_page(records, options.trace))
    if interrupted:
        return 130
    return 1 if errors else 0


def within_context(llm: Any, prompt: Any, sampling: Any) -> Any:
    """The sampling, --max-tokens lowered to what the context leaves beside the prompt, with a word
    on stderr; a prompt that leaves nothing is the engine's to refuse."""
    if llm.tokenizer is None or sampling.max_tokens is None:
        return sampling
    length = len(llm.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
    left = llm.engine.max_model_len - length
    if not 0 < left < sampling.max_tokens:
        return sampling
    tell(f"--max-tokens {sampling.max_tokens:,}: the context leaves {left:,} beside the prompt")
    return replace(sampling, max_tokens=left)


def compared(prompt: Any, options: argparse.Namespace, group: Any) -> dict[str, Any]:
    """The same prompt under the policy of --compare, silently; what the page shows of it.

    It has an engine of its own: a cache holds what one policy has left in it.
    """
    second = argparse.Namespace(**vars(options))
    second.policy = options.compare
    if options.compare == "full":  # which takes none of what acts under a budget
        second.budget = None
        second.window = None
        second.beacons = None
        second.recents = None
        second.protect = "prompt"
    llm = load(second, group)
    requests = llm.submit([prompt], params(second))
    for _ in llm.run(requests):
        pass
    if requests[0].error:
        raise ValueError(f"--compare {options.compare}: {requests[0].error}")
    return record(llm, requests[0], second)


def thinking(options: argparse.Namespace) -> dict[str, Any]:
    """What the chat template is told about thinking: nothing unless the user says so."""
    return {} if options.thinking is None else {"enable_thinking": options.thinking}


def converse(llm: Any, options: argparse.Namespace) -> int:
    """Hold a conversation on standard input; returns the exit status.

    Lines and commands are `nanobeacon/chat.py`'s; here an answer is printed, and what it took.
    """
    from nanobeacon import chat

    turns: list[list[Any]] = []  # the requests of each, for the closing lines

    def answer_turn(prompt: list[int], sampling: Any) -> Any:
        """One answer, printed, and a line about it; gives its request."""
        written_before = llm.stats.output_tokens
        seconds_before = llm.stats.decode_seconds
        requests, _ = answer(llm, prompt, sampling, options.json)
        turns.append(requests)
        (request,) = requests
        written = llm.stats.output_tokens - written_before
        seconds = llm.stats.decode_seconds - seconds_before
        speed = rate(written - 1, seconds)  # the first token is the prefill's
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


def open_streams() -> None:
    """Where a stream is closed nothing is read or said; what stdout cannot express is replaced."""
    for name in ("stdin", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def serve(options: argparse.Namespace, everyone: Any, group: Any) -> int:
    """Do what the options ask for; returns the exit status.

    In the order in which they win: a file of prompts, a conversation, a prompt. Without a prompt
    and a model it is the demonstration; a model alone answers the built-in example.
    """
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
    """The program as each process runs it, of which the first speaks; returns its exit status."""
    return spoken_once(lambda: run(arguments))


def run(arguments: list[str] | None) -> int:
    """The program; returns its exit status, which the module's docstring lists.

    What a user can do about is one line on stderr; anything else shows where it happened.
    """
    open_streams()
    options = parser().parse_args(arguments)
    if sys.stdout is None:
        print("generate.py: standard output is closed, so nothing could be answered", file=sys.stderr)
        return 1
    # which nothing here needs
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        # 1. What is wrong with the options is said before a model is loaded …
        params(options)
        check_together(options)
        # 2. … also what is wrong with them for so many processes.
        in_groups = joined(options.device, options.tensor_parallel, options.data_parallel)
        with in_groups as (everyone, group):
            check_processes(options, everyone.size, group.size)
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
