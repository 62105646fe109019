"""bench.py accuracy: fair grades, every flag at toy size, files gone on with, and the reasoner's order."""

import io
import json
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import prompt_of, text_folder, tiny_folder

from nanobeacon import LLM, SamplingParams
from nanobeacon.measure import accuracy, plots, selections
from nanobeacon.measure.grading import answer_in, is_right, normalise
from nanobeacon.policies import POLICIES
from nanobeacon.reasoner import demo, folder, task

needs_reasoner = pytest.mark.skipif(
    not (folder() / "config.json").exists(), reason="the reasoner's checkpoint is not in the package"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model that writes noise in the reasoner's words."""
    folder = tmp_path_factory.mktemp("model")
    return tiny_folder(folder, "qwen3", num_hidden_layers=1, vocab_size=len(task.WORDS))


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """A random model that writes noise as text."""
    return text_folder(tmp_path_factory.mktemp("speaker"), "qwen3", num_hidden_layers=1)


def run(*arguments):
    parser = ArgumentParser()
    accuracy.add_arguments(parser)
    result = accuracy.run(parser.parse_args([str(a) for a in arguments]))
    assert json.loads(json.dumps(result)) == result
    return result


def toy(model, *arguments):
    return run("--model", model, "--n", 2, "--length", 100, "--protect", 4, *arguments)


# --- grading ---


RIGHT = [
    ("The result is \u22124.", "-4"),
    (r"so \boxed{5}", 5),
    (r"first \boxed{3}, then \boxed{\frac{3}{4}}", "0.75"),
    (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\tfrac12}", "1/2"),
    (r"\boxed{-\frac{7}{3}}", r"\frac{-7}{3}"),
    (r"\boxed{1\frac{1}{2}}", "3/2"),
    (r"\boxed{1 1/2}", "1.5"),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt3}2"),
    (r"\boxed{\dfrac\pi2}", r"\frac{\pi}{2}"),
    (r"\boxed{1,234,567}", "1234567"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1\,000}", "1000"),
    (r"\boxed{073}", "73"),
    (r"\boxed{2.50}", "2.5"),
    (r"\boxed{.5}", "0.50"),
    (r"\boxed{5.}", "5"),
    (r"\boxed{−4}", "-4"),
    (r"\boxed{+4}", "4"),
    (r"\boxed{\$12.00}", "12"),
    (r"\boxed{45^\circ}", "45"),
    (r"\boxed{45^{\circ}}", "45°"),
    (r"\boxed{50\%}", "50%"),
    (r"\boxed{12\text{ cm}^2}", "12"),
    (r"\boxed{12\,\mathrm{km/h}}", "12"),
    (r"\boxed{60 miles per hour}", "60"),
    (r"\boxed{3 hours}", "3"),
    (r"\boxed{\text{Monday}}", "Monday"),
    (r"\boxed{\text{(C)}}", "C"),
    (r"\boxed{\left( 3,\ 4 \right)}", "(3,4)"),
    (r"\boxed{\{1, 2\}}", r"\{1,2\}"),
    (r"\boxed{x = 7}", "7"),
    (r"\boxed{x^{2}+1}", "x^2 + 1"),
    (r"\boxed{ 8 }", r"the \boxed{8}"),
    ("the answer is 42.", "42"),
    ("so 1,250 apples", "1250"),
    ("it costs $3.50!", "3.5"),
    ("we get -3", "-3"),
    ("from 10-15", "15"),
    (r"thus \frac{2}{3}", "2/3"),
    (r"\boxed{12} and then \boxed{3", "12"),
]
WRONG = [
    ("The result is \u22124.", "4"),
    (r"\boxed{5x}", "5"),
    (r"\boxed{2m+1}", "2k+1"),
    (r"\boxed{2h}", "2"),
    (r"\boxed{(1,2)}", "12"),
    (r"\boxed{1/3}", "0.333"),
    (r"\boxed{1/0}", "0"),
    (r"\boxed{}", "0"),
    (r"\boxed{12\text{ or }13}", "12"),
    (r"\boxed{x^2+1}", "1+x^2"),
    (r"\boxed{Monday}", "Tuesday"),
    ("no answer", "0"),
    ("", ""),
    (r"\boxed{" + "9" * 5000 + "}", "9"),
]


