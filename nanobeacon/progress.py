"""Bars on stderr for requests on their way. Nothing is shown where stderr is no terminal.

Knows requests by their lengths; nothing of models, caches or of who runs the steps.
"""

import time
from collections.abc import Sequence
from types import TracebackType

from tqdm import tqdm

from .request import Request

DELAY = 0.5  # seconds before a bar appears: what is over by then needs none


class _Bar:
    """A tqdm bar that leaves nothing behind; `shown` is False where nobody would see it.

    miniters=0: tqdm must not guess from past steps when to draw, as steps differ widely in length.
    """

    def __init__(self, wanted: bool, total: int, unit: str) -> None:
        off = None if wanted else True  # tqdm's None: off where stderr is no terminal
        self.bar = tqdm(total=total, unit=unit, disable=off, leave=False, delay=DELAY, miniters=0)
        self.shown = not self.bar.disable

    def __enter__(self) -> "_Bar":
        """Nothing to do: a bar is shown from its first step on."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        """Take the bar away, however the work has ended."""
        self.bar.close()


class PromptBar(_Bar):
    """Prompt tokens read, until the first text comes; then the terminal belongs to the text.

    For those who print pieces as they come: a bar among them would tear the text.
    """

    def __init__(self, requests: Sequence[Request], wanted: bool) -> None:
        self.requests = requests
        super().__init__(wanted, sum(len(r.prompt_token_ids) for r in requests), " tokens")
        self.bar.set_description("reading the prompt")

    def after_step(self) -> None:
        """Show how much of the prompts has been read; the first answer takes the bar away."""
        if not self.shown:
            return
        self.bar.update(_tokens_read(self.requests) - self.bar.n)
        if any(r.output_token_ids or r.finish_reason for r in self.requests):
            self.bar.close()
            self.shown = False


class RequestBar(_Bar):
    """Requests that have ended, with the tokens read so far and the speed of writing.

    For those who wait for all completions and print none before.
    """

    def __init__(self, requests: Sequence[Request], wanted: bool) -> None:
        self.requests = requests
        self.started = time.monotonic()
        self.prompt_tokens = sum(len(r.prompt_token_ids) for r in requests)
        super().__init__(wanted, len(requests), " requests")

    def after_step(self) -> None:
        """Show how many requests have ended, and how fast tokens are written."""
        if not self.shown:
            return
        ended = sum(r.finish_reason is not None for r in self.requests)
        written = sum(len(r.output_token_ids) for r in self.requests)
        speed = written / max(time.monotonic() - self.started, 1e-9)
        read = f"{_tokens_read(self.requests):,} of {self.prompt_tokens:,} prompt tokens read"
        self.bar.set_postfix_str(f"{read}, {written:,} tokens written, {speed:.1f} tokens/s", refresh=False)
        self.bar.update(ended - self.bar.n)


def _tokens_read(requests: Sequence[Request]) -> int:
    """Prompt tokens whose keys and values are computed; a request that has ended counts whole."""
    read = 0
    for request in requests:
        length = len(request.prompt_token_ids)
        # Output tokens are computed too, and do not count; an aborted request will read no more.
        read += length if request.finish_reason else min(request.num_computed, length)
    return read
