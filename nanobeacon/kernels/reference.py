"""Every kernel in plain torch: the specification of the Triton files, and what runs without a GPU.

Knows tensors only, no requests or policies. Shapes: T tokens of a forward pass, R (or B) requests,
L layers, H query heads, K KV heads, G = H / K, D head dim, P page size, S slots (flat: page * P +
offset), N queries.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# values this close to the minimum count as equal in fps: rounding must not order exact duplicates
TIE = 1e-5
SCRATCH = 256 << 20  # bytes that one pass of `scores` or `redundancy` may hold for itself


def rms_norm(x: Tensor, scale: Tensor, eps: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension: in float32, rounded to the scale's dtype, then
    scaled. x [.., N] of any float dtype; scale [N], or what fits x; eps float32 [1]."""
    x = x.float()
    # two operators fewer than mean of squares
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    shrink = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * shrink).to(scale.dtype) * scale


def add_rms_norm(hidden: Tensor, update: Tensor | None, scale: Tensor, eps: Tensor) -> Tensor:
    """hidden += update (in place, where there is one), then its `rms_norm` [T, hidden], in the
    scale's dtype. hidden float32 [T, hidden]; update [T, hidden] of any float dtype; scale
    [hidden]; eps float32 [1]."""
    if update is not None:
        hidden += update
    return rms_norm(hidden, scale, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [T, M] of gate_up [T, 2M], whose first M columns are the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [.., D] by the rotate-half convention, in float32 and rounded once; cos, sin float32,
    broadcast to [.., D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    turned_first = torch.addcmul(first * cos, second, sin, value=-1)
    turned_second = torch.addcmul(second * cos, first, sin)
    return torch.cat((turned_first, turned_second), dim=-1).to(x.dtype)


def store(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor,
    buffer: Tensor | None = None, buffer_rows: Tensor | None = None, buffer_slots: Tensor | None = None,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Norm (where the family has one) and rotation of q and k; k and v into their slots, unrotated
    q into the query buffer; returns q [T, H, D], rotated.

    qkv [T, H + 2K, D]; cos, sin float32 [T, D/2]; slots int64 [T]; keys, values [K, pages, P, D] of
    one layer; buffer [rows, H, C, D] of one layer (any strides), its row and slot of each token
    int64 [T]; q_norm, k_norm [D] and eps float32 [1], as `rms_norm` takes them.
    """
    num_kv_heads = keys.shape[0]
    head_dim = keys.shape[-1]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    # 1. q and k are normed, head by head.
    turning = qkv[:, :-num_kv_heads]
    if q_norm is not None:
        scale = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)))
        turning = rms_norm(turning, scale, eps)
    # 2. The query buffer holds queries as they are before rotation: an eviction rotates them anew.
    if buffer is not None:
        buffer[buffer_rows, :, buffer_slots] = turning[:, :num_heads].to(buffer.dtype)
    # 3. Rotated keys and plain values go to their slots.
    rotated = rotate(turning, cos.unsqueeze(1), sin.unsqueeze(1))
    new_keys = rotated[:, num_heads:]
    new_values = qkv[:, -num_kv_heads:]
    for cache, new in ((keys, new_keys), (values, new_values)):
        flat = cache.view(num_kv_heads, -1, head_dim)
        flat.index_copy_(1, slots, new.transpose(0, 1).to(cache.dtype))
    return rotated[:, :num_heads]


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, cached_lengths: Tensor, cu_seqlens: Tensor,
    max_query_length: int, max_cached_length: int, scale: float, runs: list[int | None] | None = None,
) -> Tensor:  # fmt: skip
    """Attention of each request's queries over its own slots, causal by slot order;
    returns [T, H, D].

    q [T, H, D]; keys, values [K, pages, P, D] of q's dtype, or bf16 beside a float32 q; page_table
    int32 [R, pages of the longest]; cached_lengths int32 [R], this step's tokens included;
    cu_seqlens int32 [R + 1]. Query i of n sees the slots below cached_length - n + i + 1. `runs`:
    first slots of the requests whose pages are one run, read as a view.
    """
    lengths = cached_lengths.tolist()
    if runs is None:
        runs = [None] * len(page_table)
    # 1. A decode batch of equal lengths in evenly spaced runs: one product for all.
    if max_query_length == 1 and _evenly_spaced(runs) and min(lengths) == max(lengths):
        return _attend_alike(q, keys, values, runs, lengths[0], scale)
    # 2. Everything else: one request after the other.
    borders = cu_seqlens.tolist()
    outputs = []
    for r, length in enumerate(lengths):
        own = q[borders[r] : borders[r + 1]]
        if len(own):
            k = _slots_of(keys, page_table[r], length, runs[r])
            v = _slots_of(values, page_table[r], length, runs[r])
            outputs.append(_attend(own, k, v, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _evenly_spaced(runs: list[int | None]) -> bool:
    """Whether there is one run, or several follow each other at one distance."""
    if None in runs:
        return False
    steps = {b - a for a, b in zip(runs, runs[1:], strict=False)}
    return not steps or (len(steps) == 1 and min(steps) > 0)


def _attend_alike(q: Tensor, keys: Tensor, values: Tensor, runs: list, length: int, scale: float) -> Tensor:
    """One query each for requests of one length in evenly spaced runs: one strided view,
    one product.

    Shapes as in `paged_attention`, with T = R and no run missing."""
    count, _, head_dim = q.shape
    num_kv_heads = len(keys)
    # slots from one request's first to the next's
    distance = runs[1] - runs[0] if count > 1 else length
    size = (count, num_kv_heads, length, head_dim)
    stride = (distance * head_dim, keys.stride(0), head_dim, 1)
    first = runs[0] * head_dim
    k = keys.as_strided(size, stride, keys.storage_offset() + first)
    v = values.as_strided(size, stride, values.storage_offset() + first)
    return _attend_once(q, k, v, scale)


def _attend_once(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query each: q [R, H, D] over k, v [R, K, S, D], in their dtype; a group shares one
    pass over it."""
    grouped = q.to(k.dtype).view(len(q), k.shape[1], -1, k.shape[-1])
    return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(q.shape).to(q.dtype)


def _slots_of(cache: Tensor, pages: Tensor, length: int, first: int | None) -> Tensor:
    """The first `length` slots of a request from [..., pages, P, D]: a view of its run,
    or gathered."""
    if first is not None:
        return cache.flatten(-3, -2)[..., first : first + length, :]
    used = pages[: -(-length // cache.shape[-2])].long()
    return cache.index_select(-3, used).flatten(-3, -2)[..., :length, :]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [n, H, D] over k, v [K, S, D] -> [n, H, D]; the last query sees all S slots."""
    count, num_heads, _ = q.shape
    num_kv_heads, length, _ = k.shape
    if count == 1:
        return _attend_once(q, k[None], v[None], scale)
    # torch's own causal mask puts the first query at the first slot; ours stand at the end.
    mask = None
    if count < length:
        mask = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None].to(q.dtype),
        v[None].to(q.dtype),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=num_heads != num_kv_heads,
        scale=scale,
    )
    return out[0].transpose(0, 1)


def fps(queries: Tensor, counts: Tensor, m: int) -> Tensor:
    """Farthest point sampling on cosine similarity (METHOD.md, "Query buffer"): int64 [B, m] picks
    in pick order.

    queries [B, N, D] of any float dtype; counts int32 [B] valid rows; counts <= m: the picks are 0
    … m-1. A pick is the lowest index within TIE of the minimum; a zero query has cosine 0 to all;
    all in float32.
    """
    batch, n, _ = queries.shape
    identity = torch.arange(m, device=queries.device).expand(batch, m)
    if n <= m or m == 0:
        return identity.clone()
    valid = torch.arange(n, device=queries.device) < counts[:, None]
    held = queries.float()
    # rows past the count may hold anything, NaN too: replaced, not multiplied away
    if not valid.all():
        held = held.masked_fill(~valid[..., None], 0)
    sums, cosines_to = _cosines(held)

    def lowest(values: Tensor) -> Tensor:
        """The first index within TIE of the minimum, [...]."""
        return (values <= values.amin(-1, keepdim=True) + TIE).int().argmax(-1)

    # 1. The first pick is the query whose mean similarity to all is smallest.
    mean = sums / counts.clamp(min=1)[:, None]
    picks = [lowest(mean.masked_fill(~valid, torch.inf))]
    nearest = torch.where(valid, -torch.inf, torch.inf)
    for _ in range(m - 1):
        # 2. Every query remembers its similarity to the nearest pick.
        nearest = nearest.maximum(cosines_to(picks[-1]))
        nearest.scatter_(1, picks[-1][:, None], torch.inf)  # picked once, never again
        # 3. The next is the one that the picks represent worst.
        picks.append(lowest(nearest))
    return torch.where(counts[:, None] <= m, identity, torch.stack(picks, 1))


def _cosines(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Of the rows of each x [B, N, D]: sums of their cosines to all rows [B, N]; and pick [B] ->
    [B, N], their cosines to the picked row."""
    batch, n, _ = x.shape
    norms = x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    first = torch.arange(batch, device=x.device) * n  # of each x, in the rows of all
    if n <= 64:  # all with all at once is cheaper than one product for each pick
        gram = (x @ x.transpose(1, 2)).div_(norms).div_(norms.transpose(1, 2))
        return gram.sum(1), lambda pick: gram.flatten(0, 1).index_select(0, first + pick)
    unit = x / norms
    rows = unit.flatten(0, 1)
    sums = (unit @ unit.sum(1)[..., None])[..., 0]
    return sums, lambda pick: (unit @ rows[first + pick, :, None])[..., 0]


def reduce(buffer: Tensor, positions: Tensor, rows: Tensor, counts: Tensor, m: int) -> None:
    """Reduce the given buffer rows to m queries a head by fps, in place, their positions
    along with them.

    buffer [rows, L, H, C, D], positions int32 [rows, L, H, C], or the first slots of each head of
    both; rows [B], integers, and counts int32 [B]. Slots 0 … m-1 then hold the picks in pick order
    (all rows, in order, where counts <= m), the others of what was given nothing.
    """
    held = buffer[rows]
    held_positions = positions[rows]
    batch, layers, heads, capacity, head_dim = held.shape
    counts = counts.repeat_interleave(layers * heads)
    picks = fps(held.view(-1, capacity, head_dim), counts, m).view(batch, layers, heads, m)
    buffer[rows, :, :, :m] = held.gather(3, picks[..., None].expand(-1, -1, -1, -1, head_dim))
    positions[rows, :, :, :m] = held_positions.gather(3, picks)


def reduce_chunks(
    buffer: Tensor, positions: Tensor, new: Tensor, new_positions: Tensor, chunks: Tensor, m: int,
    longest: int,
) -> None:  # fmt: skip
    """Take the prompt chunks of a step into their buffer rows (METHOD.md, "Query buffer"), in
    place: row = fps(row + candidates), then the recents behind it.

    buffer [rows, H, C, D] and positions int32 [rows, H, C] of one layer (a row's parts lie
    together); new [H, T, D] in the buffer's dtype and new_positions int64 [T], the step's
    queries. chunks int32 [n, 6]: row, first of its tokens, queries held, candidates, queries
    kept, recents (which follow the candidates); no row twice. kept: m, or what there is where
    that is less; without candidates the queries held. `longest`: held + candidates are nowhere
    more (not needed here)."""
    for row, first, held, candidates, kept, recents in chunks.tolist():
        own = buffer[row]
        own_at = positions[row]
        # 1. The chunk's queries, head by head.
        tokens = slice(first, first + candidates + recents)
        chunk = new[:, tokens]
        chunk_at = new_positions[tokens].int().expand(len(own), -1)
        # 2. Queries held and candidates compete; the picks take the first slots.
        if candidates:
            pool = torch.cat((own[:, :held], chunk[:, :candidates]), dim=1)
            pool_at = torch.cat((own_at[:, :held], chunk_at[:, :candidates]), dim=1)
            counts = torch.full((len(pool),), held + candidates, dtype=torch.int32, device=pool.device)
            picks = fps(pool, counts, kept)
            own[:, :kept] = pool.gather(1, picks[..., None].expand(-1, -1, pool.shape[-1]))
            own_at[:, :kept] = pool_at.gather(1, picks)
        # 3. What came after the freeze is a recent.
        end = kept + recents
        own[:, kept:end] = chunk[:, candidates:]
        own_at[:, kept:end] = chunk_at[:, candidates:]


def scores(
    buffer: Tensor, rows: Tensor, query_positions: Tensor, cos: Tensor, sin: Tensor, keys: Tensor,
    positions: Tensor, page_table: Tensor, cached_lengths: Tensor, domains: Tensor, scale: float,
    max_cached_length: int, group: str = "max", pool: str = "max",
) -> Tensor:  # fmt: skip
    """What the observation queries say of each cached key (METHOD.md, "Eviction"). Returns float32
    [B, L, K, max_cached_length]. buffer [rows, L, H, N, D], the query buffer, before rotation; rows
    [B], integers: a request's row of it. query_positions int32 [B, N]: where all heads rotate a
    query to; it sees the keys up to there, -1 is an absent one. cos, sin float32 [B, N, D/2] of
    these positions. keys [L, K, pages, P, D] and positions [L, K, pages, P] of every layer; domains
    int32 [B, 2]: the softmax runs over the slots [start, end), the others get -inf. Queries are
    pooled inside each head, then heads. pool: "max" of s - log-sum-exp (log space), "mean" or "sum"
    of the weights. group: "max" or "mean" over the heads of a KV head, "layer" mean over all heads
    of the layer, "logits" maximum over the group before the softmax."""
    _, layers, num_heads, n, _ = buffer.shape
    num_kv_heads = keys.shape[1]
    out = torch.full((len(rows), layers, num_kv_heads, max_cached_length), -torch.inf, device=buffer.device)
    for b, ((start, end), length) in enumerate(zip(domains.tolist(), cached_lengths.tolist(), strict=True)):
        end = min(end, length)
        if start >= end:
            continue
        (row,) = buffer.index_select(0, rows[b : b + 1])
        q_at = query_positions[b]
        block = max(1, SCRATCH // (8 * num_heads * n * (end - start)))
        for a in range(0, layers, block):
            some = slice(a, a + block)
            k = _slots_of(keys[some], page_table[b], length, None)[:, :, start:end]
            at = _slots_of(positions[some, ..., None], page_table[b], length, None)[:, :, start:end, 0]
            q = rotate(row[some], cos[b], sin[b])
            out[b, some, :, start:end] = _pooled_weights(
                q, q_at.expand(q.shape[:-1]), k, at, scale, group, pool
            )
    return out


def _pooled_weights(
    q: Tensor, q_at: Tensor, k: Tensor, k_at: Tensor, scale: float, group: str, pool: str
) -> Tensor:
    """q [L, H, N, D], q_at [L, H, N], k [L, K, S, D], k_at [L, K, S] -> [L, K, S], as
    `scores` says."""
    layers, num_kv_heads, length, head_dim = k.shape
    q_at = q_at.reshape(layers, num_kv_heads, -1, q.shape[2])
    # 1. Logits [L, K, G, N, S] of every query and slot.
    s = (q.float() * scale).view(layers, num_kv_heads, -1, head_dim) @ k.float().transpose(2, 3)
    s = s.view(*q_at.shape, length)
    # 2. A query sees no newer key. Most slots are older than every query and need no mask.
    #    An empty query (-1) is left to step 4.
    oldest = q_at.masked_fill(q_at < 0, torch.iinfo(q_at.dtype).max).min()
    newer = (k_at > oldest).flatten(0, 1).any(0)
    first = int(newer.int().argmax()) if newer.any() else length
    s[..., first:].masked_fill_(k_at[:, :, None, None, first:] > q_at[..., None], -torch.inf)
    # 3. SnapKV's kind pools the heads here, before the softmax.
    if group == "logits":
        s = s.amax(2, keepdim=True)
        q_at = q_at.amax(2, keepdim=True)
    # 4. Softmax over the slots, as a logarithm where only its order counts; who sees nothing
    #    says nothing.
    sees_nothing = q_at < k_at.amin(-1)[..., None, None]
    s = s.log_softmax(-1) if pool == "max" else s.softmax(-1)
    if sees_nothing.any():
        s.masked_fill_(sees_nothing[..., None], -torch.inf if pool == "max" else 0)
    # 5. The queries of a head together: [L, K, G, S].
    s = s.amax(3) if pool == "max" else s.sum(3)
    if pool == "mean":
        num_queries = (q_at >= 0).sum(-1)
        s = s / num_queries.clamp(min=1)[..., None]
    # 6. The heads of a KV head, or of the layer, together: [L, K, S].
    if group == "layer":
        return s.mean((1, 2), keepdim=True)[:, :, 0].expand(-1, num_kv_heads, -1)
    if group == "mean":
        return s.mean(2)
    return s.amax(2)


def redundancy(keys: Tensor, page_table: Tensor, domains: Tensor, max_cached_length: int) -> Tensor:
    """R-KV's redundancy of keys (METHOD.md, "Policies"): float32 [B, L, K, max_cached_length], 0
    outside the domain.

    keys [L, K, pages, P, D]; page_table int32 [B, pages]; domains int32 [B, 2], slots [start, end).
    Rows are taken in blocks, so that no S x S matrix is held whole.
    """
    layers, num_kv_heads = keys.shape[:2]
    out = torch.zeros(len(domains), layers, num_kv_heads, max_cached_length, device=keys.device)
    for b, (start, end) in enumerate(domains.tolist()):
        n = end - start
        index = torch.arange(n, device=keys.device)
        block = max(1, SCRATCH // (16 * num_kv_heads * max(n, 1)))
        for layer in range(layers):
            own = _slots_of(keys[layer], page_table[b], end, None)[:, start:]
            unit = F.normalize(own.float(), dim=-1)
            total = torch.zeros(num_kv_heads, n, device=keys.device)
            for a in range(0, n, block):
                # 1. Cosine similarity of the rotated keys of one KV head; none to itself.
                similar = unit[:, a : a + block] @ unit.transpose(1, 2)
                rows = index[a : a + block]
                similar[:, rows - a, rows] = 0
                # 2. In each row the newest neighbour above 0.5 does not count.
                newest = torch.where(similar > 0.5, index, -1).amax(-1, keepdim=True)
                total += similar.masked_fill_(index == newest, 0).sum(1)
            # 3. The mean over the rows for each column, then a softmax over the domain.
            out[b, layer, :, start:end] = (total / max(n, 1)).softmax(-1)
    return out


def compact(
    keys: Tensor, values: Tensor, positions: Tensor, page_table: Tensor, keep: Tensor, start: Tensor
) -> None:
    """Move the kept slots together, in place, in every layer and KV head of the given requests
    (METHOD.md, "Eviction", step 4).

    keys, values [L, K, pages, P, D], positions [L, K, pages, P]; page_table int32 [B, pages];
    start int32 [B]; keep int32 [B, L, K, M]: slots, ascending, keep[..., i] >= start + i, which
    moves to start + i.
    """
    layers, num_kv_heads, pages, page_size, head_dim = keys.shape
    head = torch.arange(layers * num_kv_heads, device=keys.device)[:, None] * (pages * page_size)
    for b, table in enumerate(page_table.long()):
        # 1. Slots of the request as flat slots of the whole tensor.
        source = keep[b].flatten(0, 1).long()
        target = (start[b] + torch.arange(keep.shape[-1], device=keys.device)).expand_as(source)
        slots = torch.stack((source, target))
        source, target = (head + table[slots // page_size] * page_size + slots % page_size).flatten(1)
        # 2. The right side is a copy, so nothing is overwritten before it is read.
        for rows in (keys.view(-1, head_dim), values.view(-1, head_dim), positions.view(-1, 1)):
            rows[target] = rows[source]
