"""bench.py gpu at toy size on a CPU: every part runs, one that fails takes no other along."""

import time

import pytest
from test_bench import CPU, Inline, run  # noqa: F401
from tiny import tiny_folder

from nanobeacon.measure import common, gpu, systems

SUITE = """
import pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("n", [1, 2])
def test_right(n): pass

def test_wrong(): raise ValueError("two and two")

@pytest.mark.skip
def test_absent(): pass
"""
SLOW = """
import pytest, time
pytestmark = pytest.mark.gpu

def test_quick(): pass

def test_slow(): time.sleep(60)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("model"), "qwen3"))


@pytest.fixture
def inline(monkeypatch):
    for module in (systems, gpu):
        monkeypatch.setattr(module, "Worker", Inline)


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """A small test suite in the place of the project's."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\nmarkers =\n    gpu: it\n")
    (tmp_path / "test_small.py").write_text(SUITE)
    monkeypatch.setattr(gpu, "TESTS", tmp_path)
    return tmp_path / "test_small.py"


WORDS = f"--scale 16 --memory 0.002 --threads 1 {CPU}"


def test_every_part_runs_at_toy_size(run, folder, inline, suite, monkeypatch):  # noqa: F811
    monkeypatch.setattr(gpu, "GENERATED", 4096)
    monkeypatch.setattr(gpu, "PROFILES", ((14, 2048),))
    status, table, result, err = run("gpu", "--model", folder, *WORDS.split())
    assert status == 0, err
    ended = {row["part"]: row["outcome"] for row in result["parts"]}
    assert ended == dict.fromkeys(gpu.PARTS, "done") | {"graphs": "not here: cpu"}
    assert result["tests"]["counts"] == {"passed": 2, "failed": 1, "skipped": 1}
    assert result["tests"]["wrong"] == ["test_small.py::test_wrong"]
    assert result["bandwidth"]["bytes_per_second"] > 1e8
    assert {"scores", "compact", "decode attention"} <= {row["kernel"] for row in result["kernels"]}
    (profiled,) = result["profile"]
    assert profiled["launches_a_step"] > 20 and profiled["most"][0]["a_step"] >= 1
    assert profiled["busy_ms_a_step"] > 0 and profiled["budget"] == 128
    assert [row["budget"] for row in result["largest"]] == [128, 64]
    assert result["largest"][1]["batch"] > result["largest"][0]["batch"] > 1
    found = [(row["policy"], row["budget"], row["batch"]) for row in result["table4"]]
    assert found[0] == ("full", None, 1) and found[3] == ("beacon", 128, 12) and len(found) == 7
    for row in result["table4"]:
        assert row["tokens_per_s"] > 0 and row["of_floor"] > 0
        assert row["steps"] == (gpu.TIMED if row["budget"] is None else row["budget"] // 4)
        # At the budget, and after each of the two periods.
        assert row["evictions"] == (0 if row["budget"] is None else 3 * row["batch"])
        assert 0 <= row["eviction_share"] < 1
    assert "704.8" in table and "test_wrong" in table and "a copy reads" in table


def test_a_part_that_fails_takes_no_other_along(run, folder, inline, monkeypatch, capsys):  # noqa: F811
    def lost(*_):
        raise ZeroDivisionError("the device is gone")

    monkeypatch.setattr(gpu.kernels, "timings", lost)
    row = gpu._row

    def one_row_fails(system, job, until):
        if system.policy != "rpc":
            raise RuntimeError("out of memory")
        return row(system, job, until)

    monkeypatch.setattr(gpu, "_row", one_row_fails)
    words = ["gpu", "--model", folder, *WORDS.split(), "--parts", "kernels,table4,bandwidth"]
    options = gpu_options(words)
    found = gpu.run(options)
    assert [row["outcome"] for row in found["parts"]] == [
        "failed: ZeroDivisionError: the device is gone", "done", "done",
    ]  # fmt: skip
    assert [("error" in row) for row in found["table4"]] == [True, True, False, True, False, True, True]
    assert "of_floor" not in found["table4"][2]  # the copy's rate was not known yet
    assert "the device is gone" in gpu.table(found)
    assert run(*words)[0] == 1  # and the status says it


def gpu_options(words):
    import bench

    options = bench.parse("gpu", gpu, words[1:])
    with bench.settled(options) as job:
        return job


def test_what_comes_too_late_is_left_out(folder, inline, suite):
    options = gpu_options(["gpu", "--model", folder, *WORDS.split(), "--minutes", "1e-6"])
    found = gpu.run(options)
    assert [row["part"] for row in found["parts"]] == list(gpu.PARTS)
    assert all("minutes were over" in row["outcome"] for row in found["parts"][1:])


def test_tests_that_are_too_slow_are_told_as_far_as_they_came(suite):
    suite.write_text(SLOW)
    found = gpu.tests(None, {}, time.monotonic() + 5)
    assert found["counts"] == {"passed": 1} and not found["in_time"]


def test_a_worker_that_does_not_answer_in_time_is_given_up():
    worker = common.Worker("slow", 1, gpu.Call, time.sleep, 60)
    worker.deadline = time.monotonic() + 15
    with pytest.raises(RuntimeError, match="slow: its time was over"), worker:
        worker.deadline = time.monotonic() + 0.1
        worker.call("result")
    assert not worker._process.is_alive()


def test_busy_times_and_gaps_of_a_trace():
    def event(cat, name, begin, duration):
        return {"cat": cat, "name": name, "ts": begin, "dur": duration}

    events = [
        event("kernel", "a", 100, 10),
        event("kernel", "b", 105, 10),  # at the same time on another stream
        event("gpu_memcpy", "copy", 120, 5),
        event("kernel", "a", 135, 15),
    ]
    found = gpu.summary(events, steps=2)
    assert found["launches_a_step"] == 1.5 and found["copies_a_step"] == 0.5
    assert found["busy_ms_a_step"] == round((15 + 5 + 15) / 2 / 1e3, 3)
    assert found["gap_ms_a_step"] == round((5 + 10) / 2 / 1e3, 3) and found["largest_gap_us"] == 10
    assert found["most"][0] == {"name": "a", "a_step": 1, "us_a_step": 12.5, "share": round(25 / 35, 3)}
    # Of operators the outermost count, not what they call.
    nested = [event("cpu_op", "linear", 0, 10), event("cpu_op", "mm", 2, 5), event("cpu_op", "add", 12, 1)]
    assert gpu.summary(nested, steps=1)["launches_a_step"] == 2


@pytest.mark.parametrize(
    "words, said",
    [
        ("gpu --device cpu", "--device cpu: these sizes need a GPU"),
        ("gpu --scale 0", "--scale 0: at least 1"),
        ("gpu --minutes 0", "--minutes 0.0: a number above 0"),
        ("gpu --minutes nan", "--minutes nan: a number above 0"),
        ("gpu --parts tests,speed", "possible are tests, bandwidth"),
        ("gpu --device cpu --scale 64", "--scale 64 is too large: budget=32"),
        ("gpu --repeats 3", "--repeats"),
        ("gpu --memory 0", "--memory 0.0: a number of GB"),
    ],
)
def test_mistakes_get_one_line_and_status_2(words, said, capsys):
    import bench

    try:
        status = bench.main(words.split())
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert status == 2 and said in err and err.count("\n") == 1
