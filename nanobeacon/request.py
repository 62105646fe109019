"""What a user asks for and how far it has come: `SamplingParams`, `Request`.

Knows nothing of tensors, models or text: a request is token ids, lengths and pages."""

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .policies import check, check_whole


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. None: as generation_config.json says, else neutral.
    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; max_tokens None is what the context leaves;
    logprobs=k returns each token's log-probability and the k best, before temperature and filters."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            value = getattr(self, name)
            value = () if value is None else (value,) if name == "stop" and isinstance(value, str) else value
            check(isinstance(value, list | tuple), name, value, f"a list of {kind.__name__} is possible")
            object.__setattr__(self, name, tuple(value))
        for name, least in {"max_tokens": 1, "top_k": 0, "n": 1, "logprobs": 0, "seed": None}.items():
            if (value := getattr(self, name)) is not None or name == "n":
                check_whole(name, value, least)
        ranges = {
            "temperature": (lambda v: 0 <= v <= sys.float_info.max, "a number of at least 0"),
            "top_p": (lambda v: 0 < v <= 1, "a number above 0 and up to 1"),
            "min_p": (lambda v: 0 <= v <= 1, "a number from 0 to 1"),
        }
        for name, (possible, wanted) in ranges.items():
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            check(value is None or (number and possible(value)), name, value, f"{wanted} is possible")
        texts, ids = list(self.stop), list(self.stop_token_ids)
        right = all(isinstance(text, str) and text for text in texts)
        check(right, "stop", texts, "strings that are not empty are possible")
        right = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
        check(right, "stop_token_ids", ids, "token ids (0 and up) are possible")
        check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False is possible")

    def with_defaults(self, defaults: Mapping[str, Any]) -> "SamplingParams":
        """Every open sampling field filled from `defaults`, else with its neutral value (greedy)."""
        neutral = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        filled = {k: defaults.get(k, v) for k, v in neutral.items() if getattr(self, k) is None}
        return replace(self, **filled)


Listener = Callable[[int, Any], None]  # sees (index, logits) of each output token


@dataclass(eq=False)
class Request:
    """One completion on its way. Three lengths and how they relate:
    num_tokens = prompt + output, what was read or sampled; num_computed <= num_tokens, the positions whose
    keys and values were computed; cached_length <= num_computed, the slots still held, which eviction lowers.
    The next position is num_computed, the next slot is cached_length: one is logical, the other physical."""

    arrival: int  # number of its prompt in the order of arrival; the n completions of one prompt share it
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    protected: int  # first tokens that no eviction touches
    completion: int = 0
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    forced: list[int] | None = None  # output tokens that are given instead of sampled
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    trace: list[Any] = field(default_factory=list)
    kept_scores: Any = None  # [L, K, n], what a policy's own score gave the slots it chose to keep
    stream: Any = None  # its growing text, where there is a tokenizer
    pieces: list[str] = field(default_factory=list)  # text that nobody has taken yet
    on_logits: Listener | None = None
    finish_reason: str | None = None
    error: str | None = None

    num_computed: int = 0
    cached_length: int = 0
    pages: list[int] = field(default_factory=list)
    pages_changed: bool = False  # the device's page table does not know them yet
    row: int = 0  # its row of the query buffer and of the page table; 0 is nobody's
    buffer_count: int = 0  # queries held in that row, for policies that reduce
    leader: "Request | None" = None  # completion of the same prompt whose prefill this one waits for

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def decodes(self) -> bool:
        """Whether its next step feeds one sampled token, all before it being computed."""
        return self.num_computed >= len(self.prompt_token_ids) and self.num_tokens - self.num_computed == 1

    @property
    def num_given(self) -> int:
        """Of a forced output: tokens that can be fed at once while it decodes; the last is never fed."""
        return len(self.forced) - len(self.output_token_ids)

    @property
    def evictable(self) -> int:
        """L of section 3: cached tokens that count against the budget, below 0 until the protected are in."""
        return self.cached_length - self.protected

    def chance(self, purpose: str, position: int) -> float:
        """A number in [0, 1) from seed, purpose and position; completions share those inside their prompt."""
        completion = self.completion if position >= len(self.prompt_token_ids) else 0
        return random.Random(f"{purpose} {self.seed:x} {completion} {position}").random()

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of the logical positions [start, stop)."""
        prompt, output = len(self.prompt_token_ids), self.forced or self.output_token_ids
        if start >= prompt:
            return output[start - prompt : stop - prompt]
        return (self.prompt_token_ids[start:stop] + output[: stop - prompt])[: stop - start]

    def append(self, token_id: int) -> None:
        """Take a sampled token; it may end the request (stop strings are decided on the text)."""
        self.output_token_ids.append(token_id)
        ends = token_id in self.params.stop_token_ids
        ends = ends or (token_id in self.eos_token_ids and not self.params.ignore_eos)
        if ends and self.forced is None:
            self.finish_reason = "stop"
        elif len(self.output_token_ids) >= self.max_tokens:
            self.finish_reason = "length"
