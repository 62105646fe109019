"""Eviction policies as data: which past queries are asked, which softmax, which pooling, what
is always kept.

Knows no tensors and no requests. A policy is a row of POLICIES; `settle` checks it together with a
budget and gives the numbers of METHOD.md, "Budget and period". To try an idea, hand a `Policy` to
`LLM(policy=...)`, or name it as "module:name" to the programs; EXTENDING.md shows one.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

# The words that each field may hold; METHOD.md says what they mean
WORDS = {
    "ranking": ("queries", "newest", "random", "none"),
    "select": ("fps", "first", "reservoir", "none"),
    "domain": ("all", "evictable", "before-recents"),
    "group": ("max", "mean", "layer", "logits"),
    "pool": ("max", "mean", "sum"),
    "smoothing": (None, "avg", "max"),
}


def check(right: bool, name: str, value: object, possible: str) -> None:
    """ValueError naming an option, its value and what is possible."""
    if not right:
        raise ValueError(f"{name}={value!r}: {possible}")


def check_whole(name: str, value: object, least: int | None = 0, or_else: str = "") -> None:
    """ValueError for a value that is no whole number, or below `least` (None: no bound)."""
    right = isinstance(value, int) and not isinstance(value, bool)  # True is an int too
    right = right and (least is None or value >= least)
    bound = "" if least is None else f" of at least {least}"
    check(right, name, value, f"{or_else}a whole number{bound} is possible")


@dataclass(frozen=True)
class Stage:
    """One score, and how many of the free slots go to the tokens that it ranks highest
    (METHOD.md, "Stages").

    Only tokens that no earlier stage has taken compete. The fields after `latest` are
    those of `Policy`.
    """

    # a number, a share of the free ones, or None: all that are left
    slots: int | float | None = None
    # so many newest queries are asked; None: the policy's beacons and recents
    latest: int | None = None
    domain: str = "all"
    group: str = "max"
    pool: str = "max"
    smoothing: str | None = None

    def __post_init__(self) -> None:
        """ValueError for a word or a number that no stage can have."""
        for name in ("domain", "group", "pool", "smoothing"):
            value = getattr(self, name)
            check(value in WORDS[name], f"stage: {name}", value, f"possible are {WORDS[name]}")
        if self.latest is not None:
            check_whole("stage: latest", self.latest, least=1)
        if isinstance(self.slots, float):
            check(0 < self.slots < 1, "stage: slots", self.slots, "a share between 0 and 1 is possible")
        elif self.slots is not None:
            check_whole("stage: slots", self.slots, least=1, or_else="a share, None or ")

    def slots_of(self, free: int, left: int) -> int:
        """How many of the slots that are left this stage gives away; `free`: what all
        stages share."""
        if self.slots is None:
            return left
        is_share = isinstance(self.slots, float)
        wanted = int(self.slots * free) if is_share else self.slots
        return min(wanted, left)


@dataclass(frozen=True)
class Policy:
    """One line of METHOD.md's table of policies. The numbers are its own; one that a user
    gives wins.

    stages: several scores that share the free slots. They replace domain, group, pool and
    smoothing. score: a function of the user's own, from a `ranking.Slots` to a tensor [B, L, K, n];
    the higher, the more worth keeping. It replaces the ranking. The queries named here are still
    asked for it, by each stage if there are stages (`Slots.attention`); with beacons=0 and
    recents=0 nobody is asked.
    """

    name: str
    ranking: str = "queries"  # by what the evictable tokens are ranked
    select: str = "fps"  # which past queries become the beacons
    beacons: int = 16  # queries rotated at the current position
    recents: int = 16  # newest queries, rotated at their own positions
    domain: str = "all"  # the slots that the softmax runs over
    group: str = "max"  # how the heads of a KV head are pooled
    pool: str = "max"  # how the queries are pooled
    smoothing: str | None = None  # over 7 neighbouring slots
    window: int = 32  # newest tokens that always stay
    # R-KV's lambda: the rest of the score is minus the redundancy
    attention_share: float | None = None
    buffer: int | None = None  # rows of the query buffer; None: beacons + recents
    stages: tuple[Stage, ...] = ()
    score: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        """ValueError for fields that are impossible, alone or together."""
        # 1. Each field for itself.
        for name, words in WORDS.items():
            value = getattr(self, name)
            check(value in words, f"policy {self.name!r}: {name}", value, f"possible are {words}")
        for name in ("beacons", "recents", "window"):
            check_whole(name, getattr(self, name))
        # 2. Together: beacons must come from somewhere, rows must suffice for what is asked.
        found = self.select != "none" or self.beacons == 0
        check(found, "beacons", self.beacons, "select='none' finds no beacons; 0 is possible")
        share = self.attention_share
        right = share is None or (isinstance(share, int | float) and 0 <= share <= 1)
        check(right, "attention_share", share, "None or a number from 0 to 1 is possible")
        if self.buffer is not None:
            check_whole("buffer", self.buffer, least=self.beacons + self.recents)
        own_score = self.score is None or (callable(self.score) and self.ranking == "queries")
        check(own_score, "score", self.score, "a function, with ranking='queries', is possible")
        if self.stages:
            self._check_stages()

    def _check_stages(self) -> None:
        """ValueError for stages that nobody would carry out."""
        name = f"policy {self.name!r}: stages"
        # 1. They stand alone: nothing beside them says how slots are ranked.
        right = isinstance(self.stages, tuple)
        right = right and all(isinstance(stage, Stage) for stage in self.stages)
        check(right, name, self.stages, "a tuple of Stage is possible")
        alone = self.ranking == "queries" and self.attention_share is None
        check(alone, name, self.stages, "they need ranking='queries' and no attention_share")
        for field in ("domain", "group", "pool", "smoothing"):
            value = getattr(self, field)
            idle = value == getattr(Policy, field)
            check(idle, f"policy {self.name!r}: {field}", value, "each stage names its own; leave it out")
        # 2. Together they give away every free slot: the last one takes what is left. Beside a score
        #    of the user's own they only say what their queries attend to.
        for_the_rest = [stage for stage in self.stages if stage.slots is None]
        if self.score is not None:
            silent = len(for_the_rest) == len(self.stages)
            check(silent, name, self.stages, "score gives the slots away; leave slots out of the stages")
        else:
            last = for_the_rest == [self.stages[-1]]
            check(last, name, self.stages, "the last stage, and no other, has slots=None")
        # 3. Each has queries to ask.
        observed = self.beacons + self.recents > 0 or all(stage.latest for stage in self.stages)
        if not observed:
            nobody = "a stage without latest asks them, and there are none"
            raise ValueError(f"policy {self.name!r}: beacons=0 and recents=0: {nobody}")

    @property
    def asks(self) -> bool:
        """Whether past queries have a say, so that they must be kept."""
        return self.ranking == "queries" and self.beacons + self.recents + self.latest > 0

    @property
    def latest(self) -> int:
        """Newest queries that are kept beside beacons and recents, for the stages that ask them."""
        return max((stage.latest or 0 for stage in self.stages), default=0)

    @property
    def observed(self) -> int:
        """Rows of the query buffer a head for beacons and recents; 0: none of them are asked."""
        if self.ranking != "queries" or self.beacons + self.recents == 0:
            return 0
        rows = self.buffer or self.beacons + self.recents
        return max(rows, self.beacons + 1)  # room for one new query beside the beacons

    def recents_of(self, stage: Stage) -> int:
        """How many of the newest queries a stage asks."""
        return self.recents if stage.latest is None else stage.latest

    @property
    def scores(self) -> tuple[Stage, ...]:
        """The stages; a policy without any has one, for all slots."""
        if self.stages:
            return self.stages
        only = Stage(
            slots=None,
            latest=None,
            domain=self.domain,
            group=self.group,
            pool=self.pool,
            smoothing=self.smoothing,
        )
        return (only,)


_LATEST = Policy("recent", select="none", beacons=0, recents=32)  # asks only the newest queries
_BLIND = replace(_LATEST, recents=0)  # asks nobody
_SNAPKV = Policy(
    "snapkv",
    select="none",
    beacons=0,
    recents=8,
    domain="before-recents",
    group="logits",
    pool="mean",
    smoothing="max",
)

# What the newest 32 queries attend to, averaged over the heads of a KV head and over
# neighbouring slots
NEIGHBOURHOOD = Stage(latest=32, domain="evictable", group="mean", pool="sum", smoothing="avg")

# Each row is one idea of which tokens to keep; METHOD.md has where it comes from, and the
# same table
POLICIES = {
    policy.name: policy
    for policy in (
        replace(_BLIND, name="full", ranking="none"),
        Policy("beacon"),
        Policy("beacon-half", beacons=24, recents=8, stages=(Stage(0.5), NEIGHBOURHOOD)),
        Policy("beacon-mean", pool="mean"),
        _LATEST,
        Policy("initial", select="first"),
        Policy("random-query", select="reservoir"),
        replace(_LATEST, name="rpc", domain="evictable", group="layer", pool="sum", smoothing="avg"),
        _SNAPKV,
        replace(_SNAPKV, name="rkv", window=8, attention_share=0.1),
        replace(_BLIND, name="streaming", ranking="newest", window=0),
        replace(_BLIND, name="random", ranking="random"),
    )  # fmt: skip
}


@dataclass(frozen=True)
class EvictionSettings:
    """A policy with a budget and all its numbers (METHOD.md). Hashable, equal for equal
    settings."""

    policy: Policy
    budget: int  # B_max: evictable tokens in the cache at which an eviction runs
    protect: str | int = "prompt"

    @cached_property
    def period(self) -> int:
        """Tokens that an eviction removes, and steps between two of them."""
        return max(1, self.budget // 8)

    @cached_property
    def kept(self) -> int:
        """B_min: evictable tokens in the cache after an eviction."""
        return self.budget - self.period

    @cached_property
    def window(self) -> int:
        """Newest tokens that always stay; those outside the softmax's domain have no score
        and stay too."""
        policy = self.policy
        unscored = [policy.recents_of(s) for s in policy.scores if s.domain == "before-recents"]
        return max(policy.window, *unscored, 0)

    @cached_property
    def reduces(self) -> bool:
        """Whether beacons are distilled by repeated reduction, with a freeze before each
        eviction."""
        return self.policy.select == "fps" and self.policy.observed > 0

    @cached_property
    def recents(self) -> int:
        """Recents of one eviction: a policy that reduces has only those since the freeze."""
        return min(self.policy.recents, self.period) if self.reduces else self.policy.recents

    @cached_property
    def freeze(self) -> int:
        """L from which on queries are recents, no longer candidates for beacons."""
        return self.budget - self.recents

    @cached_property
    def capacity(self) -> int:
        """Rows of the query buffer a head; 0: the policy asks no queries."""
        return self.policy.observed + self.policy.latest

    def protected(self, prompt_length: int) -> int:
        """How many of a request's first tokens are never evicted."""
        return prompt_length if self.protect == "prompt" else int(self.protect)