@pytest.mark.parametrize(("text", "answer"), RIGHT)
def test_equal_answers_are_right(text, answer):
    assert is_right(text, answer), (answer_in(text), normalise(answer_in(text)), normalise(str(answer)))


@pytest.mark.parametrize(("text", "answer"), WRONG)
def test_other_answers_are_wrong(text, answer):
    assert not is_right(text, answer)


# --- cells and flags ---


def test_every_policy_budget_and_protection_has_a_row(model):
    result = run("--model", model, "--n", 2, "--length", 80, "--budgets", "32,40", "--protect", "prompt,4")
    rows = result["rows"]
    assert [r["policy"] for r in rows] == ["full", *(p for p in POLICIES if p != "full" for _ in range(4))]
    assert {(r["budget"], r["protect"]) for r in rows[1:]} == {
        (b, p) for b in (32, 40) for p in ("prompt", 4)
    }
    for row in rows[1:]:
        kept = task.PROMPT_LENGTH if row["protect"] == "prompt" else row["protect"]
        assert row["cached_tokens"] <= kept + row["budget"] and 0 < row["output_tokens"] <= 49
        has_window = POLICIES[row["policy"]].ranking in ("queries", "random")
        assert row["window"] == (16 if has_window else 0)
        for share in (row["look_backs"], row["whole"]):
            assert 0 <= share["low"] <= share["mean"] <= share["high"] <= 1
    split = {r["policy"]: r["split"] for r in rows if r["budget"] == 40}
    assert split["beacon"] == "16:5" and split["recent"] == "0:32" and split["random"] is None
    tables = accuracy.table(result).split("\n\n")  # one is too wide
    assert [len(table.splitlines()) for table in tables] == [2 + len(rows)] * 2
    charts = accuracy.charts(result)
    assert len(charts) == 4 and plots.figure(charts).startswith("<svg") and "beacon-mean" in charts[0].svg


@pytest.mark.parametrize(
    ("flags", "labels"),
    [
        (("--splits", "24:8,16:16,0:32,16:0"), ["24:8", "16:16", "0:32", "16:0"]),
        (("--pooling", "max,mean"), ["pooling max", "pooling mean"]),
        (("--select", ",".join(accuracy.FINDERS)), [f"select {name}" for name in accuracy.FINDERS]),
        (("--windows", "16,24"), ["window 16", "window 24"]),
        (("--buffers", "32,48,64"), ["buffer 32", "buffer 48", "buffer 64"]),
        (("--policies", "full,initial", "--pooling", "max"), ["full", "initial", "pooling max"]),
        (("--no-recitation", "--policies", "beacon"), ["beacon"]),
    ],
)
def test_every_ablation_runs(model, flags, labels):
    rows = toy(model, "--budgets", 40, *flags)["rows"]
    assert [row["policy"] for row in rows] == labels
    by = {row["policy"]: row for row in rows}
    if "24:8" in by:
        assert [row["split"] for row in rows] == ["24:5", "16:5", "0:32", "16:0"]
    if "select ema" in by:
        assert by["select ema"]["split"] == "2:5" and by["select history"]["split"] == "16:5"
        # The history of 100 queries and the rows asked; two averages need no history.
        query = by["select ema"]["query_bytes"] // (2 + 5)
        assert by["select history"]["query_bytes"] == (100 + 5 + 16 + 5) * query
        assert by["select fps"]["query_bytes"] == 32 * query
    if "buffer 64" in by:
        assert by["buffer 64"]["query_bytes"] == 2 * by["buffer 32"]["query_bytes"]


