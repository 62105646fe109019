"""`Stats`: what an engine has done, counted. Plain numbers; knows requests and plans, nothing
of tensors."""

from dataclasses import dataclass

from .scheduler import Plan


@dataclass
class Stats:
    """What an engine has done; seconds are wall time, bytes maxima over steps, summed
    over requests."""

    prompt_tokens: int = 0  # computed: what a preemption repeats is counted again
    prefix_tokens: int = 0  # found in the prefix cache instead of computed
    output_tokens: int = 0
    decode_tokens: int = 0  # of these, what decode steps brought; a prompt brings its first one itself
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    # part of decode_seconds, or of prefill_seconds where a prompt evicts; on a GPU those of a step
    # are known, and counted, a step later
    eviction_seconds: float = 0.0
    evictions: int = 0
    peak_cached_tokens: int = 0  # most held by one request
    peak_kv_bytes: int = 0  # pages in use
    full_kv_bytes: int = 0  # what no budget would have held
    # rows of running requests, and those kept at borders of known prefixes
    query_buffer_bytes: int = 0

    def count_memory(self, cached_tokens: int, kv_bytes: int, full_bytes: int, query_bytes: int) -> None:
        """Raise the maxima to what one step held; taken while all that it stored is there."""
        self.peak_cached_tokens = max(self.peak_cached_tokens, cached_tokens)
        self.peak_kv_bytes = max(self.peak_kv_bytes, kv_bytes)
        self.full_kv_bytes = max(self.full_kv_bytes, full_bytes)
        self.query_buffer_bytes = max(self.query_buffer_bytes, query_bytes)

    def count_tokens(self, plan: Plan, tokens: int) -> None:
        """Output tokens that a step has brought."""
        self.output_tokens += tokens
        if not plan.prefill:
            self.decode_tokens += tokens

    def count_step(self, plan: Plan, seconds: float) -> None:
        """A step's seconds, and the prompt tokens it has read."""
        if plan.prefill:
            self.prompt_tokens += sum(plan.lengths)
        self.count_seconds(plan, seconds)

    def count_seconds(self, plan: Plan, seconds: float) -> None:
        """Seconds that belong to a step, or to the reading of its tokens."""
        if plan.prefill:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds
