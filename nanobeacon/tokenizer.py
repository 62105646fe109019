"""Text to ids and back: a checkpoint's tokenizer, its chat template, and text that grows
token by token.

Knows nothing of requests, models or torch. tokenizer.json alone decides how text is cut, and which
special tokens plain text gets; tokenizer_config.json names special tokens, may hold the chat
template, and may know added tokens that tokenizer.json lacks, as added_tokens.json may: fine-tunes
often keep the base's file."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Template
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from .config import read_json
from .messages import (
    is_parts,
    part_texts,
    plain_message,
    shows_parts,
    up_to_mark,
    with_joined_text,
    with_mark,
)
from .template import compiled, rendered

UNKNOWN = "\ufffd"  # what decoders write for bytes that are no character, or not one yet
CHARACTER = 4  # bytes of the longest character, so the most tokens that one can be spread over
WINDOW = 16  # tokens that are decoded together at most, while none ends a character
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
ADDED_TOKEN_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


class Tokenizer:
    """A tokenizers backend, settings as in tokenizer_config.json, and the source of a
    chat template."""

    def __init__(self, backend: Backend, settings: dict | None = None, chat_template: str | None = None):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # A special token is given as its text or as {"content": its text}; null is as
        # good as absent.
        self.special_tokens: dict[str, str] = {}
        for name, value in (settings or {}).items():
            if not name.endswith("_token"):
                continue
            text = value["content"] if type(value) is dict else value
            if isinstance(text, str):
                self.special_tokens[name] = text
        self.bos_token_id = backend.token_to_id(self.special_tokens.get("bos_token", ""))
        self.eos_token_id = backend.token_to_id(self.special_tokens.get("eos_token", ""))
        self.chat_template = chat_template
        self._template: Template | None = None  # compiled when used: a broken one only breaks chat

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer | None":
        """None if a folder has no tokenizer files; ValueError if it has some, but no good
        tokenizer.json."""
        folder = Path(folder)
        found = sorted({file.name for pattern in TOKENIZER_FILES for file in folder.glob(pattern)})
        if not found:
            return None
        if "tokenizer.json" not in found:
            raise ValueError(f"{folder}: tokenizer.json is needed, there is only {', '.join(found)}")
        # 1. Each file for itself.
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} cannot be read: it is no file")  # a pipe would be waited for
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more precise
            raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error
        path = folder / "tokenizer_config.json"
        settings = read_json(folder / "special_tokens_map.json", optional=True)
        settings |= read_json(path, optional=True)
        # 2. What the settings say of tokens and templates.
        try:
            _add_tokens(backend, _added_tokens(folder, settings))
            return cls(backend, settings, _chat_template(folder, settings))
        except Exception as error:  # whatever a wrong value leads to
            raise ValueError(
                f"{path} or a file beside it has a value that fits nowhere: {error!r}"
            ) from error

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids, with what tokenizer.json adds to plain text or without it: a template writes
        its own BOS."""
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

    def render_chat(
        self,
        messages: list[dict],
        enable_thinking: bool | None = None,
        continue_final: bool = False,
        **variables,
    ) -> str:
        """A conversation as text, to be encoded with special=False; the template gets all
        variables.

        enable_thinking: None leaves the template's own default. continue_final: the text ends
        with the last message's, for the model to go on with it. ValueError for what the template
        cannot render."""
        if self.chat_template is None:
            raise ValueError("the model has no chat template (or none named 'default'): use plain text")
        if not are_messages(messages):
            raise ValueError(f"messages have to be dicts with a 'role', not {messages!r:.200}")
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        # none is not undefined
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
        given = self.special_tokens | defaults | variables
        # 1. Messages as templates expect them, the last one marked where the model is to go
        #    on with it.
        shown = [plain_message(message) for message in messages]
        for message in shown:
            if is_parts(message.get("content")):
                part_texts(message["content"])
        if continue_final:
            given["add_generation_prompt"] = False
            shown[-1] = with_mark(shown[-1])
        # 2. A list of parts as it is; where the template loses or misspells them, their text.
        joined = [with_joined_text(message) for message in shown]
        try:
            self._template = self._template or compiled(self.chat_template)
            text = self._render_parts(given, shown) if joined != shown else None
            if text is None:
                text = rendered(self._template, given | {"messages": joined})
        except Exception as error:  # a template can raise whatever Python raises
            raise ValueError(f"the chat template fails on these messages: {error}") from error
        return up_to_mark(text) if continue_final else text

    def _render_parts(self, given: dict, messages: list[dict]) -> str | None:
        """Rendered with contents that are lists of parts; None where the template does
        not take them."""
        try:
            text = rendered(self._template, given | {"messages": messages})
        except Exception:  # whatever it is: the texts alone are tried next
            return None
        return text if shows_parts(text, messages) else None