def policy_named(policy: str | Policy) -> Policy:
    """A row of POLICIES by its name, a policy of the user's own as "module:name", or a
    Policy as it is.

    ValueError for anything else, with what is possible.
    """
    wanted = f"possible are {', '.join(POLICIES)}, or module:name for a Policy of your own"
    if not isinstance(policy, str):
        check(isinstance(policy, Policy), "policy", policy, wanted)
        return policy
    if policy in POLICIES:
        return POLICIES[policy]
    module, colon, name = policy.partition(":")
    check(bool(module and colon and name), "policy", policy, wanted)
    if os.getcwd() not in sys.path:
        # a program's path begins where the program lies, not where it is called
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy={policy!r}: {error}; {wanted}") from error
    check(isinstance(found, Policy), "policy", policy, f"{name} is no Policy; {wanted}")
    return found


def settle(
    policy: str | Policy = "beacon",
    budget: int | None = None,
    window: int | None = None,
    beacons: int | None = None,
    recents: int | None = None,
    protect: str | int = "prompt",
) -> EvictionSettings | None:
    """The settings of an engine, None for a full cache.

    window, beacons, recents: None is the policy's own number; one that is given always
    wins. ValueError for whatever is impossible together, with what is possible; nothing is
    ignored silently.
    """
    # 1. Each value for itself.
    policy = policy_named(policy)
    named = {"window": window, "beacons": beacons, "recents": recents}
    numbers = {name: value for name, value in named.items() if value is not None}
    for name, value in numbers.items():
        check_whole(name, value)
    if protect != "prompt":
        check_whole("protect", protect, or_else="'prompt' or ")
    # 2. Without a budget nothing is evicted, and whatever would say how has no effect.
    if budget is None:
        idle = [f"{name}={value}" for name, value in numbers.items()]
        if protect != "prompt":
            idle.append(f"protect={protect}")
        if policy not in (POLICIES["beacon"], POLICIES["full"]):
            idle.append(f"policy={policy.name!r}")
        if idle:
            raise ValueError(f"{idle[0]}: acts only under a budget, and budget=None; give one")
        return None
    # 3. The policy with the user's numbers.
    everything = f"policy {policy.name!r} keeps everything; leave the budget out"
    check(policy.ranking != "none", "budget", budget, everything)
    policy = _overridden(policy, numbers)
    check_whole("budget", budget, least=1)
    settings = EvictionSettings(policy, budget, protect)
    # 4. An eviction must have a choice. The smallest budget that leaves one is named: beyond
    #    9/8 of the window, more or less a rounding.
    always = settings.window
    if always >= settings.kept:
        possible = range(1, budget + 9 * always + 9)
        smallest = next(b for b in possible if replace(settings, budget=b).kept > always)
        raise ValueError(
            f"budget={budget}: an eviction leaves {settings.kept} tokens and the newest {always} always "
            f"stay, so nothing could be chosen; the smallest budget possible is {smallest}"
        )
    return settings


def _overridden(policy: Policy, numbers: dict[str, int]) -> Policy:
    """The policy with the numbers that the user gave; one that it has no use for is refused."""
    has = {
        "window": policy.ranking in ("queries", "random"),
        "beacons": policy.beacons > 0,
        "recents": policy.recents > 0,
    }
    for name, value in numbers.items():
        acts = has[name] or value == getattr(policy, name)
        check(acts, name, value, f"policy {policy.name!r} has no {name}; leave it out")
    policy = replace(policy, **numbers)
    if policy.ranking == "queries" and not policy.asks and policy.score is None:
        raise ValueError("beacons=0 and recents=0: at least one query is needed to rank the tokens")
    if policy.beacons == 0:
        policy = replace(policy, select="none")  # rows of recents alone stay across evictions
    return policy
