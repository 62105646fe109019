"""Text to ids and back: a checkpoint's tokenizer, its chat template, and text that grows token by token.

Knows nothing of requests, models or torch. tokenizer.json alone decides how text is cut, and which special
tokens plain text gets; tokenizer_config.json names special tokens and may hold the chat template."""

import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Template
from tokenizers import Tokenizer as Backend

from .template import compiled, rendered

UNKNOWN = "\ufffd"  # what decoders write for bytes that are no character, or not one yet
CHARACTER = 4  # bytes of the longest character, so the most tokens that one can be spread over
WINDOW = 16  # tokens that are decoded together at most, while none ends a character
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


class Tokenizer:
    """A tokenizers backend, settings as in tokenizer_config.json, and the source of a chat template."""

    def __init__(self, backend: Backend, settings: dict | None = None, chat_template: str | None = None):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        # A special token is given as its text or as {"content": its text}; null is as good as absent.
        named = {name: value for name, value in (settings or {}).items() if name.endswith("_token")}
        texts = {name: value["content"] if type(value) is dict else value for name, value in named.items()}
        self.special_tokens = {name: text for name, text in texts.items() if isinstance(text, str)}
        self.bos_token_id = backend.token_to_id(self.special_tokens.get("bos_token", ""))
        self.eos_token_id = backend.token_to_id(self.special_tokens.get("eos_token", ""))
        self.chat_template = chat_template
        self._template: Template | None = None  # compiled when used: a broken one only breaks chat

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer | None":
        """None if a folder has no tokenizer files; ValueError if it has some, but no good tokenizer.json."""
        folder = Path(folder)
        found = sorted({file.name for pattern in TOKENIZER_FILES for file in folder.glob(pattern)})
        if not found:
            return None
        if "tokenizer.json" not in found:
            raise ValueError(f"{folder}: tokenizer.json is needed, there is only {', '.join(found)}")
        try:
            backend = Backend.from_file(str(folder / "tokenizer.json"))
            settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
            return cls(backend, settings, _chat_template(folder, settings))
        except Exception as error:  # tokenizers raises nothing more precise
            raise ValueError(f"{folder}: the tokenizer files cannot be read: {error}") from error

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids, with what tokenizer.json adds to plain text or without it: a template writes its own BOS."""
        try:
            return self.backend.encode(text, add_special_tokens=special).ids
        except TypeError as error:  # no str, or one with lone surrogates
            raise ValueError(f"text has to be a str that UTF-8 can express, not {text!r:.80}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens, and ids without a token, have none."""
        return self.backend.decode(ids, skip_special_tokens=True)

    def has_text(self, token_id: int) -> bool:
        """Whether decode() looks at an id."""
        return 0 <= token_id < self.size and token_id not in self.special_ids

    def render_chat(self, messages: list[dict], enable_thinking: bool = True, **variables) -> str:
        """A conversation as text, to be encoded with special=False; the template gets all variables."""
        if self.chat_template is None:
            raise ValueError("the model has no chat template (or none named 'default'): use plain text")
        if not are_messages(messages):
            raise ValueError(f"messages have to be dicts with a 'role', not {messages!r:.200}")
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True}  # none is not undefined
        given = self.special_tokens | defaults | variables
        try:
            self._template = self._template or compiled(self.chat_template)
            return rendered(
                self._template, given | {"messages": messages, "enable_thinking": enable_thinking}
            )
        except Exception as error:  # a template can raise whatever Python raises
            raise ValueError(f"the chat template fails on these messages: {error}") from error


class TextStream:
    """The text of a growing list of ids, in pieces that are final once given out: joined, they are `.text`.
    New ids are decoded behind those before them, at first the prompt's end, because some decoders drop the
    space a text begins with. The stop string that is complete first counts, of several then the longest.
    In the text of the first `min_tokens` ids no stop string is looked for."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        if "" in stop:
            raise ValueError("stop: '' would end any text before it begins; give at least one character")
        self.tokenizer = tokenizer
        self.min_tokens = min_tokens
        self._count = 0  # ids taken
        self._stop = tuple(stop)
        self.stop = self._stop if min_tokens == 0 else ()  # looked for now
        self.stopped, self._held = False, ""  # held: certain text that could begin a stop string
        self._pieces: list[str] = []
        tail = [token_id for token_id in prompt_token_ids[-WINDOW:] if tokenizer.has_text(token_id)]
        # The tail may begin inside a character, which byte-fallback decoders do not forgive: try four places.
        # If none ends whole, the prompt ends inside a character, which must not spill into the output.
        tails = (tail[start:] for start in range(CHARACTER))
        self._follow(next((ids for ids in tails if not tokenizer.decode(ids).endswith(UNKNOWN)), []))

    @property
    def text(self) -> str:
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def push(self, token_id: int) -> str:
        """Takes the next id; gives the text that became certain, maybe none."""
        self._count += 1
        if self._count > self.min_tokens:
            self.stop = self._stop
        if self.stopped or not self.tokenizer.has_text(token_id):
            return ""
        self._pending.append(token_id)
        return self._advance(last=False)

    def finish(self) -> str:
        """Gives what was held back: a broken character, and what could have begun a stop string."""
        return "" if self.stopped else self._advance(last=True)

    def _follow(self, context: list[int]) -> None:
        self._context, self._context_text = context, self.tokenizer.decode(context)
        self._pending: list[int] = []  # ids after the context
        self._given = 0  # characters of their text that are certain and went on

    def _advance(self, last: bool) -> str:
        text = self.tokenizer.decode(self._context + self._pending)
        # New bytes can spoil the context's last character; then they are decoded as if nothing came before.
        follows = text.startswith(self._context_text)
        text = text[len(self._context_text) :] if follows else self.tokenizer.decode(self._pending)
        # A character that is not whole yet shows as up to three unknowns at the end; the rest is certain.
        unknown = min(len(text) - len(text.rstrip(UNKNOWN)), CHARACTER - 1)
        whole = last or (text and not unknown) or len(self._pending) >= WINDOW
        certain = len(text) if whole else max(len(text) - unknown, self._given)
        new, self._given = self._held + text[self._given : certain], certain
        if whole:
            self._follow(self._pending)
        ends = [(at + len(stop), at) for stop in self.stop if (at := new.find(stop)) >= 0]
        begun = [n for stop in self.stop for n in range(1, len(stop)) if not last and new.endswith(stop[:n])]
        self.stopped = bool(ends)
        cut = min(ends)[1] if ends else len(new) - max(begun, default=0)
        piece, self._held = new[:cut], "" if ends else new[cut:]
        self._pieces.append(piece)
        return piece


def are_messages(value: object) -> bool:
    """Whether something is a conversation, of at least one message."""
    listed = isinstance(value, list | tuple) and bool(value)
    return listed and all(isinstance(message, dict) and "role" in message for message in value)


def _chat_template(folder: Path, settings: dict) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
