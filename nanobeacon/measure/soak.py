"""What `bench.py soak` shows: under random traffic, for as long as one likes, nothing is lost, memory stays
flat, and every request is answered as if it were alone.

Several LLMs of one small model, each with a policy, a budget and sizes of its own, get waves of requests in
turn: random arrivals, lengths, sampling, aborts, n and shared beginnings, all drawn from one seed. Knows the
public API and the proofs that scheduler and pool have of themselves; how they work is not its business.
"""

import random
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from nanobeacon import LLM, SamplingParams
from nanobeacon.llm import Output
from nanobeacon.policies import POLICIES, Policy
from nanobeacon.request import Request

from .common import columns, proc_bytes, show

WAVE = 48  # prompts of a wave
LONGEST_PROMPT = 96
LONGEST_OUTPUT = 48
HEADERS = 6  # beginnings that prompts share
COMPARED = 0.05  # share of the prompts that are run again alone
ABORTED = 0.02  # chance after each step that one request is aborted
REFUSED = 0.01  # share of the prompts that cannot run
NEAR_TIE = 1e-3  # log-probabilities closer than that may change places when rows are added in another order
TIES = 0.01  # share of the compared outputs that near-ties may change

# Memory: samples are averaged in BLOCKS, since neighbours resemble each other; a line is drawn through these.
BLOCKS = 10
STUDENT = 2.306  # 95 % quantile of Student's t for a line through so many points
WARM_UP = 0.5  # share of the samples that is left out: prefix caches fill, the allocator settles
MOST_GROWTH = {"bytes": 512.0, "objects": 1.0}  # a request; more, beyond doubt, is a leak


def add_arguments(p: ArgumentParser) -> None:
    until = p.add_mutually_exclusive_group()
    until.add_argument("--minutes", type=float, help="how long (default: 1)")
    until.add_argument("--requests", type=int, help="how many, instead of how long")
    p.add_argument("--model", help="folder (default: the embedded reasoner)")
    p.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")


@dataclass
class Job:
    """A prompt of a wave and what is known about how it must end."""

    prompt: list[int]
    params: SamplingParams
    refused: bool = False  # it asks for what cannot be
    compared: bool = False  # it is run again alone
    requests: list[Request] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)  # completions


class Wrong(Exception):
    """Something is not as it must be; its text says what."""


def run(options: Namespace) -> dict[str, Any]:
    """Waves of requests on each LLM in turn, until the time is over or enough have been served.

    `wrong` names what is not as it must be, which ends the run; the counts are there all the same.
    """
    from nanobeacon.reasoner import folder

    for name in ("minutes", "requests"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name} {value}: a number above 0 is possible")
    options.model = options.model or str(folder())
    draw = random.Random(options.seed)
    subjects = [Subject(options.model, policy, draw) for policy in POLICIES.values()]
    memory: list[dict[str, float]] = []
    seconds = 60 * (options.minutes or 1)
    began = time.monotonic()
    served = waves = 0
    passed = 0.0
    wrong = None
    with tqdm(desc="requests", total=options.requests, disable=None) as bar:
        while wrong is None and (served < options.requests if options.requests else passed < seconds):
            subject = subjects[waves % len(subjects)]
            count = 0
            try:
                count = subject.serve_wave(draw)
            except Exception as failure:
                wrong = f"{subject.name}, wave {waves} of seed {options.seed}: {_said(failure)}"
            waves += 1
            served += count
            bar.update(count)
            memory.append({"requests": served, **_held()})
            passed = time.monotonic() - began
    growth = {name: growth_of(memory, name) for name in MOST_GROWTH}
    return {
        "seed": options.seed,
        "seconds": passed,
        "waves": waves,
        "requests": served,
        "llms": [subject.row() for subject in subjects],
        "growth": growth,
        "wrong": wrong or _leak(growth),
    }


