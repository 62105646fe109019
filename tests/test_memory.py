"""Memory that is counted before it is taken, and given back at once."""

import gc
import os
import weakref
from functools import partial

import pytest
import torch
from tiny import prompt_of, tiny_folder
from torch.utils._python_dispatch import TorchDispatchMode

from nanobeacon import LLM, SamplingParams, engine, memory
from nanobeacon.config import read_config
from nanobeacon.memory import free_bytes, step_bytes
from nanobeacon.sampling import ROWS, Draw, sample, token_logprobs


class PeakBytes(TorchDispatchMode):
    """Most bytes of tensors alive at once, of those that operators inside make."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not operator.is_view:
                self._alive[id(tensor)] = weakref.ref(tensor), tensor.untyped_storage().nbytes()
        alive = {}
        for ref, size in self._alive.values():
            if ref() is not None:
                alive[ref().untyped_storage().data_ptr()] = size
        self.peak = max(self.peak, sum(alive.values()))
        return result


def peak_of(call) -> int:
    with PeakBytes() as found:
        call()
    return found.peak


@pytest.mark.parametrize(
    "draw", [Draw(0.8, top_p=0.95), Draw(0.8, top_k=50), Draw(1.0), Draw(1.0, min_p=0.1)]
)
@pytest.mark.parametrize("scale", [0.01, 5.0])
def test_sampling_stays_within_what_is_reserved_for_it(draw, scale):
    rows = 7 * ROWS
    for vocabulary in (1_000, 70_000):
        logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1)) * scale
        peak = peak_of(partial(sample, logits, [draw] * rows))
        assert ROWS * vocabulary < peak <= memory.sampling_bytes(rows, vocabulary)


def test_log_probabilities_stay_within_what_is_reserved_too():
    rows, vocabulary = 3 * ROWS, 20_000
    logits = torch.randn(rows, vocabulary)
    ids = torch.zeros(rows, dtype=torch.int64)
    assert peak_of(lambda: token_logprobs(logits, ids, 20)) <= ROWS * vocabulary * memory.SAMPLED
    # In blocks or not, a row's numbers are its own.
    together, alone = token_logprobs(logits, ids, 3), token_logprobs(logits[40:41], ids[40:41], 3)
    for all_rows, one in zip(together, alone, strict=True):
        assert torch.equal(all_rows[40:41], one)


def test_a_forward_pass_stays_within_what_is_reserved(tmp_path):
    """The tiny model's reference attention is not what runs on a GPU, and is left out."""
    llm = LLM(tiny_folder(tmp_path, "qwen3"), dtype="float32", device="cpu", num_pages=80)
    layer, config = llm.engine.model.layers[0], llm.model_config
    hidden = torch.zeros(500, config.hidden_size)
    kernels = llm.engine.model.kernels

    def mlp() -> None:
        normed = kernels.add_rms_norm(hidden, None, layer.input_norm, layer.eps)
        layer.qkv(normed)
        layer.down(kernels.silu_mul(layer.gate_up(normed)))

    assert peak_of(mlp) <= 500 * memory._activations(config, torch.float32)


def test_more_graphs_rows_and_tokens_need_more(tmp_path):
    config = read_config(tiny_folder(tmp_path, "qwen3", vocab_size=150_000))
    sizes = dict(tokens=2048, logit_rows=192, graphs=0, graph_tokens=192, unread_rows=0)
    base = step_bytes(config, torch.bfloat16, **sizes)
    assert base >= 192 * 150_000 * 6
    assert step_bytes(config, torch.bfloat16, **sizes | dict(logit_rows=320)) > base
    assert step_bytes(config, torch.bfloat16, **sizes | dict(tokens=10**6)) > base
    graphs = step_bytes(config, torch.bfloat16, **sizes | dict(graphs=19))
    assert graphs >= base + 19 * memory.GRAPH
    unread = step_bytes(config, torch.bfloat16, **sizes | dict(unread_rows=192))
    assert unread >= base + 192 * 150_000 * 4


def test_a_gpus_pool_leaves_room_for_a_step(tmp_path, monkeypatch):
    llm = LLM(tiny_folder(tmp_path, "qwen3"), dtype="float32", device="cpu")
    it = llm.engine
    it.model.device = torch.device("cuda")
    free, taken = 4 << 30, it._step_bytes()
    monkeypatch.setattr(engine, "free_bytes", lambda device: free)
    assert it._pages_that_fit(10**9) == (int(free * 0.9) - taken) // it.page_bytes
    monkeypatch.setattr(engine, "free_bytes", lambda device: taken)
    with pytest.raises(ValueError, match="num_pages: .* one page takes"):
        it._pages_that_fit(10**9)


