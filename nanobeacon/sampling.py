"""Logits to token ids: filters, seeded draws, log-probabilities.

Knows nothing of requests, models or where seeds come from: one row of logits and one `Draw` give
one id, whatever rows stand beside it. For that, candidates are ranked by (logit, then id), a total
order, and probabilities are whole numbers, whose sums are exact in any order and for any number of
candidates looked at.

`sample_exact` is the specification: it sorts a row and reads like the steps it takes. `sample` gives the same
ids and looks at a few candidates. Where a rounding could change what comes out, it asks `sample_exact`.
"""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from .staging import unwaited

# weight of a row's best token: sums over a vocabulary of up to 2**20 tokens fit an int64
UNIT = 2**42
# looked at once as a whole: what bounds the memory that sampling takes, whatever the batch
ROWS = 16
DEPTH = 64  # logits in a block, of which the largest stands for all
# Blocks looked at, and rows at once: first a few blocks, then more for the rows whose
# nucleus is larger
FIRST_LOOK = (64, 20 * ROWS)
SECOND_LOOK = (512, ROWS)
# In a token's place, like the NOT_FINITE of `best_tokens`
NOT_FINITE = -1
DOUBT = -2
CANDIDATES = 1024  # ranked at most; only a row that needs more is sorted
MARGIN = 2e-5  # relative error of a float32 total, at most: see `_total`


