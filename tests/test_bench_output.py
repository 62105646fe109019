"""Where bench.py's numbers go: table, JSON object, files, bars on stderr; and the threads it uses."""

import io
import json
import os
import pty
import subprocess
import sys
from functools import partial

import pytest
import torch
from tiny import prompt_of, tiny_folder

import bench
from nanobeacon import progress, threads
from nanobeacon.measure import common

ROOT = os.path.dirname(bench.__file__)
TOY = "--n 1 --length 80 --budgets 32,40 --policies full,beacon --device cpu --dtype float32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture(autouse=True)
def torch_keeps_its_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def on_a_terminal(monkeypatch, capsys):
    """Standard output as a terminal, for bench.py in this process."""
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)


def accuracy(*words):
    return bench.main(["accuracy", *TOY.split(), *map(str, words)])


# --- the JSON object ---


def test_a_pipe_gets_the_json_object_as_last_line(capsys):
    assert accuracy() == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["bench"] == "accuracy" and not any(line.startswith("{") for line in table)


def test_a_terminal_gets_the_table_alone(on_a_terminal, capsys):
    assert accuracy() == 0
    out = capsys.readouterr().out
    assert "beacon" in out and "{" not in out


def test_a_terminal_gets_the_json_object_where_it_is_asked_for(on_a_terminal, capsys):
    assert accuracy("--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["n"] == 1


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_file_holds_the_json_object_in_any_case(more, on_a_terminal, capsys, tmp_path):
    file = tmp_path / "numbers.json"
    file.write_text("what an earlier run left, and that is longer than nothing")
    assert accuracy("--output", file, *more) == 0
    assert json.loads(file.read_text())["rows"][1]["policy"] == "beacon"
    assert file.read_text().count("\n") == 1
    assert ("{" in capsys.readouterr().out) == bool(more)


def test_the_tour_has_the_options_too(monkeypatch, on_a_terminal, capsys, tmp_path):
    monkeypatch.setattr(bench, "TOUR", (f"accuracy {TOY}",))
    file = tmp_path / "tour.json"
    assert bench.main(["tour", "--output", str(file)]) == 0
    out = capsys.readouterr().out
    assert "There is more" in out and "{" not in out
    assert [part["bench"] for part in json.loads(file.read_text())["parts"]] == ["accuracy"]
    assert bench.main(["tour", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bench"] == "tour"


def test_a_real_terminal(tmp_path):
    """On a pseudo-terminal there is no JSON; the file has it."""
    file = tmp_path / "numbers.json"
    ours, theirs = pty.openpty()
    words = [sys.executable, "bench.py", "kernels", "--roofline", "--output", str(file)]
    process = subprocess.Popen(words, stdout=theirs, stderr=theirs, cwd=ROOT)
    os.close(theirs)
    seen = b""
    while chunk := read(ours):
        seen += chunk
    os.close(ours)
    assert process.wait() == 0
    lines = seen.decode().splitlines()
    assert max(map(len, lines)) <= common.WIDTH and not any("{" in line for line in lines)
    assert any("decode attention" in line for line in lines)
    assert json.loads(file.read_text())["bench"] == "kernels"


def read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


# --- files ---


def without_reader(*words):
    """bench.py with a standard output that nobody reads any more: (status, stderr)."""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "bench.py", *words]
    ended = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(theirs)
    return ended.returncode, ended.stderr


def test_files_are_written_also_when_nobody_reads_the_table(tmp_path):
    chart = tmp_path / "chart.svg"
    numbers = tmp_path / "numbers.json"
    words = ["accuracy", *TOY.split(), "--plot", str(chart), "--output", str(numbers)]
    assert without_reader(*words) == (0, "")
    assert "<polyline" in chart.read_text() and json.loads(numbers.read_text())["rows"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_file_that_cannot_be_written_costs_no_numbers(tmp_path):
    words = [sys.executable, "bench.py", "kernels", "--roofline", "--output", "/dev/full"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 1 and ended.stderr.startswith("bench.py: ") and ended.stderr.count("\n") == 1
    assert json.loads(ended.stdout.splitlines()[-1])["bench"] == "kernels"


@pytest.mark.parametrize(
    "words, says",
    [
        ("--output /no/such/folder/x.json", "--output /no/such/folder/x.json: a file in an existing folder"),
        ("--output FOLDER", "a file in an existing folder"),
        ("--plot /no/such/folder/x.svg", "--plot /no/such/folder/x.svg: a file in an existing folder"),
        ("--plot chart.pdf", "a .svg or .html file"),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_anything_runs(words, says, folder, capsys):
    assert accuracy(*(folder if word == "FOLDER" else word for word in words.split())) == 2
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and not out


# --- tables ---


def test_a_wide_table_is_cut_and_each_part_tells_its_rows_apart():
    head = ["policy", "budget", *(f"a number called {i}" for i in range(12))]
    rows = [
        [policy, budget, *(f"{i}.{budget}" for i in range(12))]
        for policy in ("beacon", "recent")
        for budget in (64, 128)
    ]
    text = common.columns(head, rows)
    tables = [part.splitlines() for part in text.split("\n\n")]
    assert len(tables) == 3 and max(map(len, text.splitlines())) <= common.WIDTH
    for table in tables:
        assert [line.split()[:2] for line in table[2:]] == [[row[0], str(row[1])] for row in rows]
    shown = [word for table in tables for word in table[2].split()[2:]]
    assert shown == [f"{i}.64" for i in range(12)]  # each number once, in order


def test_a_table_that_fits_stays_whole():
    text = common.columns(["name", "n"], [["a", None], ["b", 12]])
    assert text == "name   n\n----  --\na      -\nb     12"


def test_a_cell_that_fits_nowhere_is_broken_into_lines():
    words = " ".join(f"kernel {i}," for i in range(40))
    text = common.columns(["pass", "most"], [["decode", words], ["eviction", "one"]])
    assert max(map(len, text.splitlines())) <= common.WIDTH
    lines = text.splitlines()[2:]
    assert " ".join(line[10:].strip() for line in lines[:-1]) == words
    assert lines[0].startswith("decode    kernel 0,") and lines[-1] == "eviction  one"


def test_sentences_are_broken_and_words_stay_whole():
    path = "/a/" * 50
    text = common.fitted(f"short\n{'word ' * 40}\n{path}")
    assert max(len(line) for line in text.splitlines() if line != path) <= common.WIDTH
    assert text.splitlines()[0] == "short" and text.splitlines()[-1] == path


@pytest.mark.parametrize(
    "words",
    [
        "kernels --roofline",
        f"accuracy {TOY} --policies full,beacon,snapkv --protect prompt,4",
        "fidelity --model FOLDER --prompts PROMPTS --tokens 90 --budgets 64 --policies beacon,random-query",
        "prefix --model FOLDER --prompt-length 20 --output-length 4 --turns 2 --requests 2 --repeats 1",
    ],
)
def test_what_is_printed_fits_100_columns(words, folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": prompt_of(9, seed=i)}) for i in range(2)))
    given = {"FOLDER": folder, "PROMPTS": str(prompts)}
    assert bench.main([given.get(word, word) for word in words.split()]) == 0
    *lines, _ = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100


def test_the_widest_table_of_throughput_fits_100_columns():
    from nanobeacon.measure import throughput

    rate = {"median": 12345.6, "low": 11111.1, "high": 13333.3}
    row = {"label": "beacon 2048, prefix cache", "system": "nanobeacon", "batch": 320, "paper": 1345.9}
    row |= {"prefill_tokens_per_second": rate, "decode_tokens_per_second": rate}
    row |= {name: [12345.6] for name in ("step_ms_start", "step_ms_end", "kv_bytes", "memory_bytes")}
    row |= {"evictions": [100], "eviction_seconds": [1.0], "decode_seconds": [9.0]}
    row["ratios"] = {"transformers": rate, "kvpress snapkv 2048": rate}
    table = throughput.table({"rows": [row, row | {"label": "full"}]})
    assert max(map(len, table.splitlines())) <= 100 and "paper tok/s" in table


# --- bars ---


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind, shown", [(Terminal, True), (io.StringIO, False)])
def test_fidelity_shows_a_bar_while_it_writes_its_texts(kind, shown, folder, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": prompt_of(9, seed=i)}) for i in range(3)))
    stderr = kind()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "DELAY", 0)
    # however fast the machine is, each step is shown
    monkeypatch.setattr(progress, "tqdm", partial(progress.tqdm, mininterval=0))
    words = f"fidelity --model {folder} --prompts {prompts} --tokens 70 --budgets 64 --policies beacon"
    assert bench.main([*words.split(), "--device", "cpu", "--dtype", "float32"]) == 0
    said = stderr.getvalue()
    assert bool(said) == shown
    if shown:
        assert "tokens written" in said and "tokens/s" in said and "/3 " in said and "replay" in said


# --- threads ---


@pytest.fixture
def two_threads(monkeypatch):
    for name in threads.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)


def threads_used(capsys, *words):
    assert bench.main([str(word) for word in words]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    return [part["threads"] for part in result.get("parts", [result])], torch.get_num_threads()


def test_the_reasoner_runs_on_one_thread(two_threads, capsys):
    assert threads_used(capsys, "accuracy", *TOY.split()) == ([1], 1)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_the_users_word_on_threads_counts(two_threads, capsys, monkeypatch):
    assert threads_used(capsys, "accuracy", *TOY.split(), "--threads", 2) == ([2], 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_used(capsys, "accuracy", *TOY.split()) == ([2], 2)


def test_every_part_of_the_tour_runs_on_one_thread(two_threads, capsys, monkeypatch, folder):
    from test_bench import Inline

    from nanobeacon.measure import systems

    given = []
    monkeypatch.setattr(systems, "Worker", lambda *given_to: given.append(given_to[1]) or Inline(*given_to))
    line = f"throughput --model {folder} --batch 2 --output-length 4 --repeats 1 --device cpu --dtype float32"
    monkeypatch.setattr(bench, "TOUR", (line, f"accuracy {TOY}"))
    assert threads_used(capsys) == ([1, 1], 1)
    assert set(given) == {1}  # the processes of throughput too


def test_a_model_of_some_size_keeps_torchs_threads(two_threads):
    from nanobeacon.measure import throughput

    for words, expected in (("--preset smollm2-135m", 2), ("--preset qwen3-4b", 2)):
        options = bench.parse("throughput", throughput, words.split())
        with bench.settled(options) as job:
            assert bench.set_threads(job) == expected


def test_kernels_have_no_model_and_keep_torchs_threads(two_threads, capsys):
    assert threads_used(capsys, "kernels", "--roofline") == ([2], 2)
    assert threads_used(capsys, "kernels", "--roofline", "--threads", 1) == ([1], 1)