class Subject:
    """An LLM under traffic, its twin that serves one request at a time, and counts of what it did."""

    def __init__(self, model: str, policy: Policy, draw: random.Random) -> None:
        sizes = _sizes(policy, draw)
        # 1. The largest request, and pages for fewer of them than there are seats: some wait for pages, and
        #    a full cache is preempted.
        budgeted = policy.ranking != "none"
        seats = draw.randint(4, 12)
        most_held = LONGEST_PROMPT + (sizes["budget"] if budgeted else LONGEST_OUTPUT)
        pages_each = -(-most_held // sizes["page_size"])
        num_pages = round(pages_each * draw.uniform(1, seats / 2 if budgeted else 1.5))
        # 2. The two LLMs; float32, so that what differs is no rounding.
        common = dict(device="cpu", dtype="float32", policy=policy, **sizes)
        self.llm = LLM(model, max_num_seqs=seats, num_pages=num_pages, **common)
        self.alone = LLM(model, max_num_seqs=1, num_pages=pages_each, prefix_cache=False, **common)
        # 3. What the table says of them, and what prompts are made of.
        self.policy = policy.name
        self.budget = sizes.get("budget")
        self.sizes = f"{seats} seats, {num_pages} pages of {sizes['page_size']}"
        self.counts: Counter[str] = Counter()
        self.compared = 0
        self.near_ties = 0
        vocabulary = range(self.llm.engine.vocabulary)
        self._ids = [i for i in vocabulary if i not in self.llm.engine.eos_token_ids]
        self._headers = [draw.choices(self._ids, k=LONGEST_PROMPT) for _ in range(HEADERS)]
        self._conversations: deque[list[int]] = deque(maxlen=HEADERS)

    @property
    def name(self) -> str:
        return f"{self.policy} {self.budget or ''}".rstrip()

    def row(self) -> dict[str, Any]:
        """What it did, for the table."""
        stats = self.llm.stats
        return {
            "policy": self.policy,
            "budget": self.budget,
            "sizes": self.sizes,
            "requests": self.counts.total(),
            **{reason: self.counts[reason] for reason in ("stop", "length", "abort", "error")},
            "tokens": stats.output_tokens,
            "evictions": stats.evictions,
            "preemptions": self.llm.engine.scheduler.preemptions,
            "prefix_tokens": stats.prefix_tokens,
            "compared": self.compared,
            "near_ties": self.near_ties,
        }

    def serve_wave(self, draw: random.Random) -> int:
        """Serve a wave and prove that nothing is left of it; how many requests it had. Wrong if not."""
        told = self.llm.stats.output_tokens
        # 1. Requests arrive in bursts, some are aborted, and after every step the pool proves itself.
        waiting = [self._job(draw) for _ in range(WAVE)]
        jobs: list[Job] = []
        busy = True
        while busy or waiting:
            arrive = draw.choice((0, 0, 0, 0, 1, 2, 5))
            for _ in range(min(arrive, len(waiting))):
                job = waiting.pop()
                job.requests = self.llm.submit([job.prompt], job.params)
                jobs.append(job)
            if draw.random() < ABORTED:
                self._abort_one(jobs, draw)
            busy = self.llm.engine.step() is not None
            self.llm.engine.scheduler.check()
        # 2. Nobody is left, nothing is held, everybody is accounted for.
        self._prove_idle()
        for job in jobs:
            self._account(job)
        tokens = sum(len(r.output_token_ids) for job in jobs for r in job.requests)
        if self.llm.stats.output_tokens - told != tokens:
            raise Wrong(f"{tokens} tokens came, {self.llm.stats.output_tokens - told} were counted")
        # 3. A sample is answered in the same way alone.
        for job in jobs:
            if job.compared:
                self._compare(job)
        return sum(len(job.requests) for job in jobs)

    def _job(self, draw: random.Random) -> Job:
        """A prompt that begins like others, or like none, or goes on with a conversation; and its params."""
        prompt = draw.choices(self._ids, k=_skewed(draw, LONGEST_PROMPT))
        kind = draw.random()
        if kind < 0.4:
            header = draw.choice(self._headers)
            prompt = header[: draw.randint(1, LONGEST_PROMPT)] + prompt
        elif kind < 0.6 and self._conversations:
            prompt = draw.choice(self._conversations) + prompt
        prompt = prompt[:LONGEST_PROMPT]
        params = SamplingParams(
            max_tokens=_skewed(draw, LONGEST_OUTPUT),
            temperature=draw.choice((0.0, 0.0, 0.7, 1.0)),
            top_p=draw.choice((1.0, 0.9)),
            top_k=draw.choice((0, 5)),
            seed=draw.getrandbits(63),
            ignore_eos=draw.random() < 0.5,
            stop_token_ids=draw.choices(self._ids, k=draw.choice((0, 0, 0, 2))),
            n=draw.choice((1, 1, 1, 1, 2, 3)),
            logprobs=2,
        )
        job = Job(prompt, params, compared=draw.random() < COMPARED)
        if draw.random() < REFUSED:
            job.refused = True
            job.compared = False
            job.prompt = [*prompt, -1]
        return job

    def _abort_one(self, jobs: Sequence[Job], draw: random.Random) -> None:
        alive = [(job, r) for job in jobs for r in job.requests if r.finish_reason is None]
        if alive:
            job, request = draw.choice(alive)
            job.aborted.add(request.completion)
            self.llm.engine.abort(request)

    def _prove_idle(self) -> None:
        """Nobody waits or runs; all pages and rows are free, or kept by the prefix cache alone."""
        engine = self.llm.engine
        scheduler = engine.scheduler
        if scheduler.running or scheduler.waiting:
            raise Wrong(f"{len(scheduler.running)} requests run on and {len(scheduler.waiting)} wait")
        if engine.pool.used_count:
            raise Wrong(f"{engine.pool.used_count} pages are held by nobody")
        if len(scheduler.free_rows) != engine.config.max_num_seqs:
            raise Wrong(f"{len(scheduler.free_rows)} of {engine.config.max_num_seqs} seats are free")

    def _account(self, job: Job) -> None:
        """Each completion has ended, for a reason that its tokens show."""
        params = job.params
        if len(job.requests) != params.n:
            raise Wrong(f"{len(job.requests)} completions of {params.n}")
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.llm.engine.eos_token_ids)}
        for request in job.requests:
            tokens = request.output_token_ids
            reason = request.finish_reason
            before_last = ends.intersection(tokens[:-1])
            right = {
                "error": job.refused and not tokens,
                "abort": request.completion in job.aborted,
                "length": len(tokens) == params.max_tokens,
                "stop": bool(ends.intersection(tokens[-1:])),
            }
            if before_last or not right.get(reason, False):
                raise Wrong(f"a request of {len(tokens)} tokens ended by {reason!r}: {request.error}")
            if request.pages or request.row:
                raise Wrong("a request that has ended holds pages or a row")
            self.counts[reason] += 1
        if not job.refused:
            self._conversations.append(job.prompt + job.requests[0].output_token_ids)

    def _compare(self, job: Job) -> None:
        """Alone, the same prompt and seed give the same tokens; those of an aborted request are the first."""
        outputs = self.alone.generate([job.prompt], job.params)
        for request, output in zip(job.requests, outputs, strict=True):
            ours = request.output_token_ids
            theirs = output.token_ids
            if request.finish_reason == "abort":
                theirs = theirs[: len(ours)]
            self.compared += 1
            if ours == theirs:
                continue
            if not _is_near_tie(request, output):
                raise Wrong(f"a request got the tokens {ours}, alone {theirs}")
            self.near_ties += 1
            if self.near_ties > max(1, TIES * self.compared):
                raise Wrong(f"{self.near_ties} of {self.compared} outputs differ from those alone")


