"""A file of prompts: every line is answered once, whatever happens to other lines or to the program."""

import json

import pytest
from tiny import text_folder

import generate
from nanobeacon import LLM, SamplingParams, batchfile

GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("model"), eos=False)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), dtype="float32", max_num_seqs=3)


@pytest.fixture
def files(tmp_path):
    """Writes lines (objects, or bytes as they are) as the input; gives input and output."""

    def make(*lines):
        content = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        (tmp_path / "in.jsonl").write_bytes(b"\n".join(content))
        return tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    return make


def read(output):
    return [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n")[:-1]]


def by_line(output):
    entries = read(output)
    assert len({entry["line"] for entry in entries}) == len(entries), "a line was answered twice"
    return {entry["line"]: entry for entry in entries}


def test_every_line_gets_what_it_gets_alone(llm, files):
    source, output = files(
        {"id": "a", "prompt": "one", "max_tokens": 9},
        b"",
        {"prompt": [5, 6, 7], "n": 2, "temperature": 0.9, "seed": 3},
        {"id": 4, "messages": [{"role": "user", "content": "hello"}]},
        {"prompt": "four", "logprobs": 1},
    )
    outcome = batchfile.answer_file(llm, source, output, GREEDY)
    assert (outcome.answered, outcome.failed, outcome.skipped) == (4, 0, 0)
    found = by_line(output)
    assert [found[n].get("id") for n in (1, 3, 4, 5)] == ["a", None, 4, None]
    (alone,) = llm.chat([{"role": "user", "content": "one"}], SamplingParams(max_tokens=9, temperature=0))
    assert found[1]["completions"] == [
        {"text": alone.text, "token_ids": alone.token_ids, "finish_reason": "length"}
    ]
    drawn = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, n=2, temperature=0.9, seed=3))
    assert [c["token_ids"] for c in found[3]["completions"]] == [o.token_ids for o in drawn]
    (answer,) = llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    assert found[4]["completions"][0]["text"] == answer.text
    assert len(found[5]["completions"][0]["logprobs"]) == 6


def test_lines_are_written_as_requests_end(llm, files):
    source, output = files({"prompt": "x", "max_tokens": 40}, {"prompt": "y", "max_tokens": 2})
    batchfile.answer_file(llm, source, output, GREEDY)
    assert [entry["line"] for entry in read(output)] == [2, 1]


BAD = {
    "no JSON": (b"{", "is not as it has to be"),
    "no object": (b"[1]", "an object is possible"),
    "no text": (b'{"prompt": "\xff"}', "is not as it has to be"),
    "deep": (b"[" * 100_000, "is not as it has to be"),
    "nothing to do": ({"id": "x"}, "one of prompt and messages"),
    "both": ({"prompt": "a", "messages": []}, "one of prompt and messages"),
    "unknown field": ({"prompt": "a", "max_token": 4}, "'max_token' is unknown"),
    "bad value": ({"prompt": "a", "temperature": -1}, "temperature=-1"),
    "bad id": ({"id": [1], "prompt": "a"}, "id"),
    "surrogate": ({"prompt": "\ud800"}, "UTF-8"),
    "surrogate id": ({"id": "\ud800", "prompt": "a"}, "surrogates"),
    "no message": ({"messages": [1]}, "role"),
    "too long": ({"prompt": [5] * 5000}, "5000 prompt tokens"),
    "no token": ({"prompt": [10**9]}, "token id 1000000000"),
    "number": ({"prompt": 5}, "prompts"),
    "same id": ({"id": "good", "prompt": "a"}, "also that of line 1"),
}


def test_a_bad_line_is_its_own_error_and_the_others_go_on(llm, files):
    bad = list(BAD.values())
    source, output = files(
        {"id": "good", "prompt": "a"}, *(content for content, _ in bad), {"prompt": "last"}
    )
    outcome = batchfile.answer_file(llm, source, output, GREEDY)
    assert (outcome.answered, outcome.failed) == (2, len(bad))
    found = by_line(output)
    for number, (_, words) in enumerate(bad, 2):
        assert words in found[number]["error"] and "completions" not in found[number]
    again = batchfile.answer_file(llm, source, output, GREEDY)
    assert (again.answered, again.failed, again.skipped) == (0, 0, len(bad) + 2)


@pytest.mark.parametrize("cut", [0, 1, 9, 30, -1])
def test_a_rerun_answers_what_is_missing_and_the_line_that_a_crash_cut(llm, files, cut, capsys):
    prompts = [{"id": f"p{i}", "prompt": "x" * (i + 1)} for i in range(4)]
    source, output = files(*prompts)
    batchfile.answer_file(llm, source, output, GREEDY)
    whole = by_line(output)
    lines = output.read_bytes().split(b"\n")[:-1]
    output.write_bytes(
        lines[0] + b"\n" + lines[1] + b"\n" + lines[2][: len(lines[2]) - 1 if cut < 0 else cut]
    )
    outcome = batchfile.answer_file(llm, source, output, GREEDY)
    assert (outcome.answered, outcome.skipped) == (2, 2)
    assert "holds 2 of 4 lines already: skipped" in capsys.readouterr().err
    assert by_line(output) == whole


@pytest.mark.parametrize("content", ["my notes", "my notes\n", "[]\n", '{"a": 1}\n', "7\n", '{"a'])
def test_a_file_of_somebody_elses_is_refused_and_left_alone(llm, files, content):
    source, output = files({"prompt": "a"})
    output.write_text(content)
    with pytest.raises(ValueError, match="out.jsonl, line 1 is none of this program's"):
        batchfile.answer_file(llm, source, output, GREEDY)
    assert output.read_text() == content


def test_the_prompts_are_never_overwritten(llm, files):
    source, _ = files({"prompt": "a"})
    with pytest.raises(ValueError, match="another file than the prompts'"):
        batchfile.answer_file(llm, source, source, GREEDY)


def test_ctrl_c_keeps_what_has_ended_and_the_next_run_goes_on(llm, files, monkeypatch):
    source, output = files(*({"prompt": "x", "max_tokens": 3 * i + 1} for i in range(5)))
    step, steps = llm.engine.step, []

    def stopped():
        steps.append(1)
        if len(steps) == 9:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", stopped)
    outcome = batchfile.answer_file(llm, source, output, GREEDY)
    assert outcome.interrupted and 0 < outcome.answered < 5
    assert len(read(output)) == outcome.answered
    assert not llm.engine.scheduler.waiting and not llm.engine.scheduler.running
    rest = batchfile.answer_file(llm, source, output, GREEDY)
    assert (rest.answered, rest.skipped) == (5 - outcome.answered, outcome.answered)
    assert sorted(by_line(output)) == [1, 2, 3, 4, 5]


def test_the_command_line(folder, files, capsys):
    source, output = files({"prompt": "a"}, {"prompt": "b", "n": 0})
    command = ["--model", str(folder), "--prompts-file", str(source), "--output", str(output)]
    command += ["--max-tokens", "3", "--max-num-seqs", "2"]
    assert generate.main(command) == 1
    assert "1 lines answered, 1 failed, 0 skipped" in capsys.readouterr().err
    assert generate.main(command) == 0
    assert "0 lines answered, 0 failed, 2 skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, words",
    {
        "--prompts-file {in}": "each needs the other",
        "--prompt x --output o": "each needs the other",
        "--prompts-file {in} --output o --json": "--json",
        "--prompts-file /no/such --output o": "/no/such cannot be read",
        "--prompts-file {in} --output /no/such/o": "/no/such/o cannot be written",
        "--prompts-file {in} --output o --max-num-seqs 0": "--max-num-seqs 0: at least 1",
    }.items(),
)
def test_a_users_mistake_is_one_line(options, words, folder, files, capsys):
    source, _ = files({"prompt": "a"})
    command = options.replace("{in}", str(source)).split()
    assert generate.main(["--model", str(folder), *command]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("generate.py: ") and words in last
