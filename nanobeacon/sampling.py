"""Logits to token ids: filters, seeded draws, log-probabilities.

Knows nothing of requests, models or where seeds come from: one row of logits and one `Draw` give one id,
whatever rows stand beside it. For that, candidates are ranked by (logit, then id), a total order, and
probabilities are whole numbers, whose sums are exact in any order and for any number of candidates looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

UNIT = 2**42  # weight of a row's best token: sums over a vocabulary of up to 2**20 tokens fit an int64
CANDIDATES = 1024  # ranked for a row with top-p; only a nucleus larger than that costs a full sort


@dataclass(frozen=True)
class Draw:
    """How one row is sampled; `SamplingParams` has checked the values. The defaults filter nothing."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    uniform: float = 0.0  # in [0, 1): where the inverse of the cumulative distribution is read


def uniform(seed: int, completion: int, position: int) -> float:
    """A number in [0, 1) of 53 random bits: a pure function of ints of any size, equal on every platform."""
    # Hexadecimal, because Python refuses to print ints of more than 4,300 decimal digits.
    digest = blake2b(f"{seed:x},{completion:x},{position:x}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[Draw]) -> Tensor:
    """Ids int64 [R] for logits [R, V]: temperature, top-k, top-p, min-p, each on what the one before left.

    -inf is never drawn while another logit is there; a row of -inf, or with NaN, gives some id below V."""
    vocabulary = logits.shape[-1]
    tokens = logits.argmax(-1)
    kinds = [_kind(draw, vocabulary) for draw in rows]
    if set(kinds) <= {"greedy"}:
        return tokens
    # One copy to the device. Temperature is bounded so that -inf / temperature stays -inf; no top-k is V.
    table = [(min(d.temperature, 1e300), d.top_k or vocabulary, d.top_p, d.min_p, d.uniform) for d in rows]
    columns = torch.tensor(table, dtype=torch.float64).to(logits.device)
    for kind in ("plain", "ranked", "nucleus", "sorted"):
        if not (group := [row for row, name in enumerate(kinds) if name == kind]):
            continue
        index = torch.tensor(group, device=logits.device)
        clean = logits[index].float().nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # +inf: the largest float
        temperature, top_k, top_p, min_p, uniforms = columns[index].T.unsqueeze(-1)  # each [n, 1]
        if kind == "plain":  # never ranked: drawn in the order of ids
            tokens[index] = _pick(_weights(clean, clean, temperature), min_p, uniforms).squeeze(-1)
            continue
        width = max(rows[row].top_k for row in group) if kind == "ranked" else vocabulary
        ids = _ranked(clean, width if kind != "nucleus" else min(CANDIDATES, vocabulary))
        weights = _weights(clean.gather(-1, ids), clean, temperature)
        weights *= torch.arange(ids.shape[-1], device=ids.device) < top_k
        # What top-p is a share of: what top-k left, or the whole row, of which only the best are ranked.
        total = (_weights(clean, clean, temperature) if kind == "nucleus" else weights).sum(-1, keepdim=True)
        if kind == "nucleus":
            for row in index[(weights.sum(-1, keepdim=True) < top_p * total).squeeze(-1)].tolist():
                kinds[row] = "sorted"  # the nucleus is larger: drawn anew there
        before = weights.cumsum(-1) - weights
        weights *= before < top_p * total  # the token that crosses p stays
        tokens[index] = ids.gather(-1, _pick(weights, min_p, uniforms)).squeeze(-1)
    return tokens


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Raw log-probabilities float32 [R] of token_ids int64 [R] under logits [R, V]; the k best ids int64
    [R, k], equal ones in ascending order, and theirs, float32 [R, k]."""
    ids = torch.cat([token_ids.unsqueeze(-1), _ranked(logits.float(), min(k, logits.shape[-1]))], -1)
    values = (logits.gather(-1, ids).double() - logits.double().logsumexp(-1, keepdim=True)).float()
    return values[:, 0], ids[:, 1:], values[:, 1:]


def _kind(draw: Draw, vocabulary: int) -> str:
    if draw.temperature == 0 or draw.top_k == 1:
        return "greedy"
    if 0 < draw.top_k < vocabulary:
        return "ranked" if draw.top_k <= CANDIDATES else "sorted"
    return "nucleus" if draw.top_p < 1 else "plain"


def _ranked(logits: Tensor, width: int) -> Tensor:
    """The best ids [R, width] of float32 logits [R, V], best first, equal logits by ascending id."""
    last = logits.shape[-1] - 1
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0: no negative zero
    bits ^= (bits >> 31) & 0x7FFFFFFF  # now ordered as the floats are
    keys = (bits << 32) + torch.arange(last, -1, -1, device=logits.device)
    best = keys.topk(width).values if width <= last else keys.sort(descending=True).values
    return last - (best & 0xFFFFFFFF)


def _weights(logits: Tensor, row: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities of logits [R, N], int64: UNIT for the best of row [R, V], the others in proportion."""
    best = row.amax(-1, keepdim=True).double().clamp(min=torch.finfo(torch.float32).min)
    return logits.double().sub_(best).div_(temperature).exp_().mul_(UNIT).round_().long()


def _pick(weights: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """Min-p, then the position int64 [R, 1] in weights [R, N] where their running sum exceeds u * total."""
    cumulative = (weights * (weights >= min_p * UNIT)).cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding must not lead past the last token.
    return torch.searchsorted(cumulative, (uniforms * total).long().minimum(total - 1), right=True)
