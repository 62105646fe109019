"""Messages of a conversation as chat templates expect them, whatever a user hands over.

Null fields, contents that are lists of text parts, a final answer that is to be continued. Knows
nothing of templates' language or of tokens.
"""

from collections.abc import Sequence
from typing import Any

CONTINUED = "[the answer goes on here] "  # its last space shows whether a template trims texts


class Null(str):
    """A message's null content: no text, and none where a template asks."""


def plain_message(message: dict) -> dict:
    """A message whose null fields are absent, as templates ask for presence; null content is
    empty text."""
    plain = {name: value for name, value in message.items() if value is not None}
    if message.get("content", "") is None:
        plain["content"] = Null()
    return plain


def is_parts(content: object) -> bool:
    """Whether a message's content is a list of parts, not a text."""
    return isinstance(content, list | tuple)


def part_texts(content: Sequence[Any]) -> list[str]:
    """The texts of a content that is a list of parts. ValueError for a part that is no text."""
    for part in content:
        right = (
            isinstance(part, dict) and part.get("type", "text") == "text" and type(part.get("text")) is str
        )
        if not right:
            raise ValueError(f"content: a part is {part!r:.200}; possible is {{'type': 'text', 'text': …}}")
    return [part["text"] for part in content]


def with_joined_text(message: dict) -> dict:
    """A message with its list of text parts as one text."""
    content = message.get("content")
    return message | {"content": "".join(part_texts(content))} if is_parts(content) else message


def shows_parts(text: str, messages: Sequence[dict]) -> bool:
    """Whether rendered text has the text of every part, and no part the way Python writes
    a dict."""
    parts = [part for message in messages if is_parts(message.get("content")) for part in message["content"]]
    return all(part["text"].strip() in text and repr(part) not in text for part in parts)


def with_mark(message: dict) -> dict:
    """The final assistant message with CONTINUED behind its text. ValueError if it has none to
    go on with."""
    content = message.get("content")
    if message["role"] != "assistant" or not content:
        raise ValueError(
            f"continue_final: the last message is {message!r:.200}; it must be an assistant's text"
        )
    if not is_parts(content):
        return message | {"content": content + CONTINUED}
    last = content[-1] | {"text": content[-1]["text"] + CONTINUED}
    return message | {"content": [*content[:-1], last]}


def up_to_mark(text: str) -> str:
    """What stands before CONTINUED; where the template trims texts, so is this one."""
    at = text.rfind(CONTINUED.strip())
    if at < 0:
        raise ValueError("continue_final: the chat template does not show the last message")
    trimmed = not text.startswith(CONTINUED, at)
    return text[:at].rstrip() if trimmed else text[:at]