class Draw(NamedTuple):
    """How one row is sampled; `SamplingParams` has checked the values. The defaults
    filter nothing."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    uniform: float = 0.0  # in [0, 1): where the inverse of the cumulative distribution is read

    def at(self, uniform: float) -> "Draw":
        """The same with another random number."""
        temperature, top_k, top_p, min_p, _ = self
        return Draw(temperature, top_k, top_p, min_p, uniform)


GREEDY = Draw(temperature=0.0)


class Uniforms:
    """The random numbers of one completion, by position: a pure function of ints of any size, equal
    on every platform."""

    def __init__(self, seed: int, completion: int) -> None:
        # Hexadecimal, because Python refuses to print ints of more than 4,300 decimal digits.
        # What all positions have in common is hashed once.
        self._begun = blake2b(f"{seed:x},{completion:x},".encode(), digest_size=8)

    def at(self, position: int) -> float:
        """A number in [0, 1) of 53 random bits."""
        hashed = self._begun.copy()
        hashed.update(b"%x" % position)
        return (int.from_bytes(hashed.digest(), "big") >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[Draw]) -> Tensor:
    """Ids int64 [R] for logits [R, V]: temperature, top-k, top-p, min-p, each on what the
    one before left.

    -inf is never drawn while another logit is there; a row of -inf, or with NaN, gives some id
    below V. Rows with top-k or top-p read the logits about three times (copy to float32, block
    maxima, sum of exponentials), with 4 bytes a logit for 6 * ROWS rows at a time; only a large
    nucleus is sorted. Which rows need a second look is read from the device once. Rows with neither
    are weighed in float64 in the order of ids, ROWS at a time."""
    ways = Ways(rows, logits)
    tokens = first_look(logits, ways, [draw.uniform for draw in rows])
    if ways.may_doubt:
        doubtful = [row for row, token in enumerate(tokens.tolist()) if token == DOUBT]
        if doubtful:
            tokens[_index(doubtful)] = second_look(logits, {row: rows[row] for row in doubtful})
    return tokens


class Ways:
    """How R rows are sampled, but for their random numbers: what stays the same from step to step,
    so that a step sends those numbers alone."""

    def __init__(self, draws: Sequence[Draw], logits: Tensor) -> None:
        """logits [R, V]: of a vocabulary and on a device such as theirs."""
        vocabulary = logits.shape[-1]
        self.draws = list(draws)
        kinds = [_kind(draw, vocabulary) for draw in draws]
        self.plain = [row for row, kind in enumerate(kinds) if kind == "plain"]
        self.ranked = [row for row, kind in enumerate(kinds) if kind == "ranked"]
        # float64 [R, 5] on the device, where something is drawn
        self.columns: Tensor | None = None
        if self.are_drawn:
            self.columns = _columns(draws, vocabulary, logits.device)

    @property
    def are_drawn(self) -> bool:
        """Whether any row is; else the best tokens are the answer."""
        return len(self.plain) + len(self.ranked) > 0

    @property
    def may_doubt(self) -> bool:
        """Whether `first_look` may leave a doubt in one of these rows."""
        return len(self.ranked) > 0

    def of_step(self, rows: Sequence[int], uniforms: Sequence[float]) -> dict[int, Draw]:
        """The draws of some rows in a step that has these numbers, one for each of the R rows."""
        return {row: self.draws[row].at(uniforms[row]) for row in rows}


def first_look(logits: Tensor, ways: Ways, uniforms: Sequence[float]) -> Tensor:
    """The same ids, and DOUBT where a few candidates of the row do not settle it. Nothing is read
    from the device.

    uniforms: a number for each row, whatever its draw says."""
    # 1. The best of each row: the answer where nothing is drawn.
    tokens = logits.argmax(-1)
    if not ways.are_drawn:
        return tokens
    columns = ways.columns.clone()
    columns[:, -1] = _sent(array("d", uniforms), logits.device)
    # 2. Rows without top-k and top-p.
    for at in range(0, len(ways.plain), ROWS):
        some = _index(ways.plain[at : at + ROWS])
        tokens[some] = _draw_in_order_of_ids(_clean(logits[some]), columns[some])
    # 3. The others, from a few candidates.
    blocks, at_once = FIRST_LOOK
    for at in range(0, len(ways.ranked), at_once):
        some = _index(ways.ranked[at : at + at_once])
        ids, certain = _draw_from_candidates(logits[some], columns[some], blocks)
        tokens[some] = torch.where(certain, ids, DOUBT)
    return tokens


def second_look(logits: Tensor, draws: Mapping[int, Draw]) -> Tensor:
    """Ids int64 [D] of the D rows of logits [R, V] that the first look left in doubt; draws: of
    each, by row in ascending order."""
    doubtful = list(draws)
    blocks, at_once = SECOND_LOOK
    found: list[int] = []
    for at in range(0, len(doubtful), at_once):
        some = doubtful[at : at + at_once]
        # 1. From more candidates.
        columns = _columns([draws[row] for row in some], logits.shape[-1], logits.device)
        ids, certain = _draw_from_candidates(logits[_index(some)], columns, blocks)
        settled = torch.where(certain, ids, DOUBT).tolist()
        # 2. What is still in doubt is sorted whole.
        for row, token in zip(some, settled, strict=True):
            found.append(sample_exact(logits[row], draws[row]) if token == DOUBT else token)
    return torch.tensor(found, dtype=torch.int64, device=logits.device)


def best_tokens(logits: Tensor) -> Tensor:
    """Greedy ids int64 [R] of logits [R, V], of equal ones the first; NOT_FINITE where a row is
    not finite."""
    values, ids = logits.max(-1)
    return torch.where(values.isfinite(), ids, NOT_FINITE)


def sample_exact(logits: Tensor, draw: Draw) -> int:
    """The id that one row of logits [V] gives, in the steps of the definition. `sample`
    gives the same."""
    vocabulary = len(logits)
    # 1. Temperature 0 and top-k 1 leave the best token, of equal ones the first.
    if _kind(draw, vocabulary) == "greedy":
        return int(logits.argmax())
    columns = _columns([draw], vocabulary, logits.device)
    row = _clean(logits.unsqueeze(0))
    # 2. Without top-k and top-p nothing needs an order: the running sum goes by id.
    if _kind(draw, vocabulary) == "plain":
        return int(_draw_in_order_of_ids(row, columns))
    temperature, top_k, top_p, min_p, uniforms = columns.T.unsqueeze(-1)
    # 3. All ids, best first, and their probabilities as whole numbers.
    ids = _ranked(row, vocabulary)
    weights = _weights(row.gather(-1, ids), row, temperature)
    # 4. Top-k: the first k.
    weights *= torch.arange(vocabulary, device=ids.device) < top_k
    # 5. Top-p of what is left: until the sum reaches p; the token that crosses p stays.
    before = weights.cumsum(-1) - weights
    weights *= before < top_p * weights.sum(-1, keepdim=True)
    # 6. Min-p, and the draw.
    return int(ids.gather(-1, _pick(weights, min_p, uniforms)))


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Raw log-probabilities float32 [R] of token_ids int64 [R] under logits [R, V]; the k best ids
    int64 [R, k], equal ones in ascending order, and theirs, float32 [R, k]."""
    best = min(k, logits.shape[-1])
    ids = logits.new_empty(len(logits), 1 + best, dtype=torch.int64)
    values = logits.new_empty(ids.shape, dtype=torch.float32)
    for at in range(0, len(logits), ROWS):
        some = slice(at, at + ROWS)
        ids[some, 0] = token_ids[some]
        ids[some, 1:] = _ranked(logits[some].float(), best)
        wide = logits[some].double()
        values[some] = wide.gather(-1, ids[some]) - wide.logsumexp(-1, keepdim=True)
    return values[:, 0], ids[:, 1:], values[:, 1:]


