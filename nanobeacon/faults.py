"""What a step that ran out of memory must know to be run again: where its requests stood before.

A forward pass writes only behind what is cached, at places that the counts of a request name: with
the counts as before it writes the same there again. (The exception are the query buffers of prompt
chunks, which are reduced in place: those requests begin anew.) Knows counts and errors; nothing of
who runs next.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from .request import Request
from .scheduler import Plan


@dataclass(frozen=True)
class Progress:
    """Where the requests of a plan stand, one column a count."""

    requests: list[Request]
    num_computed: list[int]
    cached_length: list[int]
    buffer_count: list[int]
    num_output: list[int]  # those that the host had not read included

    @staticmethod
    def of(plan: Plan) -> "Progress":
        """What the requests of a plan have reached before their step begins."""
        requests = plan.requests
        return Progress(
            requests=requests,
            num_computed=[request.num_computed for request in requests],
            cached_length=[request.cached_length for request in requests],
            buffer_count=[request.buffer_count for request in requests],
            num_output=[request.num_output for request in requests],
        )

    def answered(self) -> bool:
        """Whether one of them has got a token since: from then on the step cannot be undone."""
        rows = zip(self.requests, self.num_output, strict=True)
        return any(len(request.output_token_ids) > count for request, count in rows)

    def restore(self, only: Collection[Request] | None = None) -> None:
        """Back to where those that still run stood; only: so many of them, None for all."""
        for i, request in enumerate(self.requests):
            if request.finish_reason is not None or (only is not None and request not in only):
                continue
            request.num_computed = self.num_computed[i]
            request.cached_length = self.cached_length[i]
            request.buffer_count = self.buffer_count[i]
            # There is one for each output token; the step may have failed between the two.
            del request.logprobs[len(request.output_token_ids) :]


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory is what was missing: Python's error, the GPU's, and those that torch and
    CUDA's libraries raise as a RuntimeError of some text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in said)
