"""`Flight`: a step whose tokens the device has and the host has not read yet. The one place that
says what comes a step late, and why.

With overlap the host launches step t + 1 before it reads the tokens of step t: these feed the next
step on the device (`Batch.with_unread`), and while it computes, the host does step t's text, ends
and statistics. So the device does not wait for the host. A step then goes like this
(`Engine._run`):

1. plan and launch step t + 1;
2. read the tokens of step t ("land"), which may end requests;
3. sample step t + 1, evict whose cache is full then, and let its tokens fly.

What is known from counts is not late: a request that is at its max_tokens gives its seat back at
once, and what is due for eviction follows from lengths. One step late are

* an end that only a token tells (an end token, a stop string): the request has had one row too
  many, which nobody reads, and whoever waits for its seat gets it a step later. An eviction
  behind its last token has run for nothing, so that evictions and their traces are counted when
  the flight lands;
* a token that the device could not settle (`sampling.DOUBT`): the row fed with it is
  computed again;
* stream, statistics, and the seconds of an eviction.

Not overlapped are steps that the host must answer first: given outputs and listeners (`score`), a
decode step for which pages may be short, one after a doubt, and those of a group of processes.

What is said of a request (tokens, log-probabilities, kept positions) is the same with and without
overlap. Which of its neighbours share a step is not where an end comes late and somebody waits, and
then the highest points of memory need not be equal either.

Knows what a step leaves behind; nothing of how it is launched or read.
"""

from dataclasses import dataclass

from .answers import Sampled
from .eviction import Evicted
from .scheduler import Plan


@dataclass
class Flight:
    """What a step has left to be read."""

    plan: Plan
    sampled: Sampled
    evicted: Evicted  # behind the step, also of those whom its token ends
    landing: bool = False  # whether its tokens are being handed out
