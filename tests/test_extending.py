"""EXTENDING.md stays true: its examples are taken from it, applied to a copy of the package, and run.

The exercises are red as they stand, and each can be done: here is a solution of every one.
"""

import importlib.util
import inspect
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "nanobeacon" / "EXTENDING.md"
EXERCISES = sorted((ROOT / "tests" / "exercises").glob("test_*.py"))


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A folder with a copy of the package to which every diff of the guide was applied."""
    folder = tmp_path_factory.mktemp("extended")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "nanobeacon", folder / "nanobeacon", ignore=ignored)
    diffs = re.findall(r"^```diff\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), flags=re.S | re.M)
    assert len(diffs) == 4, "a policy, a family, a sampling parameter, a kernel"
    for diff in diffs:
        command = ["git", "apply", "--recount", "-"]
        done = subprocess.run(command, cwd=folder, input=diff, text=True, capture_output=True)
        assert done.returncode == 0, f"{done.stderr}\n{diff}"
    return folder


CHECKS = """
import sys, tempfile
from pathlib import Path

sys.path.insert(0, sys.argv[1])  # where tiny.py is
import torch
from tiny import prompt_of, tiny_folder, tiny_model

import nanobeacon
from nanobeacon import LLM, SamplingParams

assert Path(nanobeacon.__file__).is_relative_to(Path.cwd()), nanobeacon.__file__
place = dict(device="cpu", dtype="float32")
long = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
with tempfile.TemporaryDirectory() as folder:
    folder = tiny_folder(Path(folder), "llama")

    # The policy: the longest values stay, in every layer and head.
    llm = LLM(folder, budget=40, policy="ideas:by_value_norm", trace=True, **place)
    (output,) = llm.generate([prompt_of(10)], long)
    assert output.error is None and len(output.trace) > 3

    # The sampling parameter: never more than so many different tokens.
    few = SamplingParams(max_tokens=70, temperature=1.0, seed=1, ignore_eos=True, presence_penalty=5.0)
    free = SamplingParams(max_tokens=70, temperature=1.0, seed=1, ignore_eos=True)
    varied, plain = (LLM(folder, **place).generate([prompt_of(10)], p)[0].token_ids for p in (few, free))
    assert len(set(varied)) > len(set(plain))

# The family: transformers' logits.
from transformers import SeedOssConfig, SeedOssForCausalLM

with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    model = SeedOssForCausalLM(SeedOssConfig(**sizes, **heads, bos_token_id=1, eos_token_id=2)).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    prompt = prompt_of(9)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True)
    (output,) = LLM(folder, **place).generate([prompt], params)
    for token, value in output.logprobs[0][1].items():
        assert abs(value - wanted[token].item()) < 1e-4

# The kernel: Triton, interpreted, against its twin.
from nanobeacon.kernels import reference, triton_kernels

vectors = torch.randn(3, 5, 16, 48)
vectors[0, 0, 0] = 0
torch.testing.assert_close(triton_kernels().norms(vectors), reference.norms(vectors))
torch.testing.assert_close(reference.norms(vectors), vectors.double().norm(dim=-1).float())
print("all four hold")
"""


def test_every_example_of_the_guide_can_be_applied_and_works(extended):
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(extended)}
    command = [sys.executable, "-c", CHECKS, str(ROOT / "tests")]
    done = subprocess.run(command, cwd=extended, env=environment, capture_output=True, text=True, timeout=300)
    assert "all four hold" in done.stdout, done.stderr


def sinks(slots):
    positions = slots.positions.float()
    positions[..., :4] = torch.inf
    return positions


def memory(slots):
    return slots.attention.exp() + slots.previous / 2


def farthest(queries, m):
    def unit(q):
        length = math.sqrt(sum(x * x for x in q))
        return [x / length for x in q]

    def cosine(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    def lowest(values):
        least = min(values)
        return next(i for i, value in enumerate(values) if value <= least + 1e-5)

    rows = [unit(q) for q in queries]
    if len(rows) <= m:
        return list(range(len(rows)))
    picks = [lowest([sum(cosine(a, b) for b in rows) / len(rows) for a in rows])]
    while len(picks) < m:
        nearest = [max(cosine(row, rows[p]) for p in picks) for row in rows]
        picks.append(lowest([2.0 if i in picks else s for i, s in enumerate(nearest)]))
    return picks


def evictions(output_tokens, budget):
    fed = output_tokens - 2  # with the token of its last step a request ends, and does not evict
    return 0 if fed < budget else 1 + (fed - budget) // (budget // 8)


def peak(prompt_tokens, output_tokens, budget):
    return prompt_tokens + min(output_tokens - 1, budget)


def no_trigram_twice(token_ids, logits):
    end = tuple(token_ids[-2:])
    for i in range(len(token_ids) - 2):
        if tuple(token_ids[i : i + 2]) == end:
            logits[token_ids[i + 2]] = -torch.inf


def pages(prompt_tokens, output_tokens, n, page_size, budget):
    held = prompt_tokens + min(output_tokens - 1, budget)
    shared = prompt_tokens // page_size
    each = -(-held // page_size)
    return shared + n * (each - shared)


SOLUTIONS = {
    1: {"score": sinks},
    2: {"score": memory},
    3: {"fps": farthest},
    4: {"evictions": evictions, "peak": peak},
    5: {"no_trigram_twice": no_trigram_twice},
    6: {"pages": pages},
}


def test_there_are_six_exercises_and_they_are_red():
    assert len(EXERCISES) == len(SOLUTIONS) == 6
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, EXERCISES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "passed" not in done.stdout.splitlines()[-1], done.stdout


@pytest.mark.parametrize("number", SOLUTIONS)
def test_every_exercise_can_be_done(number, tmp_path_factory, monkeypatch):
    path = EXERCISES[number - 1]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, solution in SOLUTIONS[number].items():
        monkeypatch.setattr(module, name, solution)
    for test in [value for name, value in vars(module).items() if name.startswith("test_")]:
        for arguments in _cases(test):
            if "tmp_path" in inspect.signature(test).parameters:
                arguments = arguments | {"tmp_path": tmp_path_factory.mktemp("exercise")}
            test(**arguments)


def _cases(test) -> list[dict]:
    """The arguments of a parametrized test, every combination."""
    cases: list[dict] = [{}]
    for mark in getattr(test, "pytestmark", []):
        name, values = mark.args
        cases = [case | {name: value} for case in cases for value in values]
    return cases