def test_the_true_trace_fed(model):
    forced = toy(model, "--policies", "full,beacon", "--budgets", 40, "--teacher-forced")["rows"]
    assert all(row["output_tokens"] == 69 and 0 <= row["local"]["mean"] <= 1 for row in forced)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--policies", "beacon", "--budgets", 8), "smallest budget possible"),
        (("--buffers", 16), "buffer=16"),
        (("--length", 20), "length"),
        (("--problems", "missing.jsonl"), "missing.jsonl"),
        (("--problems", "x.jsonl", "--select", "kmeans"), "select=kmeans"),
    ],
)
def test_mistakes_are_named_before_anything_runs(model, flags, said):
    with pytest.raises(ValueError, match=said):
        run("--model", model, *flags)


def test_an_unknown_name_lists_what_is_possible(model, capsys):
    for flags in (("--policies", "bacon"), ("--select", "all"), ("--pooling", "min"), ("--splits", "8")):
        with pytest.raises(SystemExit):
            toy(model, *flags)
    assert "possible are full, beacon" in capsys.readouterr().err


# A policy of one's own, by module and name: compared under the same window, budgets and protections.

IDEAS = """
from nanobeacon import Policy

mine = Policy("mine", select="none", beacons=0, recents=0, score=lambda slots: slots.value_norms)
"""


def test_a_policy_of_ones_own_is_compared_under_the_same_window(model, tmp_path, monkeypatch):
    (tmp_path / "own_ideas.py").write_text(IDEAS)
    monkeypatch.syspath_prepend(tmp_path)
    rows = toy(model, "--policies", "recent,own_ideas:mine", "--budgets", 40)["rows"]
    assert [row["policy"] for row in rows] == ["recent", "own_ideas:mine"]
    assert [row["window"] for row in rows] == [16, 16] and [row["budget"] for row in rows] == [40, 40]
    assert rows[1]["query_bytes"] == 0 < rows[0]["query_bytes"]


# --- selections ---


def test_selections_on_plain_clusters():
    generator = torch.Generator().manual_seed(1)
    centres = torch.eye(8)[:4] * torch.tensor([1.0, 2, 3, 4])[:, None]
    past = centres[torch.arange(40) % 4] + 0.02 * torch.randn(40, 8, generator=generator)
    past = torch.stack((past, past.flip(0)))
    unit = F.normalize(past, dim=-1)

    def chosen(name, count=4):
        found = selections.SELECTIONS[name](past, count, torch.Generator().manual_seed(3))
        assert found.shape == (2, count, 8)
        return found

    for name in ("history", "kmeans", "nearest"):
        found = chosen(name)
        assert (F.normalize(found, dim=-1) @ F.normalize(centres, dim=-1).T > 0.99).any(1).all(), name
        assert torch.equal(found, chosen(name)), "equal seeds, equal choice"
        if name == "kmeans":
            assert (
                torch.cdist(found, centres).amin(1).max() < 0.05
            )  # the length of a centroid is its members'
        else:
            assert (torch.cdist(found, past).amin(2) == 0).all(), "these are past queries"
    first = unit.sum(1, keepdim=True).mul(unit).sum(-1).argmin(1)  # Algorithm 1: the least like all others
    assert torch.allclose(chosen("history")[:, 0], past[range(2), first])

    state = torch.zeros(2, 2, 8)
    decay = torch.tensor(selections.DECAYS)[None, :, None]
    for query in past.unbind(1):
        state = decay * state + (1 - decay) * query[:, None]
    assert torch.allclose(chosen("ema", 2), state / (1 - decay**40), atol=1e-5)


