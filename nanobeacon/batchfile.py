"""A file of prompts, one JSON object a line, answered into another file.

Behind `generate.py --prompts-file`. Uses `LLM.submit` and `LLM.run`, so all lines share one
continuous batch. Knows nothing of command lines, caches or of how a step runs.

An input line holds `prompt` (a text or token ids) or `messages`, maybe an `id`, and maybe fields of
SamplingParams, which win over those of the call. An output line holds the `line` number of its
prompt, its `id` where it has one, and either `completions` or `error`. Output lines come in the
order in which requests end.

Several groups of processes may share one file: each has an LLM and its own lines, and the first
process of each appends to the same output.
"""

import codecs
import json
import os
import sys
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .llm import LLM, output_of
from .parallel import Group
from .policies import check
from .request import Request, SamplingParams

Key = tuple[str, str | int]  # ("id", its id) or ("line", its number)
SAMPLING = tuple(f.name for f in fields(SamplingParams))
# Every output line begins so: a line that was cut short is told from somebody else's file by it
BEGINNING = b'{"line": '
FIELDS = ("id", "prompt", "messages", *SAMPLING)


@dataclass
class Line:
    """A line of the input: its number from 1, its id, its content, or why it cannot run."""

    number: int
    id: str | int | None = None
    content: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def key(self) -> Key:
        """What tells it from the other lines, also in a later run: its id, else its number."""
        return ("line", self.number) if self.id is None else ("id", self.id)


@dataclass(frozen=True)
class Outcome:
    """What a run did: lines answered, lines that failed, lines that the output held already."""

    answered: int
    failed: int
    skipped: int
    interrupted: bool


