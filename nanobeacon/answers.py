"""Rows of logits to tokens of requests: the end of a step, before anything is evicted.

A row's token is the greedy one, drawn, or given beforehand; listeners and log-probabilities see the
raw logits. Knows requests and `sampling.py`. Knows nothing of the model that answered, of caches,
or of who runs next: whoever ends here is handed to the caller's `close` at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .parallel import Group
from .request import Request
from .sampling import GREEDY, Draw, sample, token_logprobs, uniform

Close = Callable[[Request], None]  # releases what a request held that has ended


@dataclass(frozen=True)
class Answers:
    """What a forward pass says to R rows; those of a recorded step hold until the next one."""

    logits: Tensor  # float32 [R, V]
    best: Tensor  # int64 [R]: the greedy tokens, -1 where the logits are not finite


def draw_of(request: Request, vocabulary: int) -> Draw:
    """How a request's rows are sampled, but for the random number, which each row has of its own.

    Given rows are only looked up, and count as greedy."""
    params = request.params
    if request.forced is not None or not params.temperature or params.top_k == 1:
        return GREEDY
    top_k = min(params.top_k, vocabulary)
    return Draw(params.temperature, top_k, params.top_p, params.min_p)


def take_tokens(requests: list[Request], answers: Answers, group: Group, close: Close) -> None:
    """Append a token for each of R rows, and do what an end demands.

    requests: whose rows they are; of a given output one request has several, one behind the other.
    group: its first member's tokens are everybody's."""
    logits = answers.logits
    # 1. A token for each row, and what users want to know of it.
    tokens = _sample(requests, answers, close)
    _record_logprobs(requests, logits, tokens)
    # 2. The step's one read of the device, for tokens and failures: -1 is logits that mean nothing.
    tokens = torch.where(answers.best < 0, -1, tokens)
    tokens = group.broadcast(tokens).tolist()
    # 3. Each request takes its token; a listener may end it before.
    for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
        if request.finish_reason is not None:
            continue  # an earlier row of this step ended it
        if request.on_logits is not None:
            _hear(request, logits[row])
        if request.finish_reason is None:
            _take(request, token)
        if request.finish_reason is not None:
            close(request)


def _take(request: Request, token: int) -> None:
    """Append a token, and see whether the request ends with it; -1 ends it in error."""
    if token < 0:
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


def _sample(requests: list[Request], answers: Answers, close: Close) -> Tensor:
    """Token ids int64 [R]; those of rows without a finite logit mean nothing."""
    # 1. Each row's own random number, a function of seed and place: neighbours change nothing.
    draws = [request.draw for request in requests]
    for row, request in enumerate(requests):
        if request.draw.temperature:  # 0: greedy, the same in each step
            u = uniform(request.seed, request.completion, request.num_tokens)
            draws[row] = request.draw.at(u)
    # 2. All rows at once. The greedy tokens are known already.
    if all(draw is GREEDY for draw in draws):
        tokens = answers.best.clamp(min=0)
    else:
        tokens = sample(answers.logits, draws)
    # 3. Rows whose logits a processor changes are drawn anew.
    if any(request.processing is not None for request in requests):
        _sample_processed(requests, answers.logits, draws, tokens, close)
    # 4. Given tokens are not drawn at all.
    given = _given_tokens(requests)
    if given:
        rows = list(given)
        tokens[rows] = tokens.new_tensor(list(given.values()))
    return tokens


def _sample_processed(
    requests: list[Request],
    logits: Tensor,
    draws: list[Draw],
    tokens: Tensor,
    close: Close,
) -> None:
    """Draw again, into `tokens`, for each request whose processors change its logits.

    One whose processor fails ends here, and it alone. Requests without any are drawn as ever."""
    processed: dict[int, Tensor] = {}
    for row, request in enumerate(requests):
        if request.processing is None:
            continue
        try:
            processed[row] = request.processing(request, logits[row])
        except ValueError as error:
            request.finish_reason = "error"
            request.error = str(error)
            close(request)
    if processed:
        rows = list(processed)
        changed = torch.stack(list(processed.values()))
        tokens[rows] = sample(changed, [draws[row] for row in rows])


def _given_tokens(requests: list[Request]) -> dict[int, int]:
    """Row -> token, where output is given. A request's rows lie one behind the other."""
    given = {}
    nth = 0  # of the rows that a request takes at once
    for row, request in enumerate(requests):
        same_as_before = row > 0 and request is requests[row - 1]
        nth = nth + 1 if same_as_before else 0
        if request.forced is not None:
            given[row] = request.forced[len(request.output_token_ids) + nth]
    return given


# ------------------------------------------------------------------------------- what is told of it


def _record_logprobs(requests: list[Request], logits: Tensor, tokens: Tensor) -> None:
    """For those that ask: (log-probability of the token, {id: log-probability} of the k best)."""
    rows = []
    for row, request in enumerate(requests):
        if request.params.logprobs is not None and request.finish_reason is None:
            rows.append(row)
    if not rows:
        return
    # All rows are looked up as deep as the one that asks for most; each keeps what it asked for.
    most = max(requests[row].params.logprobs for row in rows)
    own, ids, values = token_logprobs(logits[rows], tokens[rows], most)
    own = own.tolist()
    ids = ids.tolist()
    values = values.tolist()
    for i, row in enumerate(rows):
        request = requests[row]
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
