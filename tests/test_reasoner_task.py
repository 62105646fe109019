"""The reasoner's task is seeded, as hard as intended, graded fairly; the shipped folder does it."""

import json
import random
import statistics
import subprocess
import sys

import pytest

from nanobeacon.reasoner import folder, task


@pytest.fixture(scope="module")
def problems():
    return task.problems(100, 768, seed=3)


def replay(problem: task.Problem) -> list[tuple[int, int, str]]:
    """Reads a true trace in another way: of each look-back (distance to the last mention, value, origin)."""
    tokens = problem.prompt + problem.trace
    mentions: dict[int, tuple[int, str]] = {}
    found = []
    for place, (before, register, value) in enumerate(zip(tokens, tokens[1:], tokens[2:], strict=False)):
        if not task.is_register(register):
            continue
        if before == task.READ:
            last, kind = mentions[register]
            assert tokens[last] == value
            found.append((place + 2 - last, value, kind))
            mentions[register] = place + 2, kind
        else:
            mentions[register] = place + 2, "written" if before == task.WRITE else "told"
    return found


def test_the_task_needs_no_torch():
    code = (
        "import sys, nanobeacon.reasoner.task as t; t.problems(1, 200, 1); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_equal_seeds_equal_problems_and_shorter_is_a_prefix(problems):
    assert task.problems(100, 768, seed=3) == problems
    assert task.problems(1, 768, seed=4) != problems[:1]
    assert len({problem.prompt for problem in problems}) == 100
    for short, long in zip(task.problems(100, 300, seed=3), problems, strict=True):
        assert short.prompt == long.prompt and short.trace == long.trace[: len(short.trace)]
        assert short.look_backs == tuple(place for place in long.look_backs if place < len(short.trace))


def test_one_problem_is_pinned():
    (problem,) = task.problems(1, 100, seed=0)
    assert (
        task.decode(problem.prompt) == "BOS ? ? ? E 13 ; H 6 ; C 5 ; A 20 ; F 19 ; D 5 ; G 18 ; B 17 ; @ 28 >"
    )
    assert (
        task.decode(problem.trace[:40])
        == "A 20 ; B 17 ; C 5 ; D 5 ; E 13 ; F 19 ; G 18 ; H 6 ; | E 13 28 12 29 11 30 10 31 9 0 8 1 7 2"
    )


def test_lengths_and_vocabulary(problems):
    assert len(set(task.WORDS)) == len(task.WORDS) == 48
    for problem in problems:
        assert len(problem.prompt) == task.PROMPT_LENGTH and len(problem.prompt + problem.trace) == 768
        assert task.encode(task.decode(problem.trace)) == list(problem.trace)
        assert not {task.BOS, task.EOS} & set(problem.trace)
    with pytest.raises(ValueError, match="length: 31"):
        task.problems(1, 31, seed=0)
    with pytest.raises(ValueError, match="no word 'Z'"):
        task.encode("A Z")


def test_look_backs_are_far_irregular_and_often_written(problems):
    """26 look-backs a problem, their sources 20 to 600 tokens away, 41 % of the values written on the way."""
    found = [look_back for problem in problems for look_back in replay(problem)]
    assert len(found) == sum(len(problem.look_backs) for problem in problems)
    gaps = [gap for gap, _, _ in found]
    assert 24 < len(found) / 100 < 29
    assert 70 < statistics.median(gaps) < 90 and max(gaps) > 400 and statistics.stdev(gaps) > 50
    assert 0.55 < sum(gap > 64 for gap in gaps) / len(gaps) < 0.68
    assert 0.35 < sum(kind == "written" for _, _, kind in found) / len(found) < 0.48
    assert 8 < sum(problem.trace.count(task.WRITE) for problem in problems) / 100 < 12
    assert all(3 <= value <= 20 for _, value, _ in found)


def test_the_truth_is_right(problems):
    for problem in problems:
        count = len(problem.look_backs)
        assert task.grade(problem, problem.trace) == task.Grade(count, count, True)
        verdicts = list(task.follow(problem.prompt + problem.trace))[task.PROMPT_LENGTH :]
        assert (
            tuple(place for place, verdict in enumerate(verdicts) if verdict is not None)
            == problem.look_backs
        )


def test_variants():
    for problem in task.problems(20, 400, seed=1, recitation=False):
        assert problem.trace[0] == task.READ and problem.look_backs[0] == 2
        assert task.grade(problem, problem.trace).whole
    for problem in task.problems(20, 400, seed=1, writes=False):
        assert task.WRITE not in problem.trace and task.grade(problem, problem.trace).whole


def test_a_wrong_look_back_counts_once_and_is_no_new_truth(problems):
    problem = problems[0]
    count = len(problem.look_backs)
    broken = list(problem.trace)
    broken[problem.look_backs[3]] = 3 + (broken[problem.look_backs[3]] - 2) % 18
    assert task.grade(problem, broken) == task.Grade(count, count - 1, False)


def test_a_counting_slip_breaks_the_whole_but_no_look_back(problems):
    problem = problems[1]
    count = len(problem.look_backs)
    broken = list(problem.trace)
    broken[problem.look_backs[2] + 2] = (broken[problem.look_backs[2] + 2] + 1) % task.NUMBERS
    assert task.grade(problem, broken) == task.Grade(count, count, False)


def test_the_output_is_judged_by_what_it_wrote_itself():
    (problem,) = task.problems(1, 300, seed=2)
    facts = {problem.prompt[place]: problem.prompt[place + 1] for place in range(task.FIRST_TOKENS, 28, 3)}
    register = task.encode("C")[0]
    told, other = facts[register], 3 if facts[register] != 3 else 4
    for output, right in (
        (f"| C {told} 0 = C {other} 0 | C {other}", [True, True]),
        (f"| C {told} 0 = C {other} 0 | C {told}", [True, False]),
        (f"C {other} ; | C {told}", [True]),  # a wrong recitation changes nothing
        (f"| C {other} 0 | C {told}", [False, True]),  # nor does a wrong read
        ("0 1 2 3", []),
    ):
        verdicts = [
            verdict for verdict in task.follow([*problem.prompt, *task.encode(output)]) if verdict is not None
        ]
        assert verdicts == right
        grade = task.grade(problem, task.encode(output))
        assert grade == task.Grade(len(right), sum(right), False)


def test_short_long_and_noisy_outputs(problems):
    problem = problems[2]
    assert not task.grade(problem, problem.trace[:-1]).whole
    assert task.grade(problem, [*problem.trace, 1, 2, 3]).whole
    assert task.grade(problem, ()) == task.Grade(0, 0, False)
    generator = random.Random(0)
    noise = [generator.randrange(len(task.WORDS)) for _ in problem.trace]
    grade = task.grade(problem, noise)
    assert 0 <= grade.right <= grade.look_backs and not grade.whole


def test_the_tokenizer_is_the_vocabulary(problems):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder() / "tokenizer.json"))
    assert tokenizer.get_vocab() == {word: token for token, word in enumerate(task.WORDS)}
    for problem in problems[:10]:
        tokens = list(problem.prompt + problem.trace)
        text = task.decode(tokens)
        assert tokenizer.encode(text).ids == tokens
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text
        assert tokenizer.decode(list(problem.trace)) == task.decode(problem.trace)


