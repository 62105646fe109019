"""How long work took on a device, told without waiting for it.

A GPU works behind the host: when a call returns, what it launched is still to be done. Two events
in the GPU's own queue enclose the work, and are read once the GPU is past them; nobody waits. A CPU
is done when the call returns. Knows devices; nothing of what is timed.
"""

import time
from collections import deque

import torch

Moment = float | torch.cuda.Event  # CPU: of `time.perf_counter`; GPU: a place in its queue


class DeviceClock:
    """Adds up the seconds of pieces of work on one device, which follow each other."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._seconds = 0.0  # of the pieces that are over, as far as the host knows
        # (begin, end) of those that are not known to be over, the oldest first
        self._pieces: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> Moment:
        """Before a piece of work; on a GPU in the current stream, which must do all of it."""
        return self._mark() if self.on_gpu else time.perf_counter()

    def end(self, began: Moment) -> None:
        """After it: count what was done or launched since; without it nothing is counted."""
        if self.on_gpu:
            self._pieces.append((began, self._mark()))
        else:
            self._seconds += time.perf_counter() - began

    def seconds(self) -> float:
        """Of all pieces that are over; on a GPU, of those that it is known to be past."""
        while self._pieces:
            began, ended = self._pieces[0]
            if not ended.query():
                break  # nor are those behind it over
            self._seconds += began.elapsed_time(ended) / 1000
            self._pieces.popleft()
        return self._seconds

    def _mark(self) -> torch.cuda.Event:
        """A place in the GPU's queue, which notes the time when the GPU comes by."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
