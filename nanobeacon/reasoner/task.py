"""The reasoner's task: a walk over registers that looks back, counts, and rewrites what it will need later.

A problem is a prompt and the one true trace that follows it, in words (one word is one token):

    BOS ? ? ?   C 7 ; A 12 ; ...   @ 5 >    the facts, shuffled, and where the accumulator y starts
    A 12 ; B 9 ; C 7 ; ...                  the recitation: each fact is looked up once, in order
    then without end:
    | F 4 5   3 6   2 7   1 8   0 9         read a register, then count: its value down to 0, y up as much
    = D 15 9                                if y is a multiple of 3 then: write a register, repeat y

The register to read is y mod 8; the one to write and its new value are functions of y. All of that is
local. The value read is the **look-back**: it stands where that register was last mentioned, in the prompt
or in the trace, some 20 to 600 tokens away. As the next register depends on the result, the distances are
irregular, and one wrong look-back derails the walk. The trace has no end, so a problem is cut at a chosen
length; the same seed cut shorter is a prefix.

Knows nothing about models, tokenizer files or torch. Positions are indices into the trace (the output).
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

NUMBERS = 32  # the accumulator counts modulo this
REGISTERS = "ABCDEFGH"
WORDS = (*map(str, range(NUMBERS)), *REGISTERS, *"BOS ? ; @ > | = EOS".split())  # word i is token i
BOS, FILL, END, START, GO, READ, WRITE, EOS = range(len(WORDS) - 8, len(WORDS))
FIRST_TOKENS = 4  # BOS ? ? ?: carry no fact, for whoever protects first tokens
PROMPT_LENGTH = FIRST_TOKENS + 3 * len(REGISTERS) + 3
RECITATION_LENGTH = 3 * len(REGISTERS)

_VALUES = range(3, 21)  # what a register may hold: how long a read counts
_WRITE_ORDER = (5, 2, 7, 0, 3, 6, 1, 4)  # which register a range of y writes: not the one that is read next
_TOKEN = {word: token for token, word in enumerate(WORDS)}


@dataclass(frozen=True)
class Problem:
    """A prompt, its true trace, and where in the trace look-backs stand (the recitation's do not count)."""

    prompt: tuple[int, ...]
    trace: tuple[int, ...]
    look_backs: tuple[int, ...]


@dataclass(frozen=True)
class Grade:
    """`look_backs` reads made in an output, `right` of them true; `whole`: every token of the trace right."""

    look_backs: int
    right: int
    whole: bool


def encode(text: str) -> list[int]:
    """Words to token ids. ValueError for a word that is not in the vocabulary."""
    try:
        return [_TOKEN[word] for word in text.split()]
    except KeyError as error:
        raise ValueError(f"text: no word {error}; possible are {' '.join(WORDS)}") from None


def decode(token_ids: Iterable[int]) -> str:
    """Token ids to words, joined with spaces."""
    return " ".join(WORDS[token] for token in token_ids)


def is_register(token: int) -> bool:
    return NUMBERS <= token < NUMBERS + len(REGISTERS)


def problems(
    count: int, length: int, seed: int, recitation: bool = True, writes: bool = True
) -> list[Problem]:
    """`count` problems of `length` tokens, the prompt counted in. Equal seeds, equal problems, anywhere."""
    generator = random.Random(seed)
    return [problem(generator, length, recitation, writes) for _ in range(count)]


def problem(generator: random.Random, length: int, recitation: bool = True, writes: bool = True) -> Problem:
    """One problem of `length` tokens. Whatever the length, it draws the same numbers from `generator`."""
    if length <= PROMPT_LENGTH:
        raise ValueError(f"length: {length} tokens leave no trace; the prompt alone has {PROMPT_LENGTH}")
    while True:
        facts = [generator.choice(_VALUES) for _ in REGISTERS]
        order = generator.sample(range(len(REGISTERS)), len(REGISTERS))
        start = generator.randrange(NUMBERS)
        trace, look_backs, reads = _walk(facts, start, length - PROMPT_LENGTH, recitation, writes)
        # Some walks fall into a short circle that needs two or three registers: too easy for any cache.
        first = reads[:16]
        if len(set(first)) >= len(REGISTERS) - 1 and max(map(first.count, first)) <= 5:
            break
    told = [token for register in order for token in (NUMBERS + register, facts[register], END)]
    prompt = (BOS, FILL, FILL, FILL, *told, START, start, GO)
    length -= PROMPT_LENGTH
    return Problem(prompt, tuple(trace[:length]), tuple(place for place in look_backs if place < length))


def _walk(
    facts: Sequence[int], y: int, length: int, recitation: bool, writes: bool
) -> tuple[list[int], list[int], list[int]]:
    """At least `length` tokens and 16 reads of the true trace: (tokens, look-backs, registers read)."""
    values = list(facts)
    trace: list[int] = []
    look_backs: list[int] = []
    reads: list[int] = []
    if recitation:
        for register, value in enumerate(values):
            trace += [NUMBERS + register, value, END]
    while len(trace) < length or len(reads) < 16:
        register = y % len(REGISTERS)
        value = values[register]
        look_backs.append(len(trace) + 2)
        reads.append(register)
        trace += [READ, NUMBERS + register, value, y]
        for left in reversed(range(value)):
            y = (y + 1) % NUMBERS
            trace += [left, y]
        if writes and y % 3 == 0:
            register = _WRITE_ORDER[y * len(REGISTERS) // NUMBERS]
            values[register] = _VALUES[(7 * y + 3) % len(_VALUES)]
            trace += [WRITE, NUMBERS + register, values[register], y]
    return trace, look_backs, reads


def follow(tokens: Iterable[int]) -> Iterator[bool | None]:
    """For each token of prompt + output, as it comes: is this look-back right? None where it is no look-back.

    A look-back is judged by the trace it stands in, not by the true one: right is the value that the prompt
    told or the output itself wrote last. So a walk that strayed is not punished twice, and a read that was
    wrong does not become the truth.
    """
    values: dict[int, int] = {}
    before, last, started = EOS, EOS, False
    for token in tokens:
        verdict = None
        if is_register(last):
            if before == READ:
                verdict = token == values.get(last)
            elif before == WRITE or not started:
                values[last] = token
        started = started or token == GO
        before, last = last, token
        yield verdict


def grade(problem: Problem, output: Sequence[int]) -> Grade:
    """Judge an output: its look-backs by itself (`follow`), the whole by the true trace.

    What lies past the trace's length is not read. An output without any look-back has 0 right of 0.
    """
    output = tuple(output)[: len(problem.trace)]
    verdicts = [verdict for verdict in follow(problem.prompt + output) if verdict is not None]
    return Grade(len(verdicts), sum(verdicts), output == problem.trace)