def _index(rows: list[int]) -> slice | list[int]:
    """An index for ascending rows: a slice, which copies nothing, where they lie behind
    each other."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return rows


def _kind(draw: Draw, vocabulary: int) -> str:
    """How a row is drawn: "greedy"; "ranked", best first; or "plain", in the order of ids."""
    if draw.temperature == 0 or draw.top_k == 1:
        return "greedy"
    if 0 < draw.top_k < vocabulary or draw.top_p < 1:
        return "ranked"
    return "plain"


def _columns(rows: Sequence[Draw], vocabulary: int, device: torch.device) -> Tensor:
    """Temperature, top-k, top-p, min-p and uniform of each row, float64 [R, 5], in one copy."""
    # 1. One row behind the other, on the host.
    numbers = array("d")
    for draw in rows:
        numbers.extend(draw)
    columns = _sent(numbers, device).view(len(rows), len(GREEDY))
    # 2. Temperature is bounded so that -inf / temperature stays -inf; no top-k is V.
    temperature, top_k, _, _, _ = columns.unbind(-1)
    temperature.clamp_(max=1e300)
    top_k.masked_fill_(top_k == 0, vocabulary)
    return columns


def _sent(numbers: array, device: torch.device) -> Tensor:
    """Doubles on their way to a device, float64; nobody waits for them."""
    host = torch.frombuffer(numbers, dtype=torch.float64)
    return unwaited(host, device).to(device, non_blocking=True)


def _clean(logits: Tensor) -> Tensor:
    """Float32 without NaN and infinities: NaN and -inf become -inf, +inf the largest float."""
    return logits.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def _draw_in_order_of_ids(row: Tensor, columns: Tensor) -> Tensor:
    """Ids int64 [R] of clean rows [R, V] that nothing but min-p filters."""
    temperature, _, _, min_p, uniforms = columns.T.unsqueeze(-1)
    weights = _weights(row, row, temperature)
    return _pick(weights, min_p, uniforms).squeeze(-1)


def _draw_from_candidates(logits: Tensor, columns: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Ids int64 [R] for logits [R, V], from the best of V; and which of them are certain, bool [R].

    Certain: `sample_exact` gives the same. Not certain: the row needs more candidates, the total's
    rounding decides, or its logits are not finite."""
    temperature, top_k, top_p, min_p, uniforms = columns.T.unsqueeze(-1)  # each [R, 1]
    rows, vocabulary = logits.shape
    # 1. The one float32 copy, as DEPTH lines of `width` logits: a block is a column of it.
    width = -(-vocabulary // DEPTH)
    copy = logits.new_full((rows, DEPTH * width), -torch.inf, dtype=torch.float32)
    copy[:, :vocabulary] = logits
    lines = copy.view(rows, DEPTH, width)
    # 2. The blocks with the largest maxima hold every logit above the least of these maxima.
    maxima = lines.amax(1)
    best = maxima.amax(-1, keepdim=True)
    chosen = maxima.topk(min(blocks, width), sorted=False)
    border = chosen.values.amin(-1, keepdim=True)
    if blocks >= width:
        border = torch.full_like(best, -torch.inf)  # every logit is looked at
    line_starts = torch.arange(0, DEPTH * width, width, device=logits.device)
    ids = (line_starts[:, None] + chosen.indices[:, None, :]).flatten(1)
    # 3. Of their logits the best in order; those above the border are the best of the whole row.
    ids = _ranked(copy.gather(-1, ids), min(CANDIDATES, 4 * blocks, ids.shape[-1]), ids)
    found = _clean(copy.gather(-1, ids))
    known = found > border
    # 4. Exact weights of these, and top-k.
    weights = _weights(found, found, temperature) * known
    weights *= torch.arange(ids.shape[-1], device=ids.device) < top_k
    # 5. What top-p is a share of: exactly what top-k left, or about the whole row's total.
    has_top_k = top_k < vocabulary
    total = weights.sum(-1, keepdim=True)
    about = _total(lines, best, temperature) * UNIT
    low = torch.where(has_top_k, total.double(), about * (1 - MARGIN))
    high = torch.where(has_top_k, total.double(), about * (1 + MARGIN))
    # 6. A larger total never leads to an earlier pick: where both bounds pick the same, so does
    #    the total.
    before = weights.cumsum(-1) - weights
    bounds = top_p * torch.stack((low, high))  # [2, R, 1]
    first, last = _pick(weights * (before < bounds), min_p, uniforms)
    # 7. Nothing that was not looked at can be in the nucleus.
    complete = torch.where(has_top_k, known.sum(-1, keepdim=True) >= top_k, total >= top_p * high)
    certain = (first == last) & complete & best.isfinite() & low.isfinite()
    return ids.gather(-1, first).squeeze(-1), certain.squeeze(-1)


def _total(lines: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """About the sum of exp((logit - best) / temperature), float64 [R, 1], over lines [R,
    DEPTH, width].

    Destroys `lines`: it is the place for the exponentials. The error: a difference, a quotient and
    a temperature in float32 move an exponent by 1.8e-7 of its size, and one below -50 adds nothing,
    so 9e-6; the exponential itself and 64 sums in float32 move the total by 5e-6. NaN where float32
    cannot hold the temperature."""
    possible = (temperature > 1e-30) & (temperature < 1e30)
    scale = torch.where(possible, temperature, torch.nan).float()
    lines.sub_(best[..., None]).div_(scale[..., None]).exp_()
    return lines.sum(1).double().sum(-1, keepdim=True)


def _ranked(logits: Tensor, width: int, ids: Tensor | None = None) -> Tensor:
    """The best ids [R, width] of float32 logits [R, N], best first, equal logits by ascending id.

    `ids` int64 [R, N]: whose logits they are; None: 0 to N - 1."""
    if ids is None:
        ids = torch.arange(logits.shape[-1], device=logits.device)
    # 1. One whole number for each: the logit in the upper bits; in the lower ones the id, turned
    #    around, so that of equal logits the smaller id has the larger number.
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0: no negative zero
    bits ^= (bits >> 31) & 0x7FFFFFFF  # now ordered as the floats are
    keys = (bits << 32) + (0xFFFFFFFF - ids)
    # 2. The largest of them, and the ids back out of these.
    if width < logits.shape[-1]:
        best = keys.topk(width).values
    else:
        best = keys.sort(descending=True).values
    return 0xFFFFFFFF - (best & 0xFFFFFFFF)


def _weights(logits: Tensor, row: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities of logits [R, N], int64: UNIT for the best of row [R, V], the others in
    proportion."""
    # A row of -inf alone would give NaN.
    best = row.amax(-1, keepdim=True).double().clamp(min=torch.finfo(torch.float32).min)
    shares = logits.double().sub_(best).div_(temperature).exp_()
    return shares.mul_(UNIT).round_().long()


def _pick(weights: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """Min-p, then the position int64 [..., R, 1] in weights [..., R, N] where their running sum
    exceeds u * total."""
    likely = weights >= min_p * UNIT
    cumulative = (weights * likely).cumsum(-1)
    total = cumulative[..., -1:]
    # Rounding must not lead past the last token.
    target = (uniforms * total).long().minimum(total - 1)
    return torch.searchsorted(cumulative, target, right=True)
