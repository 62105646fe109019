"""Programs under torchrun: one voice, lines of a file dealt out, and what is left when a process dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import text_folder

import generate

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LONG = 700  # tokens of an answer in whose middle a process dies
SECONDS = 100  # that nothing here may take


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("model"), eos=False)


@pytest.fixture
def file_run(folder, tmp_path):
    """Options that answer four lines, of which two end at once; and the file of the answers."""
    lines = [{"prompt": "x", "max_tokens": 2}, {"prompt": "y", "max_tokens": 3}]
    lines += [{"prompt": "z", "max_tokens": LONG}, {"prompt": "u", "max_tokens": LONG + 1}]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    options = ["--model", str(folder), "--dtype", "float32", "--temperature", "0"]
    options += ["--prompts-file", str(source), "--output", str(tmp_path / "out.jsonl")]
    return options, tmp_path / "out.jsonl"


def start(options, program="generate.py"):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, program, *options]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def by_line(output):
    entries = [json.loads(line) for line in output.read_text().splitlines()]
    found = {entry["line"]: entry for entry in entries}
    assert len(found) == len(entries), "a line was answered twice"
    return found


def kill_rank(torchrun, rank):
    """End one of the processes that torchrun has started, as a lack of memory would."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    wanted = f"RANK={rank}".encode()
    (process,) = [int(c) for c in children if wanted in Path(f"/proc/{c}/environ").read_bytes().split(b"\0")]
    os.kill(process, signal.SIGKILL)


def test_one_prompt_has_one_answer_and_only_the_first_process_speaks(folder, capsys):
    options = ["--model", str(folder), "--dtype", "float32", "--temperature", "0", "--max-tokens", "40"]
    options += ["--budget", "24", "--window", "4", "--json"]
    process = start(options)
    printed, said = process.communicate("hello\n", timeout=SECONDS)
    assert process.returncode == 0, said
    (together,) = map(json.loads, printed.splitlines())
    assert said.count("tokens/s") == 2 and said.count("The answer was cut") <= 1
    assert generate.main([*options, "--prompt", "hello"]) == 0
    (alone,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert together.pop("stats")["evictions"] == alone.pop("stats")["evictions"] > 0
    assert together.pop("text") == alone.pop("text")
    assert together == alone


@pytest.mark.parametrize("how", ["--data-parallel", "--tensor-parallel=2"])
def test_a_dead_process_ends_the_run_and_what_is_finished_stays(file_run, how):
    options, output = file_run
    process = start([*options, how])
    began = time.monotonic()
    while not output.exists() or output.read_text().count("\n") < 2:
        assert process.poll() is None and time.monotonic() - began < SECONDS
        time.sleep(0.02)
    kill_rank(process, 1)
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert sorted(by_line(output)) == [1, 2], said


def test_two_processes_share_out_what_a_file_lacks(file_run):
    options, output = file_run
    assert generate.main(options) == 0
    alone = by_line(output)
    output.write_text("".join(json.dumps(alone[n]) + "\n" for n in (2, 3)))
    process = start([*options, "--data-parallel"])
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert "2 lines answered, 0 failed, 2 skipped" in said
    assert by_line(output) == alone


def test_throughput_is_measured_on_all_processes_of_torchrun(folder):
    options = ["throughput", "--model", str(folder), "--dtype", "float32", "--batch", "2", "--repeats", "1"]
    options += ["--prompt-length", "8", "--output-length", "50", "--budgets", "40", "--policies", "beacon"]
    process = start(options, "bench.py")
    printed, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert printed.count("2 processes on") == 1
    result = json.loads(printed.splitlines()[-1])
    assert result["processes"] == 2
    (row,) = result["rows"]
    assert row["evictions"][0] > 0
    # Two requests of 8 + 40 cached tokens, in two layers with one of the two KV heads: key, value, position
    pages = 2 * 3
    layers = 2
    heads = 1
    assert row["kv_bytes"] == [pages * 16 * layers * heads * (2 * 16 * 4 + 4)]


@pytest.mark.parametrize(
    "options, words",
    {
        "--tensor-parallel 2": "tensor_parallel is 2; with 1 processes it can be [1]; torchrun starts more",
        "--data-parallel": "--data-parallel: it shares out the lines of --prompts-file",
    }.items(),
)
def test_a_users_mistake_is_one_line(folder, options, words, capsys):
    assert generate.main(["--model", str(folder), "--prompt", "a", *options.split()]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"generate.py: {words}"
