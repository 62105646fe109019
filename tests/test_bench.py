"""bench.py at toy size: what the last line says against the run, and what mistakes get. Nothing is timed."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from tiny import prompt_of, tiny_folder

import bench
from nanobeacon import LLM, SamplingParams
from nanobeacon.config import read_config
from nanobeacon.measure import common, crossover, fidelity, plots, systems, throughput

CPU = "--device cpu --dtype float32"
# A token of the tiny model in float32: layers, KV heads, (keys and values of a head dim, bytes)
KEYS_AND_VALUES = 2 * 2 * (2 * 16 * 4)
SLOT = 2 * 2 * (2 * 16 * 4 + 4)  # and its position


class Inline:
    """A worker in this process: the same calls without the seconds that a new one takes to start."""

    def __init__(self, name, threads, make, *arguments):
        self.name, self.make, self.arguments = name, make, arguments

    def __enter__(self):
        self.subject = self.make(*self.arguments)
        return self

    def __exit__(self, *_):
        pass

    def call(self, method, *arguments):
        return getattr(self.subject, method)(*arguments)


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(systems, "Worker", Inline)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture
def run(capsys):
    """bench.py with these words, in this process: (status, table, JSON of the last line, stderr)."""

    def call(*words):
        threads = torch.get_num_threads()
        status = bench.main([str(word) for word in words])
        torch.set_num_threads(threads)
        out, err = capsys.readouterr()
        *lines, last = out.splitlines() or [""]
        return status, "\n".join(lines), json.loads(last) if status == 0 else None, err

    return call


def test_throughput_measures_in_a_process_of_its_own(run, folder):
    words = f"--policies full --batch 1 --output-length 4 --repeats 1 {CPU} --threads 1"
    status, table, result, err = run("throughput", "--model", folder, *words.split())
    (row,) = result["rows"]
    assert status == 0 and row["decode_tokens"] == [3]
    # Peaks are those of a process that has loaded no transformers, and so not this one's
    assert 50e6 < row["memory_bytes"][0] < common.peak_memory("cpu")


def test_throughput_beside_transformers(run, folder, inline, tmp_path):
    words = f"--batch 2 --prompt-length 20 --output-length 90 --budgets 64 --repeats 2 {CPU} --threads 1"
    chart = tmp_path / "chart.svg"
    words = [*words.split(), "--vs", "transformers", "--plot", chart]
    status, table, result, _ = run("throughput", "--model", folder, *words)
    assert status == 0
    assert result["bench"] == "throughput" and result["n"] == 2 and result["seed"] == 0
    assert result["command"][1:4] == ["throughput", "--model", folder] and result["threads"] == 1
    assert result["versions"]["torch"] == torch.__version__ and result["machine"]["cores"] == os.cpu_count()
    assert result["machine"]["cpu_capability"] in table
    rows = {row["label"]: row for row in result["rows"]}
    assert list(rows) == ["transformers", "full", "beacon 64"]
    for label, row in rows.items():
        assert label in table
        assert row["prefill_tokens"] == [2 * 20] * 2 and row["decode_tokens"] == [2 * 89] * 2
        for phase in ("prefill", "decode"):
            rates = [t / s for t, s in zip(row[f"{phase}_tokens"], row[f"{phase}_seconds"], strict=True)]
            stated = row[f"{phase}_tokens_per_second"]
            assert (stated["low"], stated["high"]) == (min(rates), max(rates))
            assert stated["median"] == pytest.approx(sum(rates) / 2)
        assert min(row["memory_bytes"]) > 10e6 and min(row["step_ms_start"] + row["step_ms_end"]) > 0
    assert rows["transformers"]["kv_bytes"] == [2 * (20 + 89) * KEYS_AND_VALUES] * 2
    assert (
        rows["full"]["kv_bytes"] == [2 * 7 * 16 * SLOT] * 2
    )  # 109 tokens; the last one sampled is never fed
    assert rows["beacon 64"]["kv_bytes"] == [2 * 6 * 16 * SLOT] * 2  # at most 20 + 64
    assert rows["full"]["evictions"] == [0, 0] and rows["full"]["eviction_seconds"] == [0, 0]
    assert rows["beacon 64"]["evictions"] == [2 * (1 + (89 - 64) // 8)] * 2
    assert 0 < rows["beacon 64"]["eviction_seconds"][0] < rows["beacon 64"]["decode_seconds"][0]
    ratio = rows["full"]["ratios"]["transformers"]
    theirs, ours = rows["transformers"]["decode_seconds"], rows["full"]["decode_seconds"]
    assert ratio["low"] == min(t / o for t, o in zip(theirs, ours, strict=True)) > 0
    assert not rows["transformers"]["ratios"]
    texts = [element.text for element in ElementTree.parse(chart).iter() if element.text]
    assert "tokens per second" in texts and "beacon 64" in texts and "batch 2" in texts


def test_steps_are_the_decode_steps_of_the_whole_batch(folder):
    words = f"--model {folder} --prompt-length 600 --output-length 12 {CPU}"
    options = bench.parse("throughput", throughput, words.split())
    with bench.settled(options) as job:
        subject = systems.Nanobeacon(systems.System(), systems.changed(job, batch=5))
    subject.begin(0)
    steps = subject.advance()
    # 5 x 512 tokens do not fit into one prefill step: four are ready, and decode, before the last one is
    assert sum(tokens for *_, tokens in steps) == 5 * 11
    assert all(prefill >= 0 and decode >= 0 for prefill, decode, _ in steps)
    assert {tokens for *_, tokens in steps} == {0, 1, 4, 5} and steps[0][2] == 0
    assert subject.llm.engine.scheduler.preemptions == 0


def test_growing_requests_stay_one_run_of_pages(folder):
    """The pool that throughput asks for lets the CPU path read views, as with a pool of the default size."""
    for batch, prompt, output in ((3, 5, 200), (5, 100, 150), (8, 33, 60), (6, 200, 20)):
        words = f"--model {folder} --prompt-length {prompt} --output-length {output} {CPU}"
        with bench.settled(bench.parse("throughput", throughput, words.split())) as job:
            subject = systems.Nanobeacon(systems.System(), systems.changed(job, batch=batch))
        subject.begin(0)
        subject.advance(output - 1)
        for request in subject.llm.engine.scheduler.running:
            assert request.pages == list(range(request.pages[0], request.pages[0] + len(request.pages)))


def test_crossover(run, folder, inline):
    words = f"--batch 1,2 --prompt-length 9 --output-length 101 --budgets 64 --turn 20 {CPU} --repeats 3"
    status, table, result, _ = run("crossover", "--model", folder, *words.split())
    assert status == 0 and [(r["batch"], r["label"]) for r in result["rows"]] == [
        (1, "beacon 64"),
        (2, "beacon 64"),
    ]
    for row in result["rows"]:
        assert row["lengths"] == [19, 39, 59, 79, 100]  # the prompt's step comes first, one is left over
        assert row["speedup"] == pytest.approx(sum(row["full_seconds"]) / sum(row["seconds"]))
        assert (
            row["kv_bytes"] == row["batch"] * 5 * 16 * SLOT
            and row["full_kv_bytes"] == row["batch"] * 7 * 16 * SLOT
        )
        assert row["evictions"] == row["batch"] * (1 + (100 - 64) // 8)
    assert "beacon 64" in table


def test_verdict_of_two_curves():
    lengths = [10, 20, 30, 40]
    found = crossover.verdict(lengths, full=[1, 2, 3, 4], budget=[2, 2, 2, 2])
    assert found == {
        "pays_in_total": 30,
        "pays_per_step": 30,
        "worst_cost": 1,
        "at_length": 10,
        "speedup": 10 / 8,
    }
    found = crossover.verdict(lengths, full=[1, 1, 1, 1], budget=[0.5, 1.5, 1.5, 1.5])
    assert found["pays_in_total"] is None and found["pays_per_step"] is None and found["at_length"] == 40
    assert crossover.verdict(lengths, [1, 1, 1, 1], [1, 1, 1, 1])["pays_in_total"] == 10


def test_fidelity_is_what_two_scores_say(run, folder, tmp_path):
    prompts, tokens, budget = [prompt_of(12), prompt_of(30, seed=1), prompt_of(7, seed=2)], 100, 64
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p}) for p in prompts) + "\n")
    words = f"--tokens {tokens} --budgets 64,80 --policies beacon,streaming --temperature 0 {CPU}"
    chart = tmp_path / "chart.html"
    words = [*words.split(), "--group", 2, "--prompts", file, "--plot", chart]
    status, table, result, _ = run("fidelity", "--model", folder, *words)
    assert status == 0 and result["n"] == 3
    assert [(r["policy"], r["budget"]) for r in result["rows"]] == [
        (p, b) for b in (64, 80) for p in ("beacon", "streaming")
    ]
    texts = LLM(folder, dtype="float32", device="cpu").generate(
        prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    )
    given = [output.token_ids for output in texts]
    seen = {}
    for name, eviction in (("full", {}), ("streaming", {"policy": "streaming", "budget": budget})):
        llm = LLM(folder, dtype="float32", device="cpu", **eviction)
        keep = lambda r, i, logits, name=name: seen.__setitem__((name, r, i), logits.double().log_softmax(-1))  # noqa: E731
        llm.score(prompts, given, on_logits=keep)
    after = range(budget + 1, tokens)
    for i in range(budget + 1):  # up to the first eviction nothing differs
        torch.testing.assert_close(seen["full", 0, i], seen["streaming", 0, i], atol=1e-4, rtol=1e-4)
    divergence, agreement, lost = [], [], []
    for r in range(3):
        pairs = [(seen["full", r, i], seen["streaming", r, i]) for i in after]
        divergence.append(sum((p.exp() * (p - q)).sum().item() for p, q in pairs) / len(after))
        agreement.append(sum(float(p.argmax() == q.argmax()) for p, q in pairs) / len(after))
        own = [(p - q)[given[r][i]].item() for i, (p, q) in zip(after, pairs, strict=True)]
        lost.append(sum(own) / len(after))
    row = result["rows"][1]
    assert row["positions"] == 3 * len(after)
    assert row["kl"]["mean"] == pytest.approx(sum(divergence) / 3, rel=2e-2) and row["kl"]["mean"] > 0
    assert row["agreement"]["mean"] == pytest.approx(sum(agreement) / 3, abs=1e-2)
    assert row["lost"]["mean"] == pytest.approx(sum(lost) / 3, rel=1e-2, abs=1e-4)
    assert min(divergence) - 1e-2 < row["kl"]["low"] <= row["kl"]["mean"] <= row["kl"]["high"]
    assert result["rows"][0]["kl_beyond_first"] == {"mean": 0, "low": 0, "high": 0}
    own_end = [ids.index(2) if 2 in ids else tokens - 1 for ids in given]
    assert result["after_own_end"] == pytest.approx(sum(tokens - 1 - i for i in own_end) / (3 * tokens))
    page = chart.read_text()
    assert page.startswith("<!doctype html>") and page.count("<polyline") == 3 * 2


def test_the_prompts_of_the_repository():
    lines = fidelity.Path(fidelity.__file__).with_name("prompts.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert (
        len({e["name"] for e in entries}) == len(entries) >= 8
        and min(len(e["prompt"]) for e in entries) > 300
    )


def test_presets_have_the_shapes_of_the_models(monkeypatch):
    shapes = {}
    for name in bench.PRESETS:
        with bench.settled(bench.parse("throughput", throughput, ["--preset", name])) as job:
            shapes[name] = read_config(job.model)
            assert (job.load, job.dtype) == ("dummy", "bfloat16")
    four, llama, seven = shapes["qwen3-4b"], shapes["r1-llama-8b"], shapes["r1-qwen-7b"]
    assert (
        four.num_layers * four.num_kv_heads * four.head_dim * 2 * 2 == 147456
    )  # bytes of a token, PAPER section 3
    assert four.qk_norm and four.tied and not llama.tied and seven.qkv_bias
    assert (llama.rope.kind, llama.rope.factor, llama.rope.original_max_position_embeddings) == (
        "llama3",
        8,
        8192,
    )


TINY = ("qwen3", 2, 32, 48, 4, 2, 8, 64, True, 4096, 1e4)


def test_table_4_at_a_small_scale(run, inline, monkeypatch):
    monkeypatch.setitem(bench.PRESETS, "qwen3-4b", TINY)
    monkeypatch.setattr(throughput, "GENERATED", 400)
    monkeypatch.setattr(
        throughput, "TABLE_4", [("full", None, 8, 82.3), ("rpc", 256, 16, 725.4), ("beacon", 256, 16, 704.8)]
    )
    words = f"--table4 --preset qwen3-4b --scale 4 --repeats 1 --prompt-length 8 {CPU}"
    status, table, result, _ = run("throughput", *words.split())
    assert (
        status == 0 and "704.8" in table and "8.56" in table
    )  # the paper's, and how many times its full cache
    got = [(r["label"], r["batch"], r["output_length"], r["paper"]) for r in result["rows"]]
    assert got == [("full", 2, 100, 82.3), ("rpc 64", 4, 100, 725.4), ("beacon 64", 4, 100, 704.8)]


def test_max_batch_is_what_fits_into_the_memory_given(run, inline, monkeypatch):
    monkeypatch.setitem(bench.PRESETS, "smollm2-135m", TINY)
    words = "--max-batch --memory 0.0005 --prompt-length 8 --output-length 120 --budgets 64 --repeats 1"
    words += " --device cpu"
    status, _, result, _ = run("throughput", *words.split())
    assert status == 0
    vector = 2 * (8 * 2 + 2)  # layers, head dim in bf16, half a position each for key and value
    full, beacon = result["rows"]
    assert full["batch"] == int(500_000 // (9 * 16 * 2 * 2 * vector))
    assert beacon["batch"] == int(500_000 // (6 * 16 * 2 * 2 * vector + 32 * 4 * vector)) > full["batch"]
    assert run("throughput", *words.replace("0.0005", "1e-6").split())[0] == 2


def test_the_tour(run, folder, inline, monkeypatch, tmp_path):
    import nanobeacon.reasoner as reasoner

    monkeypatch.setattr(reasoner, "folder", lambda: tmp_path)
    status, _, _, err = run()
    assert status == 2 and "config.json" in err and err.count("\n") == 1
    monkeypatch.setattr(reasoner, "folder", lambda: fidelity.Path(folder))
    line = "throughput --model {reasoner} --batch 2 --output-length 8 --repeats 1 " + CPU
    monkeypatch.setattr(bench, "TOUR", (line,))
    status, table, result, _ = run()
    assert status == 0 and result["parts"][0]["bench"] == "throughput"
    assert all(name in table for name in bench.COMMANDS if name != "tour")


def test_host_times_whole_decode_steps_with_a_stand_in(run):
    status, table, result, _ = run("host", "--batches", "1,3", "--steps", "20", "--budget", "64")
    assert status == 0 and "us a request" in table
    seen = [(row["batch"], row["budget"], row["sampling"]) for row in result["rows"]]
    assert seen == [(b, k, s) for b in (1, 3) for k in (None, 64) for s in ("greedy", "sampled")]
    for row in result["rows"]:
        assert 0 < row["n"] <= 20 and row["request_us"] == pytest.approx(1000 * row["step_ms"] / row["batch"])


@pytest.mark.parametrize(
    "words, said",
    [
        ("teleport", "choose from"),
        ("throughput --no-such-option", "--help"),
        ("throughput --preset gpt5", "smollm2-135m"),
        ("throughput --batch 0", "at least 1"),
        ("throughput --batch two", "batch"),
        ("throughput --output-length 1", "at least 2"),
        ("throughput --repeats 0", "at least 1"),
        ("throughput --budgets 8", "smallest budget"),
        ("throughput --policies best", "random-query"),
        ("throughput --shared-prefix 65", "0 to 64"),
        ("throughput --shared-prefix -1", "0 to 64"),
        ("throughput --no-prefix-cache", "only --shared-prefix"),
        ("throughput --table4 --shared-prefix 4", "nothing in common"),
        ("prefix --turns 0", "at least 1"),
        ("host --steps 0", "at least 1"),
        ("host --batches 14,0", "at least 1"),
        ("prefix --requests 0", "at least 1"),
        ("throughput --vs vllm", "transformers"),
        ("throughput --threads 0", "1 to"),
        ("throughput --threads 100000", "1 to"),
        ("throughput --table4 --scale 512 --preset smollm2-135m", "--scale 512 is too large: budget=4"),
        ("kernels --roofline --plot chart.svg", "--plot"),
        ("fidelity --model FOLDER --prompts /dev/null", "it is empty; an object with prompt"),
        ("throughput --table4 --scale 0", "at least 1"),
        ("throughput --table4 --budgets 64", "--budgets: Table 4"),
        ("throughput --table4 --output-length 64", "--output-length: Table 4"),
        ("throughput --policies full --budgets 64", "--budgets: none of"),
        ("throughput --device foo", "on this machine auto, cpu"),
        ("kernels --device foo", "on this machine auto, cpu"),
        ("kernels --roofline --device cpu", "--device: what"),
        ("crossover --policies full", "a policy that evicts"),
        ("crossover --budgets 400 --output-length 400", "400 output tokens never reach it"),
        ("throughput --scale 2", "--scale: only --table4"),
        ("throughput --scale 0", "--scale: only --table4"),
        ("throughput --memory 0", "--memory: only --max-batch"),
        ("accuracy --temperature 0", "--temperature: only for --problems"),
        ("throughput --memory 2", "--memory: only --max-batch"),
        ("throughput --max-batch --vs transformers", "--vs: --max-batch"),
        ("throughput --max-batch --memory 0", "--memory 0.0: a number of GB"),
        ("throughput --max-batch --memory -1", "--memory -1.0: a number of GB"),
        ("throughput --max-batch --memory inf", "--memory inf: a number of GB"),
        ("throughput --dtype float16 --device cpu", "--dtype float16: a CPU"),
        ("throughput --budgets 64,many", "'64,many': values between commas"),
        ("throughput --model /no/such/folder", "/no/such/folder"),
        ("throughput --plot chart.png", ".svg"),
        ("throughput --plot /no/such/folder/chart.svg", "folder"),
        ("crossover --turn 0", "at least 1"),
        ("crossover --model FOLDER --output-length 4000 --batch 1 --prompt-length 9", "2048"),
        (
            "crossover --model FOLDER --output-length 1000 --batch 1 --prompt-length 2000",
            "output_length=1000",
        ),
        ("fidelity", "--model"),
        ("fidelity --model FOLDER --budgets 64 --tokens 65", "first eviction"),
        ("fidelity --model FOLDER --group 0", "at least 1"),
        ("fidelity --model FOLDER --limit 0", "at least 1"),
        ("throughput --no-cuda-graphs --device cpu", "--no-cuda-graphs: a CPU"),
        ("throughput --no-overlap --device cpu", "--no-overlap: on a CPU"),
        ("accuracy --policies full --budgets 64", "--budgets: none of"),
        ("accuracy --policies full --protect 4", "--protect: none of"),
        ("accuracy --policies streaming --budgets 48 --window 20", "--window: no row"),
        ("accuracy --budgets 48 --windows 16 --window 24", "--window: no row"),
        ("accuracy --n 0", "at least 1"),
        ("accuracy --batch 0", "at least 1"),
        ("accuracy --paper", "--paper: only for --problems"),
        ("accuracy --temperature 0.5", "--temperature: only for --problems"),
        ("accuracy --problems file.jsonl --model FOLDER --length 96", "--length: only the reasoner's"),
        ("accuracy --problems file.jsonl --model FOLDER --teacher-forced", "--teacher-forced: only"),
        ("accuracy --model FOLDER --policies full --length 96", "--problems FILE is for it"),
        ("fidelity --model FOLDER --prompts /no/such/file", "/no/such/file"),
        ("fidelity --model FOLDER", "tokenizer"),
    ],
)
def test_mistakes_get_one_line_and_status_2(words, said, folder, inline, capsys):
    try:
        status = bench.main([folder if word == "FOLDER" else word for word in words.split()])
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert status == 2 and said in err and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_an_output_that_cannot_be_written_is_one_line():
    words = [sys.executable, "bench.py", "kernels", "--roofline"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, cwd=os.path.dirname(bench.__file__)
        )
    assert ended.returncode == 1 and ended.stderr.startswith("bench.py: ") and ended.stderr.count("\n") == 1


def test_the_end_of_a_pipe_is_silent():
    command = f"{sys.executable} bench.py kernels --roofline | head -c 5"
    ended = subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=os.path.dirname(bench.__file__)
    )
    assert (ended.stdout, ended.stderr) == ("kerne", "")


def test_ctrl_c_while_torch_is_imported_is_status_130():
    words = [sys.executable, "-X", "importtime", "bench.py", "kernels", "--roofline"]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=os.path.dirname(bench.__file__),
        # a suite that was started in the background ignores Ctrl-C, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    lines = iter(process.stderr.readline, "")
    assert any(line.split("|")[-1].strip().startswith("torch.") for line in lines)
    process.send_signal(signal.SIGINT)
    rest = process.communicate()[1]
    assert process.returncode == 130 and "Traceback" not in rest


def test_a_worker_ends_with_a_parent_that_is_killed():
    code = "from nanobeacon.measure.common import Worker\n"
    code += "with Worker('a module', 1, __import__, 'time') as worker:\n"
    code += "  print(worker._process.pid, flush=True)\n  worker.call('sleep', 600)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_workers_failures_are_told_apart(capfd):
    with common.Worker("a dict", 1, dict, {"x": 42}) as worker:
        assert worker.call("get", "x") == 42
        with pytest.raises(RuntimeError, match="a dict: KeyError: 'lost'"):
            worker.call("pop", "lost")
        with pytest.raises(ValueError, match="length 3"):  # a user's mistake, as far as a worker can know
            worker.call("update", [(1, 2, 3)])
        assert worker.call("get", "x") == 42
    with pytest.raises(RuntimeError, match="dying: killed: status 3"), common.Worker("dying", 1, os._exit, 3):
        pass


def test_intervals_hold_the_mean_and_shrink():
    few, many = common.bootstrap([0, 1, 2, 3]), common.bootstrap([0, 1, 2, 3] * 25)
    assert few["mean"] == many["mean"] == 1.5
    assert 0 <= few["low"] < many["low"] < 1.5 < many["high"] < few["high"] <= 3
    assert common.bootstrap([2.0]) == {"mean": 2, "low": 2, "high": 2}


def test_charts_escape_names_and_survive_odd_numbers():
    series = {"a<b": [(64, 0.5, 0.4, 0.6), (128, 0.5, 0.5, 0.5)], "&": [(64, 0.0)]}
    for log in (False, True):
        ElementTree.fromstring(plots.figure([plots.lines("t", "x", "y", series, log_x=True, log_y=log)]))
    odd = [plots.lines("t", "x", "y", {"one": [(1, 0)]}), plots.rows("t", "y", {"g": {"n": (0,)}})]
    ElementTree.fromstring(plots.figure(odd))


def test_a_shared_prefix_is_measured_without_and_with_the_cache(run, inline, folder):
    words = f"--model {folder} --policies full --batch 3 --prompt-length 40 --output-length 4 --repeats 1"
    status, table, result, _ = run("throughput", *words.split(), "--shared-prefix", 32, *CPU.split())
    assert status == 0 and "full, prefix cache" in table
    assert [row["label"] for row in result["rows"]] == ["full", "full, prefix cache"]
    words += " --no-prefix-cache"
    result = run("throughput", *words.split(), "--shared-prefix", 32, *CPU.split())[2]
    assert [row["label"] for row in result["rows"]] == ["full"]


@pytest.mark.parametrize("budget", [None, 40])
def test_prefix_counts_what_is_not_computed(run, folder, budget):
    words = f"--model {folder} --prompt-length 20 --output-length 8 --turns 3 --requests 20 --header 600"
    under = ["--budget", budget] if budget else []
    status, table, result, _ = run("prefix", *words.split(), *under, "--repeats", 1, *CPU.split())
    assert status == 0 and "times as fast" in table
    turns = result["turns"]
    assert [turn["without_computed"] for turn in turns] == [turn["prompt"] for turn in turns] == [20, 48, 76]
    found = [turn["without_computed"] - turn["with_computed"] for turn in turns]
    # Of 27 and 55 tokens computed so far whole pages are found; under a budget only whole chunks of 512.
    assert found == ([0, 16, 48] if budget is None else [0, 0, 0])
    (header,) = result["header"]
    assert header["without_computed"] == 20 * 602
    # The first step takes some requests together; all others find the header.
    assert header["with_computed"] < header["without_computed"] / 2
    assert result["lookup_ms"] > 0