def _is_near_tie(request: Request, output: Output) -> bool:
    """Whether two outputs part where rounding may decide: both saw the same distribution there, and a greedy
    token had a rival as good (a sampled one may lie at the border between two)."""
    tokens = zip(request.output_token_ids, output.token_ids, strict=False)
    at = next((i for i, (ours, theirs) in enumerate(tokens) if ours != theirs), None)
    if at is None:
        return False  # one ended, the other went on
    _, ours = request.logprobs[at]
    _, theirs = output.logprobs[at]
    same = ours.keys() == theirs.keys() and all(abs(ours[i] - theirs[i]) < NEAR_TIE for i in ours)
    best, second = ours.values()
    return same and (request.params.temperature > 0 or best - second < NEAR_TIE)


def _sizes(policy: Policy, draw: random.Random) -> dict[str, Any]:
    """Options of an LLM under a policy that the model's short requests exercise."""
    sizes: dict[str, Any] = dict(page_size=draw.choice((4, 8, 16)), chunk=draw.choice((16, 32)))
    if policy.ranking == "none":
        return sizes
    sizes["budget"] = draw.randint(16, 40)
    sizes["protect"] = draw.choice(("prompt", "prompt", 0, 40))
    if policy.window:
        sizes["window"] = draw.randint(0, 4)
    return sizes