class TextStream:
    """The text of a growing list of ids, in pieces that are final once given out: joined,
    they are `.text`.

    New ids are decoded behind those before them, at first the prompt's end, because some decoders
    drop the space a text begins with. The stop string that is complete first counts, of several
    then the longest. Special tokens are no text, but a stop string may name them: it is looked
    for in text that shows those. In the text of the first `min_tokens` ids no stop string is
    looked for."""

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
        self._marks, self._stop = _mark_special(tokenizer, stop)
        self.stop = self._stop if min_tokens == 0 else ()  # looked for now
        self.stopped = False
        self._held = ""  # certain text that could begin a stop string
        self._pieces: list[str] = []
        self._new: list[str] = []  # those that nobody has taken yet
        tail = [token_id for token_id in prompt_token_ids[-WINDOW:] if tokenizer.has_text(token_id)]
        # The tail may begin inside a character, which byte-fallback decoders do not forgive: try
        # four places. If none ends whole, the prompt ends inside a character, which must not spill
        # into the output.
        tails = (tail[start:] for start in range(CHARACTER))
        whole = (ids for ids in tails if not tokenizer.decode(ids).endswith(UNKNOWN))
        self._follow(next(whole, []))

    @property
    def text(self) -> str:
        """All of the text so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def take(self) -> str:
        """What has become certain since the last call."""
        new = "".join(self._new)
        self._new = []
        return new

    def push(self, token_id: int) -> str:
        """Takes the next id; gives the text that became certain, maybe none."""
        self._count += 1
        if self._count > self.min_tokens:
            self.stop = self._stop
        if self.stopped:
            return ""
        if token_id in self._marks:
            shown = self._advance(last=True) + self._marks[token_id]
            return self._release(shown, last=False)
        if not self.tokenizer.has_text(token_id):
            return ""
        self._pending.append(token_id)
        return self._release(self._advance(last=False), last=False)

    def finish(self) -> str:
        """Gives what was held back: a broken character, and what could have begun a stop string."""
        if self.stopped:
            return ""
        return self._release(self._advance(last=True), last=True)

    def _follow(self, context: list[int]) -> None:
        """Begin anew behind ids whose text is known."""
        self._context = context
        self._context_text = self.tokenizer.decode(context)
        self._pending: list[int] = []  # ids after the context
        self._given = 0  # characters of their text that are certain and went on

    def _advance(self, last: bool) -> str:
        """The text that the pending ids make certain; all of theirs if they are the last."""
        # 1. Decode the pending ids behind their context. New bytes can spoil the context's last
        #    character; then they are decoded as if nothing came before.
        text = self.tokenizer.decode(self._context + self._pending)
        if text.startswith(self._context_text):
            text = text[len(self._context_text) :]
        else:
            text = self.tokenizer.decode(self._pending)
        # 2. A character that is not whole yet shows as up to three unknowns at the end; the rest
        #    is certain.
        unknown = min(len(text) - len(text.rstrip(UNKNOWN)), CHARACTER - 1)
        whole = last or (text and not unknown) or len(self._pending) >= WINDOW
        certain = len(text) if whole else max(len(text) - unknown, self._given)
        # 3. What is certain and did not go on yet goes on now; whole text becomes the next
        #    ids' context.
        new = text[self._given : certain]
        self._given = certain
        if whole:
            self._follow(self._pending)
        return new

    def _release(self, new: str, last: bool) -> str:
        """What of the certain text can be given out: up to a stop string, or to where one may
        have begun."""
        # 1. Look for stop strings that end in the new text, from where one could have begun.
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self.stop if stop in text]
        self.stopped = bool(found)
        # 2. Cut before the one that is complete first, of several then the longest; else hold back
        #    what the next text could complete.
        if found:
            _, cut = min((at + len(stop), at) for at, stop in found)
            self._held = ""
        else:
            begun = 0 if last else max((_overlap(text, stop) for stop in self.stop), default=0)
            cut = len(text) - begun
            self._held = text[cut:]
        # 3. Special tokens were only shown to be found.
        piece = text[:cut]
        for mark in self._marks.values():
            piece = piece.replace(mark, "")
        self._pieces.append(piece)
        self._new.append(piece)
        return piece


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of a text that are the beginning of a stop string,
    not all of it."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


def _mark_special(tokenizer: Tokenizer, stop: Sequence[str]) -> tuple[dict[int, str], tuple[str, ...]]:
    """Special tokens that stop strings name, each with a mark that no text can hold (a lone
    surrogate), and the stop strings with these marks in their place: a token is found by its id,
    never by its spelling."""
    if not stop:
        return {}, ()
    # The longest first: one token's spelling may be part of another's.
    texts = {token_id: tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.special_ids}
    longest_first = sorted(texts, key=lambda token_id: (-len(texts[token_id]), token_id))
    marks: dict[int, str] = {}
    marked = list(stop)
    for token_id in longest_first:
        text = texts[token_id]
        if any(text in one for one in marked):
            mark = chr(0xD800 + len(marks))
            marks[token_id] = mark
            marked = [one.replace(text, mark) for one in marked]
    return marks, tuple(marked)


def are_messages(value: object) -> bool:
    """Whether something is a conversation, of at least one message."""
    listed = isinstance(value, list | tuple) and bool(value)
    return listed and all(isinstance(message, dict) and "role" in message for message in value)


def _chat_template(folder: Path, settings: dict) -> str | None:
    """The template's text, from whichever file has it; of several named ones the default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if not template:
        template = read_json(folder / "chat_template.json", optional=True).get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    if not isinstance(template, str | None):
        raise ValueError(f"chat_template is {template!r:.80}; it must be a text")
    return template