def test_the_shipped_folder_is_small():
    assert sum(path.stat().st_size for path in folder().iterdir()) < 2_000_000


def test_the_shipped_folder_works_in_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder())
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings
    problems = task.problems(2, task.PROMPT_LENGTH + 100, seed=7)
    prompts = tokenizer([task.decode(problem.prompt) for problem in problems], return_tensors="pt")
    assert prompts["input_ids"].tolist() == [list(problem.prompt) for problem in problems]
    outputs = model.generate(**prompts, max_new_tokens=100)[:, task.PROMPT_LENGTH :]
    for problem, output in zip(problems, outputs.tolist(), strict=True):
        assert tuple(output) == problem.trace
        assert tokenizer.decode(output) == task.decode(problem.trace)


def test_training_is_seeded_and_writes_the_shipped_kind_of_folder(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from nanobeacon.reasoner import train

    monkeypatch.setattr(train, "CURRICULUM", (train.Stage(2, 64, 2, writes=False), train.Stage(1, 96, 1)))
    monkeypatch.setattr(train, "FINE_TUNING", (train.Stage(1, 64, 1),))
    for name, seed in (("first", "1"), ("again", "1"), ("other", "2")):
        assert train.main(["--seed", seed, "--out", str(tmp_path / name)]) == 0
    weights = {
        name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again", "other")
    }
    assert weights["first"] == weights["again"] != weights["other"]
    assert {path.name for path in folder().iterdir()} == {
        path.name for path in (tmp_path / "first").iterdir()
    }
    for path in folder().glob("*.json"):
        ours, shipped = (
            json.loads((place / path.name).read_text()) for place in (tmp_path / "first", folder())
        )
        for config in (ours, shipped):
            config.pop("transformers_version", None)
        assert ours == shipped
    tuned = ["--init", str(folder()), "--no-recitation", "--seed", "1", "--out", str(tmp_path / "tuned")]
    assert train.main(tuned) == 0
    assert (tmp_path / "tuned" / "model.safetensors").stat().st_size == len(weights["first"])


def test_training_weighs_look_backs_most_and_the_prompt_nothing():
    pytest.importorskip("transformers")
    from nanobeacon.reasoner import train

    for recitation in (True, False):
        problems = task.problems(2, 400, seed=1, recitation=recitation)
        tokens, weights = train.make_batch(problems, recitation)
        for problem, row, weight in zip(problems, tokens.tolist(), weights, strict=True):
            assert tuple(row) == problem.prompt + problem.trace
            assert weight[: task.PROMPT_LENGTH].unique().tolist() == [0.0]
            heavy = (weight[task.PROMPT_LENGTH :] == train.LOOK_BACK_WEIGHT).nonzero()[:, 0].tolist()
            recited = [1, 4, 7, 10, 13, 16, 19, 22] if recitation else []
            assert heavy == [*recited, *problem.look_backs]