def test_a_selection_asks_what_the_engine_would(speaker, monkeypatch):
    """Choosing the first 16 output queries out of the history is the policy `initial`, token for token."""
    prompt, length, budget = prompt_of(21), 120, 40
    initial = replace(POLICIES["initial"], window=16)
    params = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    options = dict(device="cpu", dtype="float32", budget=budget, max_model_len=length, trace=True)
    (wanted,) = LLM(str(speaker), policy=initial, **options).generate([prompt], params)

    monkeypatch.setitem(selections.SELECTIONS, "first", lambda past, count, *_: past[:, 21 : 21 + count])
    llm = LLM(str(speaker), policy=selections.keep_history(initial, length), **options)
    llm.engine.evictor = selections.SelectingEvictor(llm.engine, "first", 16)
    (got,) = llm.generate([prompt], params)
    assert len(wanted.trace) > 5 and got.token_ids == wanted.token_ids
    assert all(torch.equal(a.kept, b.kept) for a, b in zip(got.trace, wanted.trace, strict=True))


# --- problems of a file ---


@pytest.fixture
def problems(tmp_path):
    lines = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i), "id": i} for i in range(3)]
    lines.append({"messages": [{"role": "user", "content": "Say 5\u2028."}], "answer": 5})
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    return path


def on_file(model, problems, *arguments):
    options = ("--n", 2, "--max-tokens", 40, "--temperature", 1, "--budgets", 40)
    return run("--model", model, "--problems", problems, *options, *arguments)


def test_a_file_is_run_and_gone_on_with(speaker, problems, monkeypatch):
    path = problems.with_suffix(".results.jsonl")
    result = on_file(speaker, problems)
    assert [row["policy"] for row in result["rows"]] == ["full", "beacon"] and result["num_problems"] == 4
    for row in result["rows"]:
        assert {"pass_at_1", "output_tokens", "longest", "cut", "errors", "cached_tokens"} < set(row)
        assert row["errors"] == 0 and 0 < row["output_tokens"] <= row["longest"] <= 40
        assert 0 <= row["cut"] <= 1 and 0 <= row["pass_at_1"]["mean"] <= 1
    assert len(accuracy.charts(result)) == 1 and "pass at 1" in accuracy.table(result)

    def attempts():
        records = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        return {record["key"]: record["attempts"] for record in records}

    whole = attempts()
    assert len(whole) == 8 and all(len(some) == 2 for some in whole.values())

    # One record lost, another cut off: those two are run again, with the same draws.
    path.write_text("\n".join(path.read_text().split("\n")[1:-1])[:-30])
    submitted = []
    monkeypatch.setattr(LLM, "submit", lambda llm, *a, of=LLM.submit: submitted.append(a) or of(llm, *a))
    assert on_file(speaker, problems) == result
    assert len(submitted) == 2 and attempts() == whole

    # Everything done: no model is opened. Other settings: all is run.
    submitted.clear()
    monkeypatch.setattr(accuracy, "LLM", None)
    assert on_file(speaker, problems) == result
    monkeypatch.undo()
    assert on_file(speaker, problems, "--seed", 1)["rows"] != result["rows"]
    assert len(path.read_text().split("\n")) == 17


def test_answers_are_graded_and_errors_are_not_kept(speaker, tmp_path):
    path = tmp_path / "mixed.jsonl"
    (wanted,) = LLM(str(speaker)).generate(["7"], SamplingParams(max_tokens=8, temperature=0.0))
    path.write_text(
        json.dumps({"prompt": "7", "answer": answer_in(wanted.text) or "none"})
        + "\n"
        + json.dumps({"prompt": "x" * 3000, "answer": "1"})
        + "\n"
    )
    options = ("--n", 1, "--max-tokens", 8, "--temperature", 0, "--raw", "--policies", "full")
    result = run("--model", speaker, "--problems", path, *options)
    (row,) = result["rows"]
    assert row["errors"] == 1 and row["cut"] == 1.0 and row["output_tokens"] == 8
    assert "new ones were asked for" in result["first_error"]
    assert row["pass_at_1"]["mean"] == (0.5 if answer_in(wanted.text) else 0.0)
    assert len(path.with_suffix(".results.jsonl").read_text().splitlines()) == 1


