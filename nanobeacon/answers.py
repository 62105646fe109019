"""Rows of logits to tokens of requests: the end of a step.

A row's token is the greedy one, drawn, or given beforehand (`sample_tokens`, on the device); once
the host has read it, its request takes it, and may end with it (`Sampled.read`, `take_tokens`).
Listeners and log-probabilities see the raw logits. Knows requests and `sampling.py`. Knows nothing
of the model that answered, of caches, or of who runs next: whoever ends here is handed to the
caller's `close` at once.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .parallel import Group
from .request import Request
from .sampling import (
    DOUBT,
    GREEDY,
    NOT_FINITE,
    Draw,
    Ways,
    first_look,
    sample,
    second_look,
    token_logprobs,
)
from .staging import fetch

Close = Callable[[Request], None]  # releases what a request held that has ended


@dataclass(frozen=True)
class Answers:
    """What a forward pass says to R rows; those of a recorded step hold until the next one."""

    logits: Tensor  # float32 [R, V]
    best: Tensor  # int64 [R]: the greedy tokens, NOT_FINITE where the logits are not finite
    # int64 [R]: whose rows of the page table, where the device has these
    rows: Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """The tokens of R rows, on the device and on their way to the host."""

    requests: list[Request]  # whose rows they are; of a given output one request has several
    skipped: Collection[Request]  # whose rows nobody takes
    tokens: Tensor  # int64 [R] on the device; NOT_FINITE and DOUBT stand for themselves
    # rows, and what they ask for: log-probability of the token float32 [n]; ids int64 and
    # log-probabilities float32 of the best [n, k]
    logprob_rows: list[int]
    arrived: Callable[[], list[Tensor]]  # tokens and log-probabilities, on the host
    # for a second look, and for listeners; None where neither is possible
    logits: Tensor | None
    # how the rows were drawn: what is the same in the next step, and each row's random number
    ways: Ways
    uniforms: list[float]

    def read(self) -> "Read":
        """Wait for the tokens, and take a second look where there is a doubt. It may be
        asked again."""
        tokens, *logprobs = self.arrived()
        read = Read(tokens.tolist(), [], [one.tolist() for one in logprobs])
        doubtful = [row for row, token in enumerate(read.tokens) if token == DOUBT]
        if doubtful:
            self._settle(read, doubtful)
        return read

    def _settle(self, read: "Read", doubtful: list[int]) -> None:
        """Put the right tokens, and their log-probabilities, in the places of doubtful ones."""
        draws = self.ways.of_step(doubtful, self.uniforms)
        tokens = second_look(self.logits, draws)
        for row, token in zip(doubtful, tokens.tolist(), strict=True):
            read.tokens[row] = token
        read.doubtful.extend(self.requests[row] for row in doubtful)
        for i, row in enumerate(self.logprob_rows):
            if row in doubtful:
                token = tokens[doubtful.index(row)]
                own, _, _ = token_logprobs(self.logits[row : row + 1], token[None], 0)
                read.logprobs[0][i] = own.item()


@dataclass(frozen=True)
class Read:
    """What the host has read of a step's tokens."""

    tokens: list[int]
    doubtful: list[Request]  # whose token is another than the one that lies on the device
    logprobs: list[list]  # own, ids, values: as in `Sampled`, or nothing


def draw_of(request: Request, vocabulary: int) -> Draw:
    """How a request's rows are sampled, but for the random number, which each row has of its own.

    Given rows are only looked up, and count as greedy."""
    params = request.params
    if request.forced is not None or not params.temperature or params.top_k == 1:
        return GREEDY
    top_k = min(params.top_k, vocabulary)
    return Draw(params.temperature, top_k, params.top_p, params.min_p)


