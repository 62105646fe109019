"""What a user asks for and how far it has come: `SamplingParams`, `Request`.

Knows nothing of tensors, models or text: a request is token ids, lengths and pages."""

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .policies import check, check_whole

# (token ids, one row of logits) -> a row, or None
LogitsProcessor = Callable[[list[int], Any], Any]
Listener = Callable[[int, Any], None]  # sees (index, logits) of each output token

# Number fields: what is possible, in code and in words. None is "not given" in all of them.
NUMBERS = {
    "temperature": (lambda v: 0 <= v <= sys.float_info.max, "a number of at least 0"),
    "top_p": (lambda v: 0 <= v <= 1, "a number from 0, the best token alone, to 1"),
    "min_p": (lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda v: 0 < v <= sys.float_info.max, "a number above 0"),
}
# Whole numbers and their least values; None: any.
WHOLE_NUMBERS = {"max_tokens": 1, "min_tokens": 0, "top_k": -1, "n": 1, "logprobs": 0, "seed": None}
# What a field means that neither the user nor the checkpoint sets: greedy, and nothing
# changes the logits.
NEUTRAL = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. None: as generation_config.json says,
    else neutral.

    temperature 0 is greedy; top_k 0 (or -1), top_p 1 and min_p 0 are off; top_p 0 is the best token
    alone; max_tokens None is the checkpoint's, else what the context leaves; logprobs=k returns
    each token's log-probability and the k best, before temperature and filters.

    Before those filters the logits of a row may be changed (`processors.py`), in this order:
    - `logit_bias` {id: number added};
    - `repetition_penalty` (1 is off) for the ids of prompt and output;
    - `bad_token_ids`, never sampled;
    - `min_tokens`: so many come before an end token or a stop string may end;
    - `logits_processor(token_ids, logits)`: called with the ids of prompt and output so far (to
      read only) and float32 logits [V], which it changes in place (and returns None) or for which
      it returns others. What it raises ends its own request only."""

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
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # a dict has no hash
    bad_token_ids: tuple[int, ...] | list[int] = ()
    logits_processor: LogitsProcessor | None = None

    def __post_init__(self) -> None:
        """ValueError naming the first field that is wrong, its value and what is possible."""
        # 1. Lists become tuples, which nobody changes later; a text alone is one stop string.
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, kind in (("stop", str), ("stop_token_ids", int), ("bad_token_ids", int)):
            value = getattr(self, name)
            if value is None:
                value = ()
            check(isinstance(value, list | tuple), name, value, f"a list of {kind.__name__} is possible")
            object.__setattr__(self, name, tuple(value))
        # 2. Numbers. Most may be left open; n may not.
        for name, least in WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name == "n":
                check_whole(name, value, least)
        for name, (possible, wanted) in NUMBERS.items():
            value = getattr(self, name)
            right = value is None or (_is_number(value) and possible(value))
            check(right, name, value, f"{wanted} is possible")
        # 3. What the lists hold, and the rest.
        texts = list(self.stop)
        right = all(isinstance(text, str) and text for text in texts)
        check(right, "stop", texts, "strings that are not empty are possible")
        for name in ("stop_token_ids", "bad_token_ids"):
            ids = list(getattr(self, name))
            check(all(_is_token_id(i) for i in ids), name, ids, "token ids (0 and up) are possible")
        check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False is possible")
        self._check_logits_fields()

    def _check_logits_fields(self) -> None:
        """The same for the fields that change logits."""
        bias = self.logit_bias
        if bias is not None:
            right = isinstance(bias, Mapping) and all(
                _is_token_id(token) and _is_finite(value) for token, value in bias.items()
            )
            check(right, "logit_bias", bias, "a dict {token id: number} is possible")
            object.__setattr__(self, "logit_bias", dict(bias))
        hook = self.logits_processor
        wanted = "a function of (token_ids, logits) is possible"
        check(hook is None or callable(hook), "logits_processor", hook, wanted)

    @property
    def token_ids_named(self) -> list[int]:
        """Ids whose logits are changed by name: they must exist in the vocabulary."""
        return [*self.bad_token_ids, *(self.logit_bias or ())]

    def with_defaults(self, defaults: Mapping[str, Any]) -> "SamplingParams":
        """Every open sampling field filled from `defaults`, else with its neutral value
        (greedy)."""
        filled = {}
        for name, neutral in NEUTRAL.items():
            if getattr(self, name) is None:
                filled[name] = defaults.get(name, neutral)
        settled = replace(self, **filled)
        # Other spellings of the same: -1 candidates are all, a nucleus of nothing is the best
        # token alone.
        if settled.top_k == -1:
            settled = replace(settled, top_k=0)
        if settled.top_p == 0:
            settled = replace(settled, top_p=1.0, top_k=1)
        return settled


def _is_number(value: object) -> bool:
    """Whether a value is an int or a float; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    """Whether a value is a number that a float can hold; NaN and infinity are none."""
    return _is_number(value) and abs(value) <= sys.float_info.max


