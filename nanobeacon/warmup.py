"""One pass of every kind before the first request: no kernel is compiled while somebody waits.

Kernels are compiled for a few properties of their arguments, most of them powers of two; the passes
here take each in turn. They run on the scratch page and the scratch row, and leave nothing behind.
Knows which passes there are; nothing of kernels or of what they compute.
"""

from collections.abc import Iterator

import torch

from .batch import Batch, padding_request
from .cache import KVCache, QueryBuffer
from .eviction import Evictor
from .models.decoder import Decoder
from .request import Request
from .scheduler import Plan


@torch.inference_mode()
def warm_up(
    model: Decoder,
    cache: KVCache,
    queries: QueryBuffer,
    evictor: Evictor,
    chunk: int,
    max_num_seqs: int,
) -> None:
    """Prefill steps with chunks up to `chunk` tokens, decode steps behind up to a whole page table,
    and reductions and evictions of up to `max_num_seqs` requests.

    A policy's own score is left out: a user's function is not called for nobody."""
    most_tokens = cache.page_table.shape[1] * cache.page_size
    # 1. Prefill, in every power of two and at the two ends.
    for tokens in _sizes(min(chunk, most_tokens)):
        request = padding_request(tokens, cache.page_size)
        request.protected = tokens
        model(_prefill(request, tokens, cache, queries), cache, queries)
    # 2. The chunk after it, whose queries compete with those that are held.
    if queries.beacons and chunk < most_tokens:
        request = padding_request(chunk, cache.page_size)
        request.buffer_count = evictor.settings.policy.beacons
        model(_prefill(request, chunk, cache, queries), cache, queries)
    # 3. Decode steps, behind every power of two of cached tokens.
    for tokens in _sizes(most_tokens):
        request = padding_request(1, cache.page_size, cached=tokens - 1)
        plan = Plan([request], [1], prefill=False)
        model(Batch.build(plan, cache, queries), cache, queries)
    # 4. Eviction and reduction, where a request can get so far.
    settings = evictor.settings
    if settings is None or settings.policy.score is not None:
        return
    cached = settings.budget + 1  # a prompt of one token, and the whole budget behind it
    if cached > most_tokens:
        return
    for count in _sizes(max_num_seqs):
        full = []
        for _ in range(count):
            request = padding_request(0, cache.page_size, cached=cached)
            request.buffer_count = settings.policy.observed
            full.append(request)
        evictor.after_step(full)


def _sizes(most: int) -> Iterator[int]:
    """1, 2, 4 … and `most`."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


def _prefill(request: Request, tokens: int, cache: KVCache, queries: QueryBuffer) -> Batch:
    """The batch of one prompt's chunk of so many tokens."""
    return Batch.build(Plan([request], [tokens], prefill=True), cache, queries)