def sample_tokens(
    requests: list[Request],
    answers: Answers,
    group: Group,
    close: Close,
    skipped: Collection[Request] = (),
    outlives: bool = False,
    ways: Ways | None = None,
) -> Sampled:
    """A token for each of R rows, on the device; the host waits for nothing.

    requests: whose rows they are; of a given output one request has several, one behind the other.
    group: its first member's tokens are everybody's. skipped: requests whose rows mean nothing.
    outlives: whether the tokens are read after the next forward pass. ways: of the step before,
    which are taken where they are the same."""
    # 1. How each row is drawn, and its own random number, a function of seed and place: neighbours
    #    change nothing.
    draws = [request.draw for request in requests]
    if skipped:
        draws = [GREEDY if r in skipped else r.draw for r in requests]
    if ways is None or ways.draws != draws:
        ways = Ways(draws, answers.logits)
    uniforms = [0.0] * len(draws)
    if ways.are_drawn:
        uniforms = [request.uniforms.at(request.num_tokens) for request in requests]
    # 2. A token for each row.
    more = [row for row, request in enumerate(requests) if not request.only_sampled]
    tokens = _sample(requests, more, answers, ways, uniforms, group, close, skipped)
    # 3. What users want to know of it.
    logprob_rows, logprobs = _logprobs(requests, more, answers.logits, tokens)
    # 4. On their way. Logits of a recorded step are overwritten by the next one.
    arrived = fetch([tokens, *logprobs])
    logits = answers.logits
    if outlives:
        logits = logits.clone() if ways.may_doubt else None
    taking = requests
    if skipped:
        taking = [request for request in requests if request not in skipped]
    for request in taking:
        if request.finish_reason is None:
            request.num_unread += 1
    return Sampled(requests, skipped, tokens, logprob_rows, arrived, logits, ways, uniforms)


def take_tokens(sampled: Sampled, read: Read, close: Close) -> list[Request]:
    """Append each row's token to its request, and do what an end demands; who got one, in order."""
    # 1. Whose rows count: not of those that have ended since, by an abort.
    rows = list(zip(sampled.requests, read.tokens, range(len(read.tokens)), strict=True))
    if sampled.skipped:
        rows = [row for row in rows if row[0] not in sampled.skipped]
    takers = [row for row in rows if row[0].finish_reason is None]
    # 2. Log-probabilities.
    if sampled.logprob_rows:
        _record_logprobs(sampled, read.logprobs)
    # 3. Each request takes its token; a listener may end it before.
    for request, token, row in takers:
        if request.finish_reason is not None:
            continue  # an earlier row of this step ended it
        if request.on_logits is not None:
            _hear(request, sampled.logits[row])
        if request.finish_reason is None:
            _take(request, token)
        if request.finish_reason is not None:
            close(request)
    return [request for request, _, _ in takers]


def _take(request: Request, token: int) -> None:
    """Append a token, and see whether the request ends with it; NOT_FINITE ends it in error."""
    request.num_unread -= 1
    if token == NOT_FINITE:
        request.finish_reason = "error"
        request.error = "the model's logits are not finite"
        return
    request.append(token)
    if request.params.stop:
        _look_for_stop(request)


def _hear(request: Request, logits: Tensor) -> None:
    """Let a request's listener see its logits [V]; one that fails ends its own request only."""
    try:
        request.on_logits(len(request.output_token_ids), logits)
    except Exception as error:
        request.finish_reason = "error"
        request.error = f"on_logits failed: {error!r}"


# -------------------------------------------------------------------------------------- which token