def test_what_torch_keeps_of_tensors_that_are_gone_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    assert free_bytes(torch.device("cuda")) == 120


def test_a_page_counts_keys_values_and_positions(tmp_path):
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        llm = LLM(tiny_folder(tmp_path, "qwen3"), dtype=dtype, device="cpu", page_size=8, num_pages=5)
        cache = llm.engine.cache
        tensors = (cache.keys, cache.values, cache.positions)
        assert sum(t.nbytes for t in tensors) == 6 * llm.engine.page_bytes
        assert llm.engine.page_bytes == 2 * 2 * 8 * (2 * 16 * size + 4)


@pytest.mark.parametrize("options", [{}, dict(budget=48, window=16), dict(policy="recent", budget=48)])
def test_a_dropped_llm_gives_its_memory_back_at_once(tmp_path, options):
    """Without waiting for a garbage collection, which knows nothing of a GPU's memory."""
    folder = tiny_folder(tmp_path, "qwen3")
    gc.collect()
    gc.disable()
    try:
        llm = LLM(folder, dtype="float32", device="cpu", max_num_seqs=4, **options)
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, n=2)
        outputs = llm.generate([prompt_of(40), prompt_of(3)], params)
        held = [weakref.ref(t) for t in (llm.engine.cache.keys, llm.engine.queries.buffer)]
        held.append(weakref.ref(llm.engine.model))
        del llm
        assert [ref() for ref in held] == [None] * 3
        assert len(outputs) == 4
    finally:
        gc.enable()


def test_logits_of_given_outputs_are_held_a_few_rows_at_a_time(tmp_path, monkeypatch):
    folder = tiny_folder(tmp_path, "qwen3")
    prompts = [prompt_of(n) for n in (9, 5, 17)]
    given = [prompt_of(n, seed=1) for n in (50, 70, 33)]
    scores, most = [], []
    for rows in (128, 5):
        monkeypatch.setattr(engine, "LOGIT_ROWS", rows)
        llm = LLM(folder, dtype="float32", device="cpu", max_num_seqs=3, budget=40, window=16)
        head = llm.engine.model.logits
        counts = []
        llm.engine.model.logits = lambda hidden, v, head=head, counts=counts: (
            counts.append(len(hidden)) or head(hidden, v)
        )
        scores.append(llm.score(prompts, given))
        most.append(max(counts))
    assert most[0] > 5 >= most[1]
    for ours, theirs in zip(*scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def live_bytes() -> int:
    """Bytes of all tensors that Python still knows, each storage once. No garbage is collected."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_two_engines_in_one_process_do_not_know_each_other(tmp_path):
    """Step by step in turn, of other families, policies and dtypes: each answers as if it were alone."""
    folders = [tiny_folder(tmp_path / "a", "qwen3"), tiny_folder(tmp_path / "b", "llama", seed=1)]
    options = [dict(budget=48, window=8, dtype="float32"), dict(dtype="bfloat16", page_size=8)]
    prompts = [prompt_of(30), prompt_of(7)]
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=3, ignore_eos=True)
    alone = [
        [o.token_ids for o in LLM(folder, device="cpu", **more).generate(prompts, params)]
        for folder, more in zip(folders, options, strict=True)
    ]
    llms = [LLM(folder, device="cpu", **more) for folder, more in zip(folders, options, strict=True)]
    requests = [llm.submit(prompts, params) for llm in llms]
    busy = True
    while busy:
        busy = any([llm.engine.step() is not None for llm in llms])
    assert [[r.output_token_ids for r in some] for some in requests] == alone


def test_fifty_engines_one_after_the_other_leave_nothing(tmp_path):
    """Neither tensors nor open files, and without a garbage collection."""
    folder = tiny_folder(tmp_path, "llama")
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)

    def use_one(dtype: str) -> None:
        LLM(folder, device="cpu", dtype=dtype, num_pages=8, budget=40, window=8).generate([[3, 4]], params)

    def held() -> tuple[int, int]:
        return live_bytes(), len(os.listdir("/proc/self/fd"))

    for dtype in ("float32", "bfloat16", "float16"):
        use_one(dtype)  # the first one warms up what is shared: imports, compiled operators
    gc.collect()
    gc.disable()
    try:
        before = held()
        for number in range(50):
            use_one(("float32", "bfloat16", "float16")[number % 3])
        assert held() == before
    finally:
        gc.enable()
