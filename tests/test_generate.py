"""The command line as people use it, in its own process: pipes, Ctrl-C, JSON, conversation, exit statuses."""

import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from tiny import text_folder

from nanobeacon.policies import POLICIES

try:
    import fcntl
    import pty
    import termios
except ImportError:
    pty = None

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


# What people do at a shell: echo, files, waiting pipes, prompts without an option.


def ids_of(folder, *arguments, stdin=""):
    done = run(folder, "--json", "--max-tokens", "2", "--raw", *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["prompt_token_ids"]


@cache
def ids_of_option(folder, text):
    """The ids of `--prompt TEXT`, asked once."""
    return ids_of(folder, "--prompt", text)


@pytest.mark.parametrize("given", ["hello\n", "hello\r\n", "\ufeffhello", "\ufeffhello\n"])
def test_the_newline_of_a_pipe_and_a_byte_order_mark_are_not_the_prompts(folder, given, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(given.encode())
    wanted = ids_of_option(folder, "hello")
    assert ids_of(folder, stdin=given) == wanted
    assert ids_of(folder, "--prompt-file", file) == wanted


def test_only_one_newline_is_dropped_and_an_option_keeps_its_own(folder):
    assert ids_of(folder, stdin="a\n\n") == ids_of_option(folder, "a\n")
    assert len(ids_of_option(folder, "a\n")) == len(ids_of_option(folder, "a")) + 1


@pytest.mark.parametrize("content", ["", "\n", "\ufeff", "\ufeff \n"])
def test_an_empty_file_counts_as_an_empty_pipe(folder, content, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(content, encoding="utf-8")
    done = run(folder, "--max-tokens", "2", "--prompt-file", file)
    assert done.returncode == 0 and "built-in example" in done.stderr


def test_a_prompt_needs_no_option(folder):
    assert ids_of(folder, "two words") == ids_of_option(folder, "two words")
    assert ids_of(folder, "--temperature", "0", "hello") == ids_of_option(folder, "hello")


def test_a_silent_pipe_is_said(folder):
    command = [sys.executable, "generate.py", "--model", str(folder), "--max-tokens", "2", "--raw"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, errors="replace",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert "standard input" in process.stderr.readline()  # comes although the pipe says nothing
    assert process.communicate("hello", timeout=60) and process.returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "gbk", "cp1252"])
@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_is_lost_where_stdout_cannot_show_it(folder, encoding, as_json):
    words = ["--prompt", "x", "--max-tokens", "40", "--temperature", "1", "--seed", "1"] + [
        "--json"
    ] * as_json
    command = [sys.executable, "generate.py", "--model", str(folder), *words]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = json.loads(run(folder, *words, *["--json"] * (not as_json)).stdout)["text"]
    assert not text.isascii()
    if as_json:
        assert json.loads(done.stdout.decode(encoding))["text"] == text
    else:
        shown = text.encode(encoding, "replace")
        assert done.stdout.replace(os.linesep.encode(), b"\n") == shown + b"\n"


def test_the_version_and_the_policies_are_in_the_help():
    command = [sys.executable, "generate.py"]
    version = subprocess.run([*command, "--version"], cwd=ROOT, capture_output=True, text=True)
    assert version.returncode == 0 and version.stdout.startswith("nanobeacon 0.")
    shown = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True).stdout
    shown = "".join(shown.split())  # whatever the width
    assert all(policy in shown for policy in POLICIES)
    assert "default:beacon" in shown and "default:thepolicy'sown,beacon'sis32" in shown


# Limits, and what is said about them.


def test_max_tokens_beyond_the_context_are_cut_to_it_before_the_weights_are_loaded(tmp_path):
    small = text_folder(tmp_path / "small", max_position_embeddings=40, eos=False)
    done = run(small, "--prompt", "x", "--raw", "--max-tokens", "99999", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 40 - 2
    first = done.stderr.splitlines()[0]
    assert "--max-tokens 99,999" in first and "40 tokens" in first
    # The context holds these, but not beside the prompt.
    done = run(small, "--prompt", "x", "--raw", "--max-tokens", "39")
    assert done.returncode == 0 and "leaves 38" in done.stderr and "cut at 38 tokens" in done.stderr


def test_completions_are_numbered_and_equal_ones_are_said(folder):
    words = ("--prompt", "x", "--n", "3", "--max-tokens", "4", "--temperature", "0")
    done = run(folder, *words)
    assert [f"completion {i} of 3" in done.stderr for i in (1, 2, 3)] == [True] * 3
    assert "--n 3" in done.stderr and "equal" in done.stderr and "Completion 3 was cut at 4" in done.stderr
    found = [json.loads(line) for line in run(folder, *words, "--json").stdout.splitlines()]
    assert [(o["prompt"], o["completion"]) for o in found] == [(0, 0), (0, 1), (0, 2)]
    drawn = run(folder, *words[:-1], "1", "--seed", "1").stderr
    assert "equal" not in drawn


def test_what_is_reserved_and_what_is_used_are_told_apart(folder):
    done = run(folder, "--prompt", "x", "--raw", "--max-tokens", "4", "--budget", "400")
    assert "MB reserved" in done.stderr and "MB used" in done.stderr and "instead of" not in done.stderr


# A conversation.


def chat(folder, text, *arguments):
    done = run(folder, "--chat", "--max-tokens", "4", "--temperature", "0", "--json", *arguments, stdin=text)
    assert done.returncode == 0, done.stderr
    prompts = []
    for line in done.stdout.splitlines():
        ids = json.loads(line)["prompt_token_ids"]
        prompts.append(bytes_of(folder, ids))
    return prompts, done.stderr


def bytes_of(folder, ids):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids)


def test_commands_of_a_conversation(folder):
    text = "one\n/reset\ntwo\n/system be brief\nthree\n/help\n/frob\n"
    text += " /usr is a path\n/system\nfour\n/quit\nfive\n"
    prompts, said = chat(folder, text)
    assert prompts[0] == "user: one\nassistant: " and prompts[1] == "user: two\nassistant: "
    assert prompts[2] == "system: be brief\nuser: three\nassistant: "
    assert prompts[3].startswith(prompts[2]) and "user: /usr is a path\n" in prompts[3]
    assert prompts[4] == "user: four\nassistant: " and len(prompts) == 5
    assert "/system TEXT" in said and "/frob is no command" in said
    assert "> " not in said  # prompts are for terminals
    assert said.count("tokens cached]") == 5


def test_a_message_of_several_lines_stands_between_two_fences(folder):
    prompts, _ = chat(folder, '"""\none\n\n/reset\n"""\ntwo\n"""\nunfinished\n')
    assert prompts[0] == "user: one\n\n/reset\nassistant: "
    assert "user: two\n" in prompts[1] and "user: unfinished\n" in prompts[2]


def test_a_turn_that_does_not_fit_is_said_and_the_next_line_is_awaited(tmp_path):
    small = text_folder(tmp_path / "small", max_position_embeddings=60, eos=False)
    prompts, said = chat(small, f"hello\n{'long ' * 30}\n/reset\nagain\n", "--max-tokens", "50")
    assert prompts == ["user: hello\nassistant: ", "user: again\nassistant: "]
    assert "No answer: the conversation has" in said and "the context holds 60" in said
    # What is left of the context is used, and that is said too.
    assert said.count("The context leaves 36 tokens for this answer, not 50") == 2


class Terminal:
    """generate.py on a pseudo-terminal: what it shows, and keys for it."""

    def __init__(self, folder, *arguments):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        command = [sys.executable, "generate.py", "--model", str(folder), *arguments]
        environment = ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def until(self, wanted, seconds=60):
        """Read until `wanted` is shown; returns what came up to then."""
        deadline = time.monotonic() + seconds
        while wanted not in self.shown:
            assert time.monotonic() < deadline, f"{wanted!r} is not in {self.shown!r}"
            if select.select([self.ours], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.ours, 65536).decode(errors="replace")
                except OSError:
                    assert wanted in self.shown, self.shown
        before, _, self.shown = self.shown.partition(wanted)
        return before

    def type(self, keys):
        os.write(self.ours, keys.encode())


@pytest.mark.skipif(pty is None, reason="no pseudo-terminals here")
def test_a_conversation_on_a_terminal_has_editing_history_and_paste(folder):
    terminal = Terminal(folder, "--chat", "--max-tokens", "3", "--temperature", "0", "--json")
    answers = []

    def turn(keys):
        terminal.until("> ")
        terminal.type(keys)
        terminal.until('"prompt_token_ids": ')
        answers.append(bytes_of(folder, json.loads(terminal.until("]") + "]")))
        terminal.until("cached]")

    turn("helo\x1b[Dl\n")  # a key to the left, then the missing letter
    assert answers[-1] == "user: hello\nassistant: "
    turn("\x1b[A\n")  # the line before, from the history
    assert answers[-1].endswith("user: hello\nassistant: ") and answers[-1].count("user: hello") == 2
    turn("\x1b[200~two\nlines\x1b[201~\n")  # a bracketed paste
    assert answers[-1].endswith("user: two\nlines\nassistant: ")
    terminal.until("> ")
    terminal.type("\x04")  # Ctrl-D
    terminal.until("evictions")
    assert terminal.process.wait(timeout=60) == 0


@pytest.mark.skipif(pty is None, reason="no pseudo-terminals here")
def test_a_long_prompt_has_a_bar_on_a_terminal_and_none_elsewhere(folder, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("word " * 3000)
    words = ("--prompt-file", str(file), "--max-tokens", "2", "--raw")
    terminal = Terminal(folder, *words)
    terminal.until("reading the prompt")
    terminal.until("evictions")
    assert terminal.process.wait(timeout=60) == 0
    assert "reading the prompt" not in run(folder, *words).stderr


@pytest.mark.parametrize("switch", [(), ("--no-prefix-cache",)])
def test_a_turn_of_a_conversation_knows_the_ones_before(folder, switch):
    turns = "a message of some length\nand one more\n"
    words = ("--chat", "--max-tokens", "9", "--temperature", "0", *switch)
    done = run(folder, *words, stdin=turns)
    assert done.returncode == 0
    assert ("prompt tokens known from before" in done.stderr) == (not switch)
    assert done.stdout == run(folder, *words[:5], stdin=turns).stdout


@pytest.mark.skipif(os.name != "posix", reason="a shell closes the stream")
def test_a_closed_standard_output_is_no_success(folder):
    command = f"{sys.executable} generate.py --model {folder} --prompt abc --max-tokens 2 >&-"
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "standard output is closed" in done.stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--trace", "{folder}"), "--trace"),
        (("--trace", "x.html", "--compare", "beacon"), "--compare beacon"),
    ],
)
def test_a_page_that_could_not_be_written_or_would_compare_nothing(folder, arguments, said):
    arguments = [argument.format(folder=folder) for argument in arguments]
    done = run(folder, "--prompt", "abc", *arguments)
    assert done.returncode == 2 and said in done.stderr and not done.stdout