def test_the_papers_sampling(speaker, problems, monkeypatch):
    seen = []
    monkeypatch.setattr(
        LLM,
        "submit",
        lambda llm, prompts, params, of=LLM.submit: seen.append(params) or of(llm, prompts, params),
    )
    run(
        "--model",
        speaker,
        "--problems",
        problems,
        "--paper",
        "--n",
        1,
        "--max-tokens",
        5,
        "--policies",
        "full",
    )
    assert (seen[0].temperature, seen[0].top_p, seen[0].top_k, seen[0].max_tokens) == (0.6, 0.95, 0, 5)
    assert accuracy.PAPER["max_tokens"] == 32768
    assert len({params.seed for params in seen}) == 4, "each problem has its own draws"


def test_the_papers_length_is_cut_to_the_context_and_a_failed_request_is_status_1(speaker, tmp_path, capsys):
    import bench

    path = tmp_path / "two.jsonl"
    path.write_text('{"prompt": "7", "answer": 7}\n')
    words = f"accuracy --model {speaker} --problems {path} --n 1 --policies full --paper --raw".split()
    assert bench.main(words) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    context = json.loads((Path(speaker) / "config.json").read_text())["max_position_embeddings"]
    assert row["longest"] <= context
    path.write_text(json.dumps({"prompt": "x" * 5000, "answer": 1}) + '\n{"prompt": "8", "answer": 7}\n')
    assert bench.main([*words, "--max-tokens", "4"]) == 1
    said = capsys.readouterr().err
    assert "bench.py: some requests failed: " in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a", "answer": 1}\n{"prompt": "a"}', "line 2: an object with answer"),
        ('{"answer": 1}', "line 1: an object"),
        ('{"prompt": "a", "answer": null}', "line 1: an object"),
        ('{"prompt": 5, "answer": 1}', "line 1: an object"),
        ('{"messages": [], "answer": 1}', "line 1: an object"),
        ('{"messages": 5, "answer": 1}', "line 1: an object"),
        ('{"messages": [{"content": "a"}], "prompt": "a", "answer": 1}', "line 1: an object"),
        ('{"prompt": "\\ud800", "answer": 1}', "line 1: .*surrogates"),
        ("[" * 100_000, "line 1: "),
        ("[1]", "line 1: an object"),
        ("7", "line 1: "),
        ('{"prompt": ', "line 1: "),
        ("\n", "it is empty; an object with answer"),
    ],
)
def test_a_bad_file_is_named_with_its_line(speaker, tmp_path, text, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"bad.jsonl.*{said}"):
        on_file(speaker, path)


@pytest.mark.parametrize("text", ["{}\n", "5\n", "garbage\n"])
def test_results_that_no_run_wrote_are_named(speaker, problems, text):
    problems.with_suffix(".results.jsonl").write_text(text)
    with pytest.raises(ValueError, match="sums.results.jsonl, line 1: "):
        on_file(speaker, problems)


# --- the shipped reasoner ---


@needs_reasoner
def test_beacon_keeps_what_recent_loses():
    options = ("--n", 16, "--length", 448, "--budgets", 96, "--protect", 4)
    beacon, recent = run(*options, "--policies", "beacon,recent")["rows"]
    assert beacon["look_backs"]["mean"] > recent["look_backs"]["mean"] + 0.4
    assert beacon["whole"]["mean"] >= recent["whole"]["mean"]


@needs_reasoner
def test_the_demonstration(monkeypatch):
    monkeypatch.setattr(demo, "LENGTH", 200)
    shown = io.StringIO()
    assert demo.run(shown, budget=48) == 0
    text = shown.getvalue()
    assert "✓" in text and "\033" not in text and "generate.py --model" in text
    assert all(f"\n{policy} " in text for policy in demo.POLICIES)


def test_the_demonstration_without_a_checkpoint_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "folder", lambda: tmp_path)
    with pytest.raises(ValueError, match="missing"):
        demo.run(io.StringIO())