def _added_tokens(folder: Path, settings: dict) -> dict[int, AddedToken]:
    """Tokens by id, of tokenizer_config.json's added_tokens_decoder and of added_tokens.json."""
    # 1. Which of them are special, by their text.
    named = list(settings.get("additional_special_tokens") or [])
    named += [value for name, value in settings.items() if name.endswith("_token")]
    special = {value["content"] if isinstance(value, dict) else value for value in named}
    # 2. The older file, of texts and ids alone; then the newer one, which says more of each.
    tokens = {}
    for text, token_id in read_json(folder / "added_tokens.json", optional=True).items():
        tokens[token_id] = AddedToken(text, special=text in special, normalized=text not in special)
    for token_id, entry in (settings.get("added_tokens_decoder") or {}).items():
        flags = {flag: entry[flag] for flag in ADDED_TOKEN_FLAGS if flag in entry}
        token = AddedToken(entry["content"], **flags)
        other = tokens.setdefault(int(token_id), token)
        if other.content != token.content:
            raise ValueError(
                f"id {token_id} is {other.content!r} in one file and {token.content!r} in another"
            )
        tokens[int(token_id)] = token
    return tokens


def _add_tokens(backend: Backend, tokens: dict[int, AddedToken]) -> None:
    """Give a backend the tokens it lacks, with these ids. ValueError where its own ids disagree."""
    known = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
    for token_id, token in sorted(tokens.items()):
        if known.get(token.content) == token_id:
            continue
        holder = backend.id_to_token(token_id)
        if holder is None or holder == token.content:
            backend.add_tokens([token])
        given = backend.token_to_id(token.content)
        if given != token_id:
            own = f"that id is {holder!r}" if holder is not None else f"the token has id {given}"
            raise ValueError(f"the added token {token.content!r} is to have id {token_id}, but {own} here")
