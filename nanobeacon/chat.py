"""A conversation at the command line: lines become messages, commands change the conversation.

Each turn is a fresh request whose prompt is the whole conversation. Knows lines and messages; how
an answer is generated and printed is handed in, and options are the programs' business.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .llm import LLM
from .printing import tell
from .request import Request, SamplingParams

PROMPT = "> "
FENCE = '"""'  # a line of its own before and after a message of several lines
HELP = f"""\
/help          this list
/reset         forget the conversation, but not the system message
/system TEXT   begin anew under this system message; without TEXT under none
/quit          end the conversation, as the end of the input does
A message of several lines begins and ends with a line {FENCE}; one that is pasted into a terminal needs none.
A message that begins with / is written with a space before it. Ctrl-C ends an answer."""
# From the token ids of a prompt to the request that has answered it
Answer = Callable[[list[int], SamplingParams], Request]


@dataclass
class Conversation:
    """The messages so far. `system` is kept apart, because a reset keeps it."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation, as a chat template takes it."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def command(self, line: str) -> bool:
        """Carry out a line that begins with /; False ends the conversation."""
        name, _, text = line[1:].partition(" ")
        if name == "quit":
            return False
        if name == "help":
            tell(HELP)
        elif name == "reset":
            self.turns.clear()
            tell("The conversation begins anew.")
        elif name == "system":
            self.system = text.strip() or None
            self.turns.clear()
            system = "under that message" if self.system else "without one"
            tell(f"The conversation begins anew, {system}.")
        else:
            tell(f"/{name} is no command; /help lists them")
        return True


def converse(llm: LLM, params: SamplingParams, answer: Answer, thinking: dict[str, Any]) -> None:
    """Read messages and answer them until the input ends or somebody says /quit.

    answer: generates and prints one answer; Ctrl-C inside keeps what there is of it. thinking:
    keyword arguments of `llm.chat_prompt`. Ctrl-C at the prompt is raised.
    """
    conversation = Conversation()
    read_line = line_reader()
    while True:
        message = read_message(read_line)
        if message is None:
            return
        # Commands have one line: a text that is pasted may begin with / too.
        if message.startswith("/") and "\n" not in message:
            if not conversation.command(message):
                return
        elif message.strip():
            turn(llm, params, answer, thinking, conversation, message.strip())


def turn(
    llm: LLM,
    params: SamplingParams,
    answer: Answer,
    thinking: dict[str, Any],
    conversation: Conversation,
    message: str,
) -> None:
    """One message and its answer. A message that cannot be answered is said, and leaves
    no trace."""
    conversation.turns.append({"role": "user", "content": message})
    try:
        # 1. The whole conversation as a prompt, and what the context leaves beside it.
        prompt = llm.chat_prompt(conversation.messages, **thinking)
        left = llm.engine.max_model_len - len(prompt)
        if left < 1:
            raise ValueError(
                f"the conversation has {len(prompt):,} tokens and the context holds "
                f"{llm.engine.max_model_len:,}: nothing is left for an answer; a shorter message, /reset or "
                "/system is possible"
            )
        if params.max_tokens is not None and params.max_tokens > left:
            tell(f"The context leaves {left:,} tokens for this answer, not {params.max_tokens:,}")
            params = replace(params, max_tokens=left)
        # 2. The answer.
        request = answer(prompt, params)
    except ValueError as error:
        conversation.turns.pop()
        tell(f"No answer: {' '.join(str(error).split())}")
        return
    # 3. It is part of the next prompt, also where Ctrl-C has cut it.
    conversation.turns.append({"role": "assistant", "content": request.text})


def read_message(read_line: Callable[[], str | None]) -> str | None:
    """The next message, of one line or of several between two FENCE lines; None when the
    input has ended."""
    line = read_line()
    if line is None or line.strip() != FENCE:
        return line
    lines: list[str] = []
    line = read_line()
    while line is not None and line.strip() != FENCE:  # the end of the input closes a message too
        lines.append(line)
        line = read_line()
    return "\n".join(lines)


def line_reader() -> Callable[[], str | None]:
    """A function that gives the next line without its end, None when there is none.

    On a terminal with line editing, history, and a paste of several lines as one. The prompt goes
    to terminals only.
    """
    if not sys.stdin.isatty():
        return _plain_line
    if not sys.stdout.isatty():
        # readline would write its prompt among the answers, which go somewhere else here
        return lambda: _plain_line(PROMPT if sys.stderr.isatty() else "")
    try:
        import readline

        # Python switches it off by default
        readline.parse_and_bind("set enable-bracketed-paste on")
    except ImportError:  # some systems have none; lines are then edited as the terminal does
        pass
    return _edited_line


def _plain_line(prompt: str = "") -> str | None:
    """The next line of standard input; None at its end."""
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _edited_line() -> str | None:
    """The next line, edited by readline; None for Ctrl-D."""
    try:
        return input(PROMPT)
    except EOFError:
        print()
        return None
