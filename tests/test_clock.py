"""`DeviceClock`: a CPU's seconds at once, a GPU's when it has come so far, and never by waiting for it."""

import time

import pytest
import torch
from tiny import prompt_of, tiny_folder

from nanobeacon import LLM, SamplingParams, clock
from nanobeacon.clock import DeviceClock


class PretendedGpu:
    """The part of `torch.cuda` that a clock uses: a queue of events, of which the GPU has passed some."""

    def __init__(self) -> None:
        self.passed = 0  # events
        self.recorded = []

    def Event(self, enable_timing: bool) -> "PretendedEvent":  # noqa: N802, torch's name
        assert enable_timing
        return PretendedEvent(self)


class PretendedEvent:
    """Notes when the GPU comes by: at milliseconds 1, 3, 6, 10 …"""

    def __init__(self, gpu: PretendedGpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.gpu.recorded.append(self)
        count = len(self.gpu.recorded)
        self.milliseconds = count * (count + 1) / 2

    def query(self) -> bool:
        return self in self.gpu.recorded[: self.gpu.passed]

    def elapsed_time(self, end: "PretendedEvent") -> float:
        assert self.query() and end.query(), "CUDA raises where it has not come so far"
        return end.milliseconds - self.milliseconds


@pytest.fixture
def gpu(monkeypatch) -> PretendedGpu:
    pretended = PretendedGpu()
    monkeypatch.setattr(clock.torch.cuda, "Event", pretended.Event)
    monkeypatch.setattr(clock.torch.cuda, "synchronize", lambda *_: pytest.fail("the host waits"))
    return pretended


def test_a_cpu_counts_what_passes_between_begin_and_end():
    it = DeviceClock(torch.device("cpu"))
    it.begin()  # a piece without an end
    assert it.seconds() == 0
    for _ in range(2):
        began = it.begin()
        time.sleep(0.01)
        it.end(began)
    assert it.seconds() >= 0.02
    assert it.seconds() == it.seconds()


def test_a_gpu_counts_each_piece_once_when_it_is_over(gpu):
    it = DeviceClock(torch.device("cuda"))
    it.end(it.begin())  # from millisecond 1 to 3
    it.begin()  # 6: a piece without an end
    it.end(it.begin())  # 10 to 15
    for passed, milliseconds in ((0, 0), (1, 0), (2, 2), (4, 2), (5, 7), (5, 7)):
        gpu.passed = passed
        assert it.seconds() == pytest.approx(milliseconds / 1000), passed


def test_an_engine_counts_a_gpus_evictions_in_a_later_step(tmp_path, gpu):
    llm = LLM(tiny_folder(tmp_path, "llama"), device="cpu", dtype="float32", policy="streaming", budget=48)
    llm.engine.eviction_clock = DeviceClock(torch.device("cuda"))
    llm.submit([prompt_of(9)], SamplingParams(max_tokens=200, ignore_eos=True))
    evictions = []  # after each step
    milliseconds = []
    while llm.engine.step() is not None:
        evictions.append(llm.stats.evictions)
        milliseconds.append(1000 * llm.stats.eviction_seconds)
        gpu.passed = len(gpu.recorded)  # the next step's tokens are read when all this is done
    evicted = [step for step in range(1, len(evictions)) if evictions[step] > evictions[step - 1]]
    counted = [step for step in range(1, len(evictions)) if milliseconds[step] > milliseconds[step - 1]]
    assert len(evicted) > 3
    assert counted == [step + 1 for step in evicted]