def answer_file(
    llm: LLM,
    source: Path,
    output: Path,
    params: SamplingParams,
    raw: bool = False,
    chat_options: dict[str, Any] | None = None,
    everyone: Group | None = None,
) -> Outcome:
    """Answer every line of `source` that `output` does not hold yet, and append the answers there.

    raw: no chat template for `prompt`. chat_options: further arguments of `LLM.chat_prompt`. Ctrl-C
    ends the run and keeps what has ended. ValueError where a file cannot be read or written as a
    whole; what is wrong with a line becomes the `error` of its output line.

    everyone: all processes that answer this file, of which each `llm.engine.group` takes its share
    of the lines; None: that group alone. All get the outcome of the whole file. ConnectionError
    where one is gone.
    """
    group = llm.engine.group
    everyone = everyone or group
    # 1. What is to be done: the lines that an earlier run has not answered. One process mends the
    #    output and tells the others what it holds.
    lines = read_lines(source)
    another = "another file than the prompts' is possible"
    check(not _same_file(source, output), "output", str(output), another)
    held = everyone.by_first(lambda: prepare_output(output))
    todo = [line for line in lines if line.key not in held]
    skipped = len(lines) - len(todo)
    if skipped:
        print(f"{output} holds {skipped:,} of {len(lines):,} lines already: skipped", file=sys.stderr)
    # 2. This group's share of them. Its first process writes; the others compute the same.
    mine = _share(todo, everyone.rank // group.size, everyone.size // group.size)
    with _opened(output if group.rank == 0 else Path(os.devnull)) as out:
        run = _Run(llm, out, raw, chat_options or {})
        interrupted = False
        try:
            run.answer(mine, params)
        except KeyboardInterrupt:
            interrupted = True
            if everyone.size > 1:
                raise  # the others wait for this process, and end when it is gone
        finally:
            run.abort()
    # 3. What all groups did, one process of each being asked.
    counts = everyone.collect((run.answered, run.failed))[:: group.size]
    answered = sum(answered for answered, _ in counts)
    failed = sum(failed for _, failed in counts)
    return Outcome(answered, failed, skipped, interrupted)


def _share(lines: list[Line], number: int, groups: int) -> list[Line]:
    """The lines of one of several groups: dealt out in turn, the longest first, so that all have
    about as much to read. One group has all of them, as they come."""
    if groups == 1:
        return lines
    longest_first = sorted(lines, key=lambda line: len(str(line.content)), reverse=True)
    return longest_first[number::groups]


class _Run:
    """Answers on their way into an open output file, and how many have got there."""

    def __init__(self, llm: LLM, out: Any, raw: bool, chat_options: dict[str, Any]) -> None:
        self.llm = llm
        self.out = out
        self.raw = raw or llm.tokenizer is None or llm.tokenizer.chat_template is None
        self.chat_options = chat_options
        # Lines that have not ended, by the arrival number that a line's requests share
        self.waiting: dict[int, tuple[Line, list[Request]]] = {}
        self.answered = 0
        self.failed = 0

    def answer(self, lines: list[Line], params: SamplingParams) -> None:
        """Queue all lines, run them together, write each as soon as its completions have ended."""
        with tqdm(total=len(lines), unit=" lines", disable=None, file=sys.stderr) as bar:
            # 1. The queue. A line that cannot run is answered at once.
            for line in lines:
                requests = self._submit(line, params)
                if line.error is None:
                    self.waiting[requests[0].arrival] = (line, requests)
                else:
                    self._write(line, [])
                    bar.update()
            queued = [request for _, requests in self.waiting.values() for request in requests]
            # 2. The run, which names a request whenever it has got tokens or ended.
            began = time.perf_counter()
            written_before = self.llm.stats.output_tokens
            for request, _ in self.llm.run(queued):
                if request.arrival not in self.waiting:
                    continue  # the last completions of a line ended in one step: it is written
                line, requests = self.waiting[request.arrival]
                if not all(one.finish_reason for one in requests):
                    continue
                # 3. A line that has ended.
                del self.waiting[request.arrival]
                self._write(line, requests)
                written = self.llm.stats.output_tokens - written_before
                speed = written / (time.perf_counter() - began)
                bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
                bar.update()

    def abort(self) -> None:
        """End what has not ended, also what was queued and never ran."""
        for _, requests in self.waiting.values():
            for request in requests:
                self.llm.engine.abort(request)

    def _submit(self, line: Line, params: SamplingParams) -> list[Request]:
        """The requests of a line; none, and its error set, where it cannot run."""
        if line.error is not None:
            return []
        try:
            own = {name: line.content[name] for name in SAMPLING if name in line.content}
            prompt = self._prompt(line.content)
            requests = self.llm.submit([prompt], replace(params, **own))
        except ValueError as error:
            line.error = str(error)
            return []
        line.error = requests[0].error
        return requests

    def _prompt(self, content: dict[str, Any]) -> Any:
        """What is submitted: a text or ids as they are, or ids of what the chat template
        renders."""
        if "messages" in content:
            return self.llm.chat_prompt(content["messages"], **self.chat_options)
        prompt = content["prompt"]
        if self.raw or not isinstance(prompt, str):
            return prompt
        return self.llm.chat_prompt([{"role": "user", "content": prompt}], **self.chat_options)

    def _write(self, line: Line, requests: list[Request]) -> None:
        """One output line, whole and at once, so that whoever stops the program finds it."""
        entry: dict[str, Any] = {"line": line.number}
        if line.id is not None:
            entry["id"] = line.id
        # One completion that failed is the line's error: it would be missing among the others.
        errors = [request.error for request in requests if request.error]
        error = line.error or (errors[0] if errors else None)
        if error is not None:
            entry["error"] = " ".join(error.split())
            self.failed += 1
        else:
            entry["completions"] = [_completion(request) for request in requests]
            self.answered += 1
        text = json.dumps(entry, ensure_ascii=False)
        self.out.write(f"{text}\n".encode())
        self.out.flush()


def _completion(request: Request) -> dict[str, Any]:
    """What an output line says of one completion."""
    output = output_of(request)
    found = {"text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
    if output.logprobs is not None:
        found["logprobs"] = output.logprobs
    return found


def read_lines(source: Path) -> list[Line]:
    """The lines of a file of prompts, empty ones left out; each is right or says what is
    wrong with it.

    ValueError for a file that cannot be read. Of lines with one id only the first keeps it.
    """
    try:
        content = source.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from None
    lines = [_line(number, raw) for number, raw in enumerate(content.split(b"\n"), 1) if raw.strip()]
    # The number of the line that had a key first
    first: dict[Key, int] = {}
    for line in lines:
        earlier = first.setdefault(line.key, line.number)
        if earlier != line.number:
            line.error = f"id {line.id!r:.80} is also that of line {earlier}"
            line.id = None  # the id is the other line's
    return lines


def _line(number: int, raw: bytes) -> Line:
    """One line of the input, checked; what is wrong with it is its `error`, never an exception."""
    try:
        # 1. An object whose id can be written again.
        content = json.loads(raw)
        check(isinstance(content, dict), "line", content, "an object is possible")
        line_id = content.get("id")
        named = line_id is None or (isinstance(line_id, str | int) and not isinstance(line_id, bool))
        check(named, "id", line_id, "a text or a whole number is possible")
        if isinstance(line_id, str):
            line_id.encode()  # JSON can spell halves of characters, which UTF-8 cannot
    except (ValueError, RecursionError) as error:
        return Line(number, error=f"line {number} is not as it has to be: {error}")
    # 2. Fields that mean something. From here on the id is known, and stands beside the error.
    line = Line(number, line_id, content)
    unknown = sorted(content.keys() - set(FIELDS))
    if unknown:
        line.error = f"field {unknown[0]!r:.80} is unknown; possible are {', '.join(FIELDS)}"
    elif ("prompt" in content) == ("messages" in content):
        line.error = "one of prompt and messages is needed, and not both"
    return line


def prepare_output(output: Path) -> set[Key]:
    """Keys of the lines that an output file holds. A last line that a crash cut short is
    taken away.

    ValueError for a file that holds something else, which is then left as it is.
    """
    try:
        content = output.read_bytes() if output.exists() else b""
    except OSError as error:
        raise ValueError(f"{output} cannot be read: {error.strerror}") from None
    # 1. Whole lines: each has a key.
    *whole, cut = content.split(b"\n")
    held: set[Key] = set()
    for number, raw in enumerate(whole, 1):
        try:
            entry = json.loads(raw)
            key = ("id", entry["id"]) if "id" in entry else ("line", entry["line"])
            held.add(key)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _foreign(output, number) from None
    # 2. What stands behind the last line break: nothing, or a line of ours that was cut short.
    if not (cut.startswith(BEGINNING) or BEGINNING.startswith(cut)):
        raise _foreign(output, len(whole) + 1)
    if cut:
        with _opened(output) as out:
            out.truncate(len(content) - len(cut))
        print(f"{output}: its last line was cut short, and is answered again", file=sys.stderr)
    return held


def _foreign(output: Path, number: int) -> ValueError:
    """The error for an output file that somebody else has written."""
    wanted = "only the output of an earlier run can be continued; give another file"
    return ValueError(f"{output}, line {number} is none of this program's: {wanted}")


def _opened(output: Path) -> Any:
    """The output, to be appended to. ValueError where that is not possible."""
    try:
        return open(output, "ab")
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error.strerror}") from None


def _same_file(source: Path, output: Path) -> bool:
    """Whether both names mean one file, which would then be overwritten by its answers."""
    return output.exists() and os.path.samefile(source, output)
