"""What a step that ran out of memory must know to be run again: where its requests stood before.

A forward pass writes only behind what is cached, at places that the counts of a request name: with the counts
as before it writes the same there again. (The exception are the query buffers of prompt chunks, which are
reduced in place: those requests begin anew.) Knows counts and errors; nothing of who runs next.
"""

from dataclasses import dataclass

import torch

from .request import Request
from .scheduler import Plan


@dataclass(frozen=True)
class Counts:
    """Where a request stands."""

    request: Request
    num_computed: int
    cached_length: int
    buffer_count: int
    num_output: int


@dataclass(frozen=True)
class Progress:
    """Where the requests of a plan stand."""

    counts: list[Counts]

    @staticmethod
    def of(plan: Plan) -> "Progress":
        """What the requests of a plan have reached before their step begins."""
        return Progress(
            [
                Counts(r, r.num_computed, r.cached_length, r.buffer_count, len(r.output_token_ids))
                for r in plan.requests
            ]
        )

    def answered(self) -> bool:
        """Whether one of them has got a token since: from then on the step cannot be undone."""
        return any(len(c.request.output_token_ids) > c.num_output for c in self.counts)

    def restore(self) -> None:
        """Back to where those that still run stood."""
        for c in self.counts:
            if c.request.finish_reason is None:
                c.request.num_computed = c.num_computed
                c.request.cached_length = c.cached_length
                c.request.buffer_count = c.buffer_count
                del c.request.logprobs[c.num_output :]


def is_out_of_memory(error: Exception) -> bool:
    """Python's, the GPU's, and those that torch and CUDA's libraries raise as a RuntimeError of some text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in said)