def _sample(
    requests: list[Request],
    more: list[int],
    answers: Answers,
    ways: Ways,
    uniforms: list[float],
    group: Group,
    close: Close,
    skipped: Collection[Request],
) -> Tensor:
    """Token ids int64 [R] with NOT_FINITE and DOUBT in their places.

    more: rows of requests that are not `only_sampled`."""
    # 1. All rows at once. The greedy tokens are known already.
    if not ways.are_drawn:
        tokens = answers.best.clone()
    elif group.size == 1:
        tokens = first_look(answers.logits, ways, uniforms)
    else:
        # Members of a group need not be in doubt together.
        draws = ways.of_step(range(len(requests)), uniforms)
        tokens = sample(answers.logits, list(draws.values()))
    # 2. Rows whose logits a processor changes are drawn anew.
    changed = [row for row in more if requests[row].processing is not None]
    if changed:
        draws = ways.of_step(changed, uniforms)
        _sample_processed(requests, draws, answers.logits, tokens, close, skipped)
    # 3. Given tokens are not drawn at all.
    given = _given_tokens(requests, more)
    if given:
        rows = list(given)
        tokens[rows] = tokens.new_tensor(list(given.values()))
    # 4. Whatever was drawn from logits that mean nothing.
    tokens = torch.where(answers.best < 0, NOT_FINITE, tokens)
    return group.broadcast(tokens)


def _sample_processed(
    requests: list[Request],
    draws: Mapping[int, Draw],
    logits: Tensor,
    tokens: Tensor,
    close: Close,
    skipped: Collection[Request],
) -> None:
    """Draw again, into `tokens`, for each request whose processors change its logits; draws: of
    their rows.

    One whose processor fails ends here, and it alone."""
    processed: dict[int, Tensor] = {}
    for row in draws:
        request = requests[row]
        if request.finish_reason is not None or request in skipped:
            continue
        try:
            processed[row] = request.processing(request, logits[row])
        except ValueError as error:
            request.finish_reason = "error"
            request.error = str(error)
            close(request)
    if processed:
        rows = list(processed)
        stacked = torch.stack(list(processed.values()))
        tokens[rows] = sample(stacked, [draws[row] for row in rows])


def _given_tokens(requests: list[Request], more: list[int]) -> dict[int, int]:
    """Row -> token, where output is given, among the rows `more`. A request's rows lie one behind
    the other."""
    given = {}
    nth = 0  # of the rows that a request takes at once
    for row in more:
        request = requests[row]
        same_as_before = row > 0 and request is requests[row - 1]
        nth = nth + 1 if same_as_before else 0
        if request.forced is not None:
            given[row] = request.forced[len(request.output_token_ids) + nth]
    return given


# ------------------------------------------------------------------------------- what is told of it


def _logprobs(
    requests: list[Request], more: list[int], logits: Tensor, tokens: Tensor
) -> tuple[list[int], list[Tensor]]:
    """Of the rows `more` those that ask for log-probabilities, and those: of the token float32 [n],
    ids int64 and values float32 [n, k] of the best. Nothing where nobody asks."""
    rows = []
    for row in more:
        request = requests[row]
        if request.params.logprobs is not None and request.finish_reason is None:
            rows.append(row)
    if not rows:
        return [], []
    # All rows are looked up as deep as the one that asks for most; each keeps what it asked for.
    most = max(requests[row].params.logprobs for row in rows)
    return rows, list(token_logprobs(logits[rows], tokens[rows].clamp(min=0), most))


def _record_logprobs(sampled: Sampled, logprobs: list[list]) -> None:
    """For those that ask: (log-probability of the token, {id: log-probability} of the k best)."""
    own, ids, values = logprobs
    for i, row in enumerate(sampled.logprob_rows):
        request = sampled.requests[row]
        if request.finish_reason is not None or request in sampled.skipped:
            continue
        k = request.params.logprobs
        best = dict(zip(ids[i][:k], values[i][:k], strict=True))
        request.logprobs.append((own[i], best))


def _look_for_stop(request: Request) -> None:
    """Decode the newest token; the others' text is decoded when somebody takes it."""
    if request.stream is not None:
        request.decode()
        if request.stream.stopped:
            request.finish_reason = "stop"


def flush_text(request: Request) -> None:
    """The end of a request's text: what was held back may complete a stop string."""
    stream = request.stream
    if stream is not None and request.params.stop and not stream.stopped:
        stream.finish()
        if stream.stopped:
            request.finish_reason = "stop"
