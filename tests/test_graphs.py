"""Recorded decode steps and the warm-up before them, on a CPU: stand-ins take the place of CUDA's streams and
recordings, and run the same tensors again."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from tiny import prompt_of, tiny_folder

from nanobeacon import LLM, SamplingParams, engine, graphs
from nanobeacon.graphs import DecodeGraphs, Recorder, buckets, can_record
from nanobeacon.kernels import reference
from nanobeacon.measure.host import StandIn
from nanobeacon.parallel import Group
from nanobeacon.warmup import warm_up

GREEDY = dict(temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 9, 16, 17, 64, 65, 192, 320])
def test_every_batch_size_has_a_bucket(most):
    sizes = buckets(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] == 1
    assert all(any(b >= n for b in sizes) for n in range(1, most + 1))


def test_large_batches_have_few_buckets():
    assert len(buckets(320)) == 19 and buckets(320)[-3:] == [256, 288, 320]


def graphs_of(llm: LLM, record, most: int = 4) -> DecodeGraphs:
    it = llm.engine
    return DecodeGraphs(
        it.model,
        it.cache,
        it.queries,
        most,
        it.max_model_len,
        it.vocabulary,
        record,
        newest=it.newest if it.overlap else None,
    )


@pytest.mark.parametrize("policy", [None, "beacon", "recent", "initial", "random-query", "streaming"])
def test_recorded_steps_give_the_same_tokens(tmp_path, policy):
    folder = tiny_folder(tmp_path, "qwen3")
    options = (
        dict(policy=policy, budget=48) | ({} if policy == "streaming" else dict(window=16)) if policy else {}
    )
    prompts = [prompt_of(n) for n in (3, 17, 40, 8, 9)]
    params = [SamplingParams(max_tokens=m, **GREEDY) for m in (70, 20, 64, 5, 33)]
    outputs, recorded, replayed = [], [], []
    for with_graphs in (False, True):
        llm = LLM(folder, dtype="float32", device="cpu", max_num_seqs=4, page_size=8, **options)
        if with_graphs:

            def record(forward):
                size = len(forward())
                recorded.append(size)
                return lambda: replayed.append(size) or forward()

            llm.engine.graphs = graphs_of(llm, record)
            llm.engine.graphs.record_all()
            llm.engine.cache.keys[:, :, 0].fill_(float("nan"))  # what padded rows read reaches no real one
        outputs.append([o.token_ids for o in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1]
    assert recorded == [4, 2, 1]  # the largest first, and none of them later
    assert set(replayed) == {4, 2, 1}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("options", [{}, dict(budget=200)], ids=["full", "budget"])
@pytest.mark.parametrize("how", [GREEDY, dict(temperature=0.6, top_p=0.9, seed=1, ignore_eos=True)])
def test_a_decode_step_reads_the_device_once(tmp_path, monkeypatch, recorded, options, how):
    """Stand-ins take the place of model and kernels: those of the reference read the device."""
    llm = LLM(tiny_folder(tmp_path, "qwen3"), dtype="float32", device="cpu", max_num_seqs=4, **options)
    StandIn(llm, 4)
    llm.engine.evictor.kernels = SimpleNamespace(reduce=lambda *_: None)
    if recorded:
        llm.engine.model.logits = lambda hidden, vocabulary, onto=None: torch.ones(len(hidden), vocabulary)
        llm.engine.graphs = graphs_of(llm, lambda forward: forward)
        llm.engine.graphs.record_all()
    requests = llm.submit([prompt_of(n) for n in (3, 9, 20)], SamplingParams(max_tokens=70, **how))
    while not all(request.output_token_ids for request in requests):
        llm.engine.step()
    reads = []
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *a, n=name, plain=plain: reads.append(n) or plain(*a))
    steps = 0
    while requests[0].finish_reason is None:
        llm.engine.step()
        steps += 1
    assert steps > 60 and reads == ["tolist"] * steps


@pytest.mark.parametrize("possible", [(), (1, 4)])
def test_a_bucket_that_fails_leaves_the_others(tmp_path, caplog, possible):
    llm = LLM(tiny_folder(tmp_path, "llama"), dtype="float32", device="cpu", max_num_seqs=4)
    replayed = []

    def record(forward):
        size = len(forward())
        if size not in possible:
            raise RuntimeError("no graphs on this device")
        return lambda: replayed.append(size) or forward()

    prompts = [prompt_of(5), prompt_of(6)]
    params = SamplingParams(max_tokens=9, **GREEDY)
    wanted = [o.token_ids for o in llm.generate(prompts, params)]
    llm.engine.graphs = graphs_of(llm, record)
    llm.engine.graphs.record_all()
    assert [o.token_ids for o in llm.generate(prompts, params)] == wanted
    assert set(replayed) == ({4} if possible else set())  # two requests take the next one that is there
    warnings = [r.message for r in caplog.records if "no graphs on this device" in r.message]
    assert len(warnings) == 1 and ("1, 2, 4" if not possible else "with 2 requests") in warnings[0]


def test_reference_kernels_are_not_recorded():
    """They read the device, which a recording cannot."""
    cuda = torch.device("cuda")
    triton = SimpleNamespace()
    alone = Group()
    assert not can_record(SimpleNamespace(device=cuda, kernels=reference, group=alone))
    assert can_record(SimpleNamespace(device=cuda, kernels=triton, group=alone))
    assert not can_record(SimpleNamespace(device=torch.device("cpu"), kernels=triton, group=alone))
    assert not can_record(SimpleNamespace(device=cuda, kernels=triton, group=Group(rank=1, size=2)))


class PretendedCuda:
    """The part of `torch.cuda` that a recording uses; like torch's own, a recording that fails does not set
    the stream back."""

    def __init__(self) -> None:
        self.current = "default"
        self.pools = 0
        self.used = []  # (stream, pool, error mode) of each recording

    def Stream(self, device):
        return SimpleNamespace(device=device, wait_stream=lambda other: None)

    def current_stream(self, device):
        return SimpleNamespace(name=self.current, wait_stream=lambda other: None)

    def set_stream(self, stream):
        self.current = stream.name

    def graph_pool_handle(self):
        self.pools += 1
        return self.pools

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: None)

    @contextmanager
    def stream(self, stream):
        yield

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.current = "recording"
        self.used.append((stream, pool, capture_error_mode))
        yield
        self.current = "default"


def test_a_recording_has_its_own_stream_and_a_failed_one_gives_the_thread_back(monkeypatch):
    cuda = PretendedCuda()
    monkeypatch.setattr(graphs.torch, "cuda", cuda)
    first, second = Recorder(torch.device("cuda:0")), Recorder(torch.device("cuda:1"))
    calls = []

    def forward():
        calls.append(cuda.current)
        if len(calls) == 2:
            raise RuntimeError("not while a recording runs")
        return "hidden"

    with pytest.raises(RuntimeError):
        first(forward)
    assert calls == ["default", "recording"] and cuda.current == "default"
    assert first(forward)() == "hidden" and second(forward)() == "hidden" and cuda.current == "default"
    streams, pools, modes = zip(*cuda.used, strict=True)
    assert [s.device.index for s in streams] == [0, 0, 1] and streams[0] is streams[1]
    assert pools == (1, 1, 2) and set(modes) == {"thread_local"}


def test_an_engine_prepares_its_graphs_before_the_first_request(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "Recorder", lambda device: lambda forward: forward)
    llm = LLM(tiny_folder(tmp_path, "qwen3"), dtype="float32", device="cpu", max_num_seqs=4)
    params = SamplingParams(max_tokens=9, **GREEDY)
    wanted = llm.generate([prompt_of(5)], params)[0].token_ids
    llm.engine.records = True
    llm.engine._prepare(2048, progress=False)
    assert sorted(llm.engine.graphs._recordings) == [1, 2, 4]
    assert llm.generate([prompt_of(5)], params)[0].token_ids == wanted


@pytest.mark.parametrize("options", [{}, dict(budget=48, window=16), dict(policy="recent", budget=48)])
def test_nothing_is_compiled_while_requests_are_served(tmp_path, options):
    pytest.importorskip("triton")
    from nanobeacon.kernels import triton_kernels
    from nanobeacon.measure.kernels import recorded_launches, source_of

    def variants(launches):
        """What a compilation depends on."""
        found = set()
        for kernel, arguments, chosen in launches:
            source = source_of(kernel, arguments)
            parts = (source.signature, source.constants, source.attrs, chosen)
            found.add((kernel.__name__, *(str(sorted(part.items())) for part in parts)))
        return found

    folder = tiny_folder(tmp_path, "qwen3")
    llm = LLM(folder, dtype="float32", device="cpu", max_num_seqs=4, chunk=32, **options)
    it = llm.engine
    kernels = triton_kernels()
    it.model.kernels = it.evictor.kernels = kernels
    if it.evictor.ranker is not None:
        it.evictor.ranker.kernels = kernels
    it.model.logits = lambda hidden, vocabulary: torch.zeros(len(hidden), vocabulary)  # nothing is computed
    with recorded_launches() as launches:
        warm_up(it.model, it.cache, it.queries, it.evictor, it.config.chunk, 4)
        warmed = variants(launches)
        launches.clear()
        prompts = [prompt_of(n) for n in (1, 3, 17, 31, 33, 80)]
        params = [SamplingParams(max_tokens=m, **GREEDY) for m in (150, 20, 64, 5, 200, 300)]
        outputs = llm.generate(prompts, params)
    assert [len(o.token_ids) for o in outputs] == [150, 20, 64, 5, 200, 300]
    assert variants(launches) <= warmed
    assert (llm.stats.evictions > 0) == bool(options)


def test_a_warm_up_leaves_nothing_behind(tmp_path):
    folder = tiny_folder(tmp_path, "qwen3")
    options = dict(dtype="float32", device="cpu", max_num_seqs=4, chunk=32, budget=48, window=16, trace=True)
    params = SamplingParams(max_tokens=99, temperature=1.0, seed=5, ignore_eos=True)
    llm = LLM(folder, **options)
    wanted = llm.generate([prompt_of(40)], params)[0]
    llm = LLM(folder, **options)
    it = llm.engine
    warm_up(it.model, it.cache, it.queries, it.evictor, it.config.chunk, 4)
    assert llm.stats.evictions == 0 and it.pool.used_count == 0 and llm.stats.prompt_tokens == 0
    found = llm.generate([prompt_of(40)], params)[0]
    assert found.token_ids == wanted.token_ids and len(found.trace) == len(wanted.trace) > 0
    for ours, theirs in zip(found.trace, wanted.trace, strict=True):
        assert torch.equal(ours.kept, theirs.kept)
