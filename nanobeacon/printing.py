"""What generate.py prints: texts as they grow or as JSON on stdout, all that is said about
them on stderr.

Knows requests and counters, and how people and programs read them. It knows nothing about options,
prompts or how a text comes about, and imports no torch.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tqdm import tqdm


def answer(llm: Any, prompt: Any, sampling: Any, as_json: bool) -> tuple[list[Any], bool]:
    """Generate and print the completions of one prompt: their requests, and whether
    Ctrl-C ended them.

    ValueError for a prompt that cannot run."""
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
        pieces.close()  # which aborts the requests; what they have so far stays
        print(file=sys.stderr if as_json else sys.stdout, flush=True)
    if as_json:
        for request in requests:
            print(json_line(fields_of(llm, request)), flush=True)
    return requests, interrupted


def show(pieces: Iterator[tuple[Any, str]], requests: Sequence[Any]) -> None:
    """Print completions as they grow: the first at once, the next one when those before it
    have ended."""
    held = dict.fromkeys(requests, "")  # the text of each that is not printed yet
    ended = set()
    current = 0  # the completion that is being printed
    announce(0, len(requests))
    for request, piece in pieces:
        held[request] += piece
        if request.finish_reason is not None:
            ended.add(request)
        # Whatever the current one has; where it has ended, also what the next ones wrote meanwhile.
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


def fields_of(llm: Any, request: Any) -> dict[str, Any]:
    """What --json prints of a completion."""
    from nanobeacon.llm import output_of

    fields = asdict(output_of(request, request.arrival))
    fields.pop("trace")  # far too long for a line; --trace draws it
    fields["stats"] = asdict(llm.stats)
    return fields


def json_line(value: Any) -> str:
    """JSON on one line, escaped where the encoding of stdout has not all of its characters.

    Text may lose a character to such a terminal; JSON is read by programs, and can spell it.
    """
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(value)
    return line


def closing_lines(llm: Any, groups: Sequence[Sequence[Any]]) -> str:
    """What it took: speed, what was kept of the tokens, and what the cache held.

    groups: requests that ran together; those of different groups ran one after the other.
    """
    stats = llm.stats
    # 1. Speed. The first token of each request is the prefill's.
    requests = [request for group in groups for request in group]
    decoded = stats.output_tokens - len(requests)
    prefill = f"prefill {rate(stats.prompt_tokens, stats.prefill_seconds):.1f} tokens/s"
    if stats.prefix_tokens:
        prefill += f", {stats.prefix_tokens:,} prompt tokens known from before"
    decode = f"decode {rate(decoded, stats.decode_seconds):.1f} tokens/s ({stats.output_tokens} new tokens)"
    # 2. What was kept of the longest text.
    longest = max((request.num_computed for request in requests), default=0)
    most = stats.peak_cached_tokens
    kept = f"kept {most:,} of {longest:,} tokens a head ({100 * most / max(longest, 1):.1f} %)"
    # 3. Memory: of pages that are reserved some slots are empty. Completions share their
    #    prompt's pages.
    token_bytes = llm.engine.page_bytes / llm.engine.config.page_size
    held_by_group = [sum(min(request.num_computed, most) for request in group) for group in groups]
    used = min(max(held_by_group, default=0) * token_bytes, stats.peak_kv_bytes)
    memory = (
        f"KV {stats.peak_kv_bytes / 1e6:,.1f} MB reserved, {used / 1e6:,.1f} MB used, "
        f"{stats.full_kv_bytes / 1e6:,.1f} MB without a budget"
    )
    # 4. What eviction costs.
    seconds = stats.prefill_seconds + stats.decode_seconds
    share = 100 * rate(stats.eviction_seconds, seconds)
    evictions = f"{stats.evictions} evictions, {share:.1f} % of the time"
    return f"{prefill}, {decode}\n{kept}; {memory}; {evictions}"


def rate(amount: float, seconds: float) -> float:
    """An amount per second, at least 0, also where no time has passed."""
    return max(amount, 0) / max(seconds, 1e-9)


def name_of(request: Any, n: int) -> str:
    """How one of n completions is spoken of."""
    return "The answer" if n == 1 else f"Completion {request.completion + 1}"


def tell(text: str) -> None:
    """What is no part of the answer goes to stderr."""
    print(text, file=sys.stderr, flush=True)