def _is_token_id(value: object) -> bool:
    """Whether a value can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(eq=False)
class Request:
    """One completion on its way: what was asked, what came of it, and where its cache lies.

    Three lengths, and how they relate:
    - num_tokens = prompt + output: what was read or sampled, also what the host does not know yet;
    - num_computed <= num_tokens: the positions whose keys and values were computed;
    - cached_length <= num_computed: the slots still held, which eviction lowers.
    The next position is num_computed, the next slot is cached_length: one is logical, the other
    physical.
    """

    # What was asked
    arrival: int  # number of its prompt; the n completions of one prompt share it
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    protected: int  # first tokens that no eviction touches
    completion: int = 0
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    forced: list[int] | None = None  # output tokens that are given instead of sampled

    # What has come of it
    output_token_ids: list[int] = field(default_factory=list)
    num_unread: int = 0  # sampled behind these; they lie on the device, and the host has not read them
    logprobs: list[Any] = field(default_factory=list)
    trace: list[Any] = field(default_factory=list)
    kept_scores: Any = None  # [L, K, n], what a policy's own score gave the slots it chose to keep

    # Its text
    num_text_tokens: int = 0  # output tokens that are text: all but the one that ended the request
    stream: Any = None  # its growing text, where there is a tokenizer …
    num_decoded: int = 0  # … of so many tokens so far
    num_seen: int = 0  # output tokens that whoever runs it knows of

    # How its next token is sampled
    on_logits: Listener | None = None
    draw: Any = None  # how its tokens are sampled, but for the random number …
    uniforms: Any = None  # … and where each token's number comes from
    # what changes its logits before a token is sampled, where something does
    processing: Any = None

    # How it has ended; None while it has not
    finish_reason: str | None = None  # stop | length | abort | error
    error: str | None = None

    # Where its keys, values and queries lie
    num_computed: int = 0
    cached_length: int = 0
    pages: list[int] = field(default_factory=list)
    pages_sent: int = 0  # so many of the first ones are in the device's page table
    one_run: bool = False  # whether these lie behind each other
    row: int = 0  # its row of the query buffer and of the page table; 0 is nobody's
    buffer_count: int = 0  # queries held in that row, for policies that reduce
    leader: "Request | None" = None  # completion of the same prompt whose prefill it waits for
    budgeted: bool = False  # an eviction may touch what is not protected
    prefix_node: Any = None  # the last of its pages that the prefix cache knows …
    pages_inserted: int = 0  # … and how many these are
    # kept row of the query buffer that is copied into its own before its first step
    found_row: int = 0

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end it; a given output goes on behind them."""
        if self.forced is not None:
            return frozenset()
        ends = frozenset(self.params.stop_token_ids)
        return ends if self.params.ignore_eos else ends | self.eos_token_ids

    @cached_property
    def only_sampled(self) -> bool:
        """Whether a token is all that is wanted of its rows: none is given, no processor changes
        them, nobody listens, and no log-probability is told."""
        given = self.forced is not None
        changed = self.processing is not None
        heard = self.on_logits is not None
        told = self.params.logprobs is not None
        return not (given or changed or heard or told)

    @property
    def num_output(self) -> int:
        """Tokens of the output so far, those included that the host has not read yet."""
        return len(self.output_token_ids) + self.num_unread

    @property
    def num_tokens(self) -> int:
        """Tokens of the text so far, prompt and output."""
        return len(self.prompt_token_ids) + self.num_output

    @property
    def is_full(self) -> bool:
        """Whether its last token has been sampled: it ends with it, whatever token that is."""
        # Asked of every request in every step, as `decodes` is.
        sampled = len(self.output_token_ids) + self.num_unread
        return sampled >= self.max_tokens

    @property
    def decodes(self) -> bool:
        """Whether its next step feeds one sampled token, all before it being computed."""
        # Asked of every request in every step: lengths are taken once.
        prompt = len(self.prompt_token_ids)
        computed = self.num_computed
        sampled = len(self.output_token_ids) + self.num_unread
        return computed >= prompt and prompt + sampled - computed == 1

    @property
    def num_given(self) -> int:
        """Of a forced output: tokens that can be fed at once while it decodes; the last
        is never fed."""
        return len(self.forced) - len(self.output_token_ids)

    @property
    def evictable(self) -> int:
        """L of METHOD.md: cached tokens that count against the budget, below 0 until the
        protected are in."""
        return self.cached_length - self.protected

    def chance(self, purpose: str, position: int) -> float:
        """A number in [0, 1) from seed, purpose and position; completions share those inside
        their prompt."""
        completion = self.completion if position >= len(self.prompt_token_ids) else 0
        return random.Random(f"{purpose} {self.seed:x} {completion} {position}").random()

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of the logical positions [start, stop), of a forced output also those
        to come."""
        prompt = len(self.prompt_token_ids)
        output = self.forced or self.output_token_ids
        if start >= prompt:
            return output[start - prompt : stop - prompt]
        # output[:negative] would count from its end; what it gives too much is behind `stop`
        both = self.prompt_token_ids[start:stop] + output[: stop - prompt]
        return both[: stop - start]

    def token(self, position: int) -> int:
        """Token id of a logical position behind the prompt."""
        return (self.forced or self.output_token_ids)[position - len(self.prompt_token_ids)]

    @property
    def text(self) -> str | None:
        """Its text so far; None without a tokenizer. It is decoded when somebody asks for it."""
        if self.stream is None:
            return None
        self._catch_up()
        return self.stream.text

    def take_text(self) -> str:
        """The text that has become certain since the last call."""
        if self.stream is None:
            return ""
        self._catch_up()
        return self.stream.take()

    def _catch_up(self) -> None:
        """Decode what is there. Text that stop strings are looked for in has been decoded by
        the engine."""
        if self.params.stop:
            return
        # asked first: another thread may be ending it just now
        ended = self.finish_reason is not None
        self.decode()
        if ended:
            self.stream.finish()

    def decode(self) -> None:
        """Let the stream read the output tokens that it has not read; it may find a stop string."""
        for token_id in self.output_token_ids[self.num_decoded : self.num_text_tokens]:
            self.stream.push(token_id)
            self.num_decoded += 1

    def append(self, token_id: int) -> None:
        """Take a sampled token; it may end the request (stop strings are decided on the text)."""
        self.output_token_ids.append(token_id)
        if token_id in self.end_token_ids:
            self.finish_reason = "stop"
            return
        self.num_text_tokens += 1
        if len(self.output_token_ids) >= self.max_tokens:
            self.finish_reason = "length"