def _skewed(draw: random.Random, most: int) -> int:
    """A length from 1 to `most`; short ones are as frequent as in real traffic."""
    return round(most ** draw.random())


def _said(failure: Exception) -> str:
    """What failed; of a proof that is an AssertionError its text alone."""
    known = isinstance(failure, Wrong | AssertionError) and str(failure)
    return str(failure) if known else repr(failure)


def _held() -> dict[str, float]:
    """Bytes of memory that this process holds (0 where the system does not say), and Python's objects."""
    return {"bytes": proc_bytes("/proc/self/status", "VmRSS"), "objects": sys.getallocatedblocks()}


def growth_of(samples: Sequence[dict[str, float]], name: str) -> dict[str, float] | None:
    """How much of something a request leaves behind: slope and its 95 % interval, by least squares.

    samples: in order, each with the number of "requests" so far and with `name`. None for too few."""
    settled = samples[int(len(samples) * WARM_UP) :]
    if len(settled) < 2 * BLOCKS:
        return None
    # 1. Means of blocks: their errors, unlike those of neighbours, are about independent.
    borders = [len(settled) * i // BLOCKS for i in range(BLOCKS + 1)]
    blocks = [settled[first:end] for first, end in zip(borders, borders[1:], strict=False)]
    x = [statistics.fmean(sample["requests"] for sample in block) for block in blocks]
    y = [statistics.fmean(sample[name] for sample in block) for block in blocks]
    # 2. A line through them, and how sure its slope is.
    slope, start = statistics.linear_regression(x, y)
    residuals = [b - (start + slope * a) for a, b in zip(x, y, strict=True)]
    middle = statistics.fmean(x)
    spread = sum((a - middle) ** 2 for a in x)
    error = (sum(r * r for r in residuals) / (BLOCKS - 2) / spread) ** 0.5
    return {"slope": slope, "low": slope - STUDENT * error, "high": slope + STUDENT * error}


def _leak(growth: dict[str, dict[str, float] | None]) -> str | None:
    """What grows beyond doubt, if anything."""
    for name, found in growth.items():
        if found is not None and found["low"] > MOST_GROWTH[name]:
            return f"memory grows by {show(found)} {name} a request"
    return None


def table(result: dict[str, Any]) -> str:
    """A row an LLM, what memory did, and the verdict."""
    rows = result["llms"]
    head = [name.replace("_", " ") for name in rows[0]]
    lines = [columns(head, [list(row.values()) for row in rows]), ""]
    for name, found in result["growth"].items():
        said = "too few waves to tell" if found is None else f"{show(found, '.2f')} a request"
        lines.append(f"growth of memory, {name}: {said}")
    served = f"{result['requests']:,} requests in {result['seconds']:.0f} s"
    verdict = "nothing lost, every sampled output as alone"
    lines.append(f"{served}: {result['wrong'] or verdict}")
    return "\n".join(lines)
