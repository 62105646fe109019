"""The command line as people use it, in its own process: pipes, Ctrl-C, JSON, conversation, exit statuses."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import text_folder

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=100_000, eos=False)


def run(folder, *arguments, stdin=""):
    command = [sys.executable, "generate.py", "--model", str(folder), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, input=stdin, capture_output=True, text=True, timeout=120
    )


def test_text_goes_to_stdout_and_statistics_to_stderr(folder):
    done = run(
        folder, "--prompt", "abc", "--max-tokens", "60", "--budget", "40", "--temperature", "1", "--seed", "1"
    )
    assert done.returncode == 0 and done.stdout.strip()
    assert "tokens/s" in done.stderr and "evictions" in done.stderr and "kept" in done.stderr
    again = run(
        folder, "--prompt", "abc", "--max-tokens", "60", "--budget", "40", "--temperature", "1", "--seed", "1"
    )
    assert again.stdout == done.stdout


@pytest.mark.parametrize("arguments", [(), ("-",), ("--prompt-file", "-")])
def test_a_pipe_is_the_prompt(folder, arguments):
    done = run(folder, "--json", "--max-tokens", "3", "--raw", *arguments, stdin="hello")
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["prompt_token_ids"][0] == 1 and len(json.loads(line)["prompt_token_ids"]) == 6


def test_an_empty_pipe_means_the_example_and_stderr_says_so(folder):
    done = run(folder, "--max-tokens", "3", stdin=" \n")
    assert done.returncode == 0 and "built-in example" in done.stderr


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8:surrogateescape"])
def test_a_pipe_that_is_no_text_is_said_so(folder, encoding):
    command = [sys.executable, "generate.py", "--model", str(folder), "-"]
    given = {"input": b"\xff\xfe bad", "env": ENVIRONMENT | {"PYTHONIOENCODING": encoding}}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, **given)
    assert done.returncode == 2 and done.stderr.startswith(b"generate.py: --prompt-file -: 'utf-8' codec")
    assert done.stderr.count(b"\n") == 1


def test_json_is_one_object_a_completion(folder):
    done = run(
        folder,
        "--prompt",
        "x",
        "--n",
        "3",
        "--temperature",
        "1",
        "--max-tokens",
        "5",
        "--json",
        "--seed",
        "4",
    )
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    assert [o["completion"] for o in objects] == [0, 1, 2]
    assert all(len(o["token_ids"]) <= 5 and o["finish_reason"] in ("length", "stop") for o in objects)


def test_completions_come_in_order(folder):
    arguments = ("--prompt", "x", "--n", "2", "--temperature", "1", "--max-tokens", "20", "--seed", "9")
    texts = [json.loads(line)["text"] for line in run(folder, *arguments, "--json").stdout.splitlines()]
    assert run(folder, *arguments).stdout == "".join(f"{text}\n" for text in texts)


def test_a_conversation_remembers(folder):
    done = run(folder, "--chat", "--max-tokens", "4", "--json", stdin="first\n\nsecond\n")
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 0
    # The template prints every message: the second prompt begins as the first did.
    length = len("user: first\n")
    assert second["prompt_token_ids"][:length] == first["prompt_token_ids"][:length]
    assert len(second["prompt_token_ids"]) > len(first["prompt_token_ids"])


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_keeps_what_was_generated(folder, as_json):
    command = [sys.executable, "generate.py", "--model", str(folder), "--prompt", "x", "--temperature", "0"]
    command += ["--stop", "this never comes", "--budget", "64"] + ["--json"] * as_json
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background of a shell ignores SIGINT, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert "no known end" in process.stderr.readline()
    first = process.stderr.readline()
    assert "pages" in first
    if not as_json:
        process.stdout.read(20)
    else:
        import time

        time.sleep(2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "tokens/s" in err
    if as_json:
        assert json.loads(out)["finish_reason"] == "abort" and json.loads(out)["token_ids"]


def test_a_reader_that_leaves_is_no_traceback(folder):
    command = f"{sys.executable} generate.py --model {folder} --prompt x --max-tokens 3000 | head -c 5"
    done = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
