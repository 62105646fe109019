"""The engine without eviction against transformers, and what it promises about batches, pages and
requests."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from proofs import prove
from tiny import FAMILIES, VOCABULARY, prompt_of, text_folder, tiny_folder
from transformers import AutoModelForCausalLM

from nanobeacon import LLM, SamplingParams

LENGTHS = (1, 2, 7, 8, 9, 16, 31, 32, 33, 70)
GREEDY = dict(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(folder, transformers model) of a family, float32."""
    folder = tiny_folder(tmp_path_factory.mktemp(request.param), request.param)
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_tokens(model, prompt, count):
    """Greedy continuation by transformers' dense model, and the margin of each pick."""
    ids, margins = list(prompt), []
    for _ in range(count):
        best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        ids.append(best.indices[0].item())
        margins.append((best.values[0] - best.values[1]).item())
    return ids[len(prompt) :], margins


def agree_up_to_near_ties(got, wanted, margins, tie=1e-4):
    """Equal, or different from a position on where the reference's two best logits are closer than `tie`."""
    for a, b, margin in zip(got, wanted, margins, strict=True):
        if a != b:
            assert margin < tie, f"{a} instead of {b}, which led by {margin}"
            return
    assert len(got) == len(wanted)


def test_greedy_tokens_equal_transformers_alone_batched_and_chunked(pair):
    folder, model = pair
    prompts = [prompt_of(n) for n in LENGTHS]
    wanted = [reference_tokens(model, p, 20) for p in prompts]
    params = SamplingParams(max_tokens=20, **GREEDY)
    for options in (dict(max_num_seqs=16), dict(max_num_seqs=3, chunk=8, page_size=8), dict(max_num_seqs=1)):
        llm = LLM(folder, dtype="float32", device="cpu", **options)
        for output, (tokens, margins) in zip(llm.generate(prompts, params), wanted, strict=True):
            agree_up_to_near_ties(output.token_ids, tokens, margins)


def test_logits_equal_transformers(pair):
    folder, model = pair
    prompts, given = [prompt_of(n) for n in LENGTHS], [prompt_of(12, seed=1)] * len(LENGTHS)
    seen = {}
    llm = LLM(folder, dtype="float32", device="cpu", chunk=16, page_size=8, max_num_seqs=4)
    scores = llm.score(
        prompts, given, on_logits=lambda r, i, logits: seen.__setitem__((r, i), logits.clone())
    )
    for r, prompt in enumerate(prompts):
        with torch.no_grad():
            full = model(torch.tensor([prompt + given[r]])).logits[0]
        wanted = full[len(prompt) - 1 : -1]
        got = torch.stack([seen[r, i] for i in range(len(given[r]))])
        assert (got - wanted).abs().max() / wanted.abs().max() < 2e-4
        logprobs = wanted.log_softmax(-1).gather(1, torch.tensor(given[r])[:, None])[:, 0]
        torch.testing.assert_close(scores[r], logprobs, atol=1e-4, rtol=1e-4)


def test_head_dim_is_not_hidden_by_heads(tmp_path):
    folder = tiny_folder(tmp_path, "qwen3", head_dim=32, hidden_size=40, num_attention_heads=4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, margins = reference_tokens(model, prompt_of(9), 12)
    llm = LLM(folder, dtype="float32", device="cpu")
    (output,) = llm.generate([prompt_of(9)], SamplingParams(max_tokens=12, **GREEDY))
    agree_up_to_near_ties(output.token_ids, tokens, margins)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [None, 64])
