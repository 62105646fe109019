"""What changes a row of logits before a token is sampled: one hook, and the fields that are
small uses of it.

A processor is `f(token_ids, logits)`: the ids of prompt and output so far (to read only) and
float32 logits [V], changed in place (it returns None) or answered with other logits [V].
`Processing` holds those of one request, in the order of transformers: bias, repetition penalty, bad
ids, minimum length, then the user's own. Knows nothing of temperature, filters and draws, which
come after it, nor of a batch: requests without a processor never get here.
"""

import torch
from torch import Tensor

from .request import LogitsProcessor, Request


class RepetitionPenalty:
    """Divides positive logits of every id seen so far by `penalty`, multiplies negative ones by it.

    The ids seen are kept from step to step: a step adds its own token and costs no pass over
    the output."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty
        self._count = 0  # tokens that were looked at
        self._known: set[int] = set()
        self._ids: Tensor | None = None  # the same ids, int64 on the logits' device

    def __call__(self, token_ids: list[int], logits: Tensor) -> None:
        """Penalise, in place, every id among `token_ids` (prompt and output) in logits
        float32 [V]."""
        # 1. Ids that are new since the last call. Ids beyond the row (padded vocabularies) cannot
        #    be sampled.
        new = dict.fromkeys(token_ids[self._count :])
        new = [i for i in new if i not in self._known and i < len(logits)]
        self._count = len(token_ids)
        self._known.update(new)
        if self._ids is None:
            self._ids = torch.empty(0, dtype=torch.int64, device=logits.device)
        if new:
            self._ids = torch.cat([self._ids, self._ids.new_tensor(new)])
        # 2. Their logits, penalised.
        seen = logits[self._ids]
        logits[self._ids] = torch.where(seen > 0, seen / self.penalty, seen * self.penalty)


def logit_bias(bias: dict[int, float]) -> LogitsProcessor:
    """Adds a number to the logit of each id named."""

    def add(token_ids: list[int], logits: Tensor) -> None:
        """Add each id's bias, in place."""
        inside = {i: value for i, value in bias.items() if i < len(logits)}
        ids = torch.tensor(list(inside), dtype=torch.int64, device=logits.device)
        logits[ids] += torch.tensor(list(inside.values()), dtype=logits.dtype, device=logits.device)

    return add


def forbid(ids: list[int], until: int | None = None) -> LogitsProcessor:
    """These ids are not sampled while fewer than `until` tokens stand before them; None: never."""

    def mask(token_ids: list[int], logits: Tensor) -> None:
        """Make the ids impossible, in place; with `until`, only before the output is so long."""
        if until is None or len(token_ids) < until:
            logits[[i for i in ids if i < len(logits)]] = -torch.inf

    return mask


class Processing:
    """The processors of one request, and its token ids in one list that grows with its output."""

    def __init__(self, request: Request, processors: list[tuple[str, LogitsProcessor]]) -> None:
        self.processors = processors
        self._token_ids = list(request.prompt_token_ids)
        self._prompt = len(self._token_ids)

    @staticmethod
    def of(request: Request) -> "Processing | None":
        """What the request's parameters ask for; None where that is nothing, or its
        output is given."""
        params = request.params
        found: list[tuple[str, LogitsProcessor]] = []
        if params.logit_bias:
            found.append(("logit_bias", logit_bias(dict(params.logit_bias))))
        if params.repetition_penalty not in (None, 1):
            found.append(("repetition_penalty", RepetitionPenalty(params.repetition_penalty)))
        if params.bad_token_ids:
            found.append(("bad_token_ids", forbid(list(params.bad_token_ids))))
        if params.min_tokens:
            ends = set(params.stop_token_ids)
            if not params.ignore_eos:
                ends.update(request.eos_token_ids)
            until = len(request.prompt_token_ids) + params.min_tokens
            found.append(("min_tokens", forbid(sorted(ends), until)))
        if params.logits_processor is not None:
            found.append(("logits_processor", params.logits_processor))
        if not found or request.forced is not None:
            return None
        return Processing(request, found)

    def __call__(self, request: Request, logits: Tensor) -> Tensor:
        """Processed float32 logits [V] of raw ones [V], which stay as they are.

        ValueError names the processor that failed and why, or that no token is left to sample."""
        taken = len(self._token_ids) - self._prompt
        self._token_ids += request.output_token_ids[taken:]
        row = logits.float().clone()
        for name, processor in self.processors:
            try:
                answer = processor(self._token_ids, row)
            except Exception as error:
                raise ValueError(f"{name} failed: {error!r}") from error
            if answer is not None:
                row = _checked(name, answer, row)
        # Logits that were broken before are the model's fault, and said elsewhere.
        if not row.amax().isfinite() and logits.amax().isfinite():
            names = ", ".join(name for name, _ in self.processors)
            raise ValueError(f"no token is left to sample after {names}")
        return row


def _checked(name: str, answer: object, row: Tensor) -> Tensor:
    """An answer as float32 logits like `row`."""
    if not isinstance(answer, Tensor) or answer.shape != row.shape:
        shape = f" {list(answer.shape)}" if isinstance(answer, Tensor) else ""
        wanted = f"None or a tensor [{len(row)}] is possible"
        raise ValueError(f"{name} returned {type(answer).__name__}{shape}: {wanted}")
    return answer.to(row.device, torch.float32)