def test_memory_that_was_never_written_is_never_read(tmp_path, page_size, budget):
    """Poisoned pages and buffers change nothing."""
    folder = tiny_folder(tmp_path, "llama")
    prompts = [prompt_of(n) for n in (1, 15, 16, 17, 40)]
    params = SamplingParams(max_tokens=90, **GREEDY)
    outputs = []
    for poison in (False, True):
        llm = LLM(folder, dtype="float32", device="cpu", page_size=page_size, budget=budget, chunk=16)
        for tensor in (llm.engine.cache.keys, llm.engine.cache.values, llm.engine.queries.buffer):
            tensor.fill_(float("nan") if poison else 0.0)
        if poison:
            llm.engine.cache.positions.fill_(2**30)
        outputs.append([o.token_ids for o in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1]


def test_preempted_requests_are_recomputed_and_end_the_same(tmp_path):
    folder = tiny_folder(tmp_path, "qwen3")
    prompts = [prompt_of(n) for n in (10, 20, 30, 5)]
    params = SamplingParams(max_tokens=40, **GREEDY)
    roomy = LLM(folder, dtype="float32", device="cpu", page_size=8)
    tight = LLM(folder, dtype="float32", device="cpu", page_size=8, num_pages=12)
    assert [o.token_ids for o in tight.generate(prompts, params)] == [
        o.token_ids for o in roomy.generate(prompts, params)
    ]
    assert tight.engine.scheduler.preemptions > 0
    prove(tight.engine.scheduler)
    assert tight.engine.pool.used_count == 0


def test_prompt_of_exactly_the_pool_and_one_more(tmp_path):
    folder = tiny_folder(tmp_path, "llama")
    llm = LLM(folder, dtype="float32", device="cpu", page_size=8, num_pages=4)
    fits, too_long = llm.generate([prompt_of(32), prompt_of(33)], SamplingParams(max_tokens=1, **GREEDY))
    assert fits.finish_reason == "length" and len(fits.token_ids) == 1
    assert (
        too_long.finish_reason == "error" and "33 tokens" in too_long.error and "32 slots" in too_long.error
    )


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_lengths_at_page_borders(tmp_path, length):
    folder = tiny_folder(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, margins = reference_tokens(model, prompt_of(length), 18)
    (output,) = LLM(folder, dtype="float32", device="cpu").generate(
        [prompt_of(length)], SamplingParams(max_tokens=18, **GREEDY)
    )
    agree_up_to_near_ties(output.token_ids, tokens, margins)


@pytest.mark.parametrize("budget", [None, 64])
def test_completions_of_one_prompt_share_its_full_pages(tmp_path, budget):
    folder = tiny_folder(tmp_path, "llama")
    llm = LLM(folder, dtype="float32", device="cpu", page_size=8, budget=budget)
    alone = LLM(folder, dtype="float32", device="cpu", page_size=8, budget=budget, max_num_seqs=1)
    params = SamplingParams(max_tokens=80, temperature=0.9, seed=5, n=3, ignore_eos=True)
    requests = llm.submit([prompt_of(21)], params)
    llm.engine.step()
    assert requests[0].pages[:2] == requests[1].pages[:2] == requests[2].pages[:2]
    assert len({r.pages[2] for r in requests}) == 3
    for _ in llm.run(requests):
        prove(llm.engine.scheduler)
    assert llm.engine.pool.used_count == 0
    # Sharing, being batched and the order of arrival change nothing: one at a time the same comes out.
    outputs = alone.generate([prompt_of(21)], params)
    assert [r.output_token_ids for r in requests] == [o.token_ids for o in outputs]
    assert len({tuple(o.token_ids) for o in outputs}) == 3


def test_breaking_out_leaves_nothing_behind(tmp_path):
    folder = tiny_folder(tmp_path, "llama")
    llm = LLM(folder, dtype="float32", device="cpu", budget=64)
    wanted = llm.generate([prompt_of(30)], SamplingParams(max_tokens=100, **GREEDY))[0].token_ids
    requests = llm.submit([prompt_of(40), prompt_of(9)], SamplingParams(max_tokens=200, **GREEDY))
    for i, _ in enumerate(llm.run(requests)):
        if i == 150:
            break
    assert [r.finish_reason for r in requests] == ["abort", "abort"]
    assert llm.engine.pool.used_count == 0 and llm.engine.scheduler.plan() is None
    llm.engine.queries.buffer.fill_(float("nan"))
    assert llm.generate([prompt_of(30)], SamplingParams(max_tokens=100, **GREEDY))[0].token_ids == wanted


def test_seeded_draws_do_not_depend_on_neighbours(tmp_path):
    folder = tiny_folder(tmp_path, "qwen2")
    llm = LLM(folder, dtype="float32", device="cpu")
    params = [SamplingParams(max_tokens=15, temperature=0.8, seed=s, ignore_eos=True) for s in (1, 2, 1)]
    a, b, c = llm.generate([prompt_of(12)] * 3, params)
    assert a.token_ids == c.token_ids != b.token_ids
    (again,) = llm.generate([prompt_of(12)], params[:1])
    assert again.token_ids == a.token_ids


def test_without_a_seed_draws_are_fresh_and_with_the_engines_they_repeat(tmp_path):
    folder = tiny_folder(tmp_path, "llama")
    params = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)

    def runs(seed):
        llm = LLM(folder, dtype="float32", device="cpu", seed=seed)
        return [o.token_ids for o in llm.generate([prompt_of(8)] * 2, params)]

    assert runs(7) == runs(7) and runs(7)[0] != runs(7)[1]
    assert runs(None) != runs(None)


def test_logprobs_are_raw_and_hold_the_best(tmp_path):
    folder = tiny_folder(tmp_path, "llama")
    llm = LLM(folder, dtype="float32", device="cpu")
    params = SamplingParams(max_tokens=6, temperature=3.0, top_k=5, seed=1, logprobs=4, ignore_eos=True)
    (output,) = llm.generate([prompt_of(8)], params)
    given = llm.score([prompt_of(8)], [output.token_ids])[0]
    assert len(output.logprobs) == 6
    for (own, best), score in zip(output.logprobs, given, strict=True):
        assert abs(own - score) < 1e-5 and len(best) == 4
        assert list(best.values()) == sorted(best.values(), reverse=True)


def test_logits_that_are_not_finite_end_one_request_only(tmp_path):
    llm = LLM(tiny_folder(tmp_path, "qwen2"), dtype="float32", device="cpu")
    llm.engine.model.embedding.data[50] = float("nan")
    bad, good = llm.generate([[3, 50, 4], [3, 4, 5]], SamplingParams(max_tokens=3, **GREEDY))
    assert bad.finish_reason == "error" and "not finite" in bad.error
    assert good.finish_reason == "length" and len(good.token_ids) == 3


def test_two_engines_in_one_process(tmp_path):
    folder = tiny_folder(tmp_path, "llama")
    first = LLM(folder, dtype="float32", device="cpu")
    second = LLM(folder, dtype="bfloat16", device="cpu", budget=64, page_size=8)
    params = SamplingParams(max_tokens=5, **GREEDY)
    before = first.generate([prompt_of(8)], params)[0].token_ids
    second.generate([prompt_of(8)], params)
    assert first.generate([prompt_of(8)], params)[0].token_ids == before


def test_token_ids_beyond_the_vocabulary_are_that_prompts_error(tmp_path):
    llm = LLM(tiny_folder(tmp_path, "llama"), dtype="float32", device="cpu")
    bad, good = llm.generate([[3, VOCABULARY], [3]], SamplingParams(max_tokens=2, **GREEDY))
    assert bad.finish_reason == "error" and str(VOCABULARY) in bad.error
    assert good.finish_reason == "length"


def test_stats_add_up(tmp_path):
    llm = LLM(tiny_folder(tmp_path, "llama"), dtype="float32", device="cpu")
    llm.generate([prompt_of(40), prompt_of(3)], SamplingParams(max_tokens=10, **GREEDY))
    stats = llm.stats
    assert stats.prompt_tokens == 43 and stats.output_tokens == 20
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0 and stats.evictions == 0
    assert stats.peak_cached_tokens == 49  # the last token sampled is never fed
    assert stats.peak_kv_bytes == stats.full_kv_bytes == (4 + 1) * 16 * 2 * 2 * (2 * 16 * 4 + 4)


@pytest.mark.parametrize("policy", ["random", "random-query"])
def test_completions_keep_the_same_whether_they_share_a_prefill_or_not(tmp_path, policy):
    """The seeded choices inside the prompt belong to the prompt, not to the completion that read it."""
    folder = tiny_folder(tmp_path, "llama")
    params = SamplingParams(max_tokens=70, temperature=0.8, seed=2, n=3, ignore_eos=True)
    kept = []
    for seats in (1, 3):
        llm = LLM(
            folder,
            dtype="float32",
            device="cpu",
            max_num_seqs=seats,
            budget=64,
            policy=policy,
            protect=4,
            trace=True,
        )
        kept.append([[e.kept.tolist() for e in o.trace] for o in llm.generate([prompt_of(100)], params)])
    assert kept[0] == kept[1] and kept[0][0] != kept[0][1]


def test_an_error_in_on_logits_ends_its_own_call_only(tmp_path):
    llm = LLM(tiny_folder(tmp_path, "llama"), dtype="float32", device="cpu", budget=64)
    wanted = llm.generate([prompt_of(12)], SamplingParams(max_tokens=100, **GREEDY))[0].token_ids
    (other,) = llm.submit([prompt_of(12)], SamplingParams(max_tokens=100, **GREEDY))
    heard = []

    def fail(request, index, logits):
        heard.append((request, index))
        if index == 2:
            raise KeyError("from the caller")

    with pytest.raises(KeyError, match="from the caller"):
        llm.score([prompt_of(8), prompt_of(9)], [prompt_of(50), prompt_of(60)], on_logits=fail)
    assert heard[-1] == (0, 2) and other.finish_reason is None
    with pytest.raises(RuntimeError, match="cannot use the LLM"):
        llm.score([prompt_of(8)], [prompt_of(5)], on_logits=lambda *_: llm.generate([prompt_of(3)]))
    for _ in llm.run([other]):
        pass
    assert other.output_token_ids == wanted
    assert llm.engine.pool.used_count == 0 and llm.engine.scheduler.plan() is None


def test_an_error_in_a_step_ends_what_ran_in_it_and_leaves_no_trace(tmp_path, monkeypatch):
    llm = LLM(tiny_folder(tmp_path, "llama"), dtype="float32", device="cpu", budget=64)
    wanted = llm.generate([prompt_of(12)], SamplingParams(max_tokens=9, **GREEDY))[0].token_ids
    (other,) = llm.submit([prompt_of(12)], SamplingParams(max_tokens=100, **GREEDY))

    def fail(*_):
        raise KeyError("from the model")

    with monkeypatch.context() as broken, pytest.raises(KeyError):
        broken.setattr(llm.engine.model, "logits", fail)
        llm.generate([prompt_of(8)])
    assert other.finish_reason == "error" and "from the model" in other.error
    assert llm.engine.pool.used_count == 0 and llm.engine.scheduler.plan() is None
    assert llm.generate([prompt_of(12)], SamplingParams(max_tokens=9, **GREEDY))[0].token_ids == wanted


def test_calls_that_are_refused_or_never_read_leave_nothing_queued(tmp_path):
    llm = LLM(text_folder(tmp_path), dtype="float32", device="cpu")
    with pytest.raises(ValueError, match="a list of as many"):
        llm.score("abc", ["d"])
    with pytest.raises(ValueError, match="continuations"):
        llm.score([[5, 6], [7]], [[8, 9], []])
    with pytest.raises(ValueError, match=r"prompts\[1\], continuations\[1\]: token id"):
        llm.score([[5, 6], [9]], [[8], [9999]])
    with pytest.raises(ValueError, match=r"prompts\[0\]=1: a text or a list"):
        llm.score([1, 2], [[3], [4]])
    with pytest.raises(ValueError, match=r"continuations=None: a list"):
        llm.score([[1]], None)
    stream = llm.stream("abc", SamplingParams(max_tokens=3))
    del stream
    assert llm.engine.scheduler.plan() is None


def test_static_batches_read_evenly_spaced_runs_and_give_what_one_alone_gives(tmp_path):
    """Equal lengths in neighbouring seats are one strided product; it must not matter."""
    llm = LLM(tiny_folder(tmp_path, "qwen3"), dtype="float32", device="cpu", max_num_seqs=4)
    prompts = [prompt_of(20, seed=s) for s in range(4)]
    params = SamplingParams(max_tokens=40, **GREEDY)
    together = llm.generate(prompts, params)
    assert [o.token_ids for o in together] == [llm.generate([p], params)[0].token_ids for p in prompts]


def test_several_threads_share_one_engine(tmp_path):
    llm = LLM(tiny_folder(tmp_path, "llama"), dtype="float32", device="cpu")
    params, prompts = SamplingParams(max_tokens=30, **GREEDY), [prompt_of(9), prompt_of(12)]
    wanted = [o.token_ids for o in llm.generate(prompts, params)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: llm.generate([prompts[i % 2]], params)[0].token_ids, range(12)))
    assert found == [wanted[i % 2] for i in range(12)]
    assert llm.engine.pool.used_count == 0
