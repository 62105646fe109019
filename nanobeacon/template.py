"""Chat templates, rendered within bounds: they come with downloaded checkpoints and may
hold anything.

jinja2's sandbox keeps a template from reaching into Python. This room keeps it from running for
ever and from filling the memory: every loop, call, filter, assignment and joined text of a template
asks a `Meter`. Knows nothing of tokens or of messages.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from math import prod
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from .messages import Null

SECONDS = 10.0  # that compiling and rendering may take
# characters and items of any text, list or result: eight times the text of 250,000 tokens
MOST = 1 << 23
MOST_BITS = 10_000  # of a whole number
LONG_NUMBER = re.compile(r"\d{5,}|%[^%a-zA-Z]*\*")  # widths in a format that make much of little
# Filters and methods whose results can be far larger than what goes in, and which no chat
# template needs.
REFUSED_FILTERS = ("batch", "center", "filesizeformat", "slice", "sum", "urlize", "wordwrap", "xmlattr")
REFUSED_METHODS = ("expandtabs", "maketrans", "translate")


class Meter:
    """Raises SecurityError where one rendering takes too long or holds too much.

    One meter belongs to one environment, and so to one template; every rendering starts it anew.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """The time runs from now."""
        self.deadline = time.monotonic() + SECONDS

    def tick(self) -> None:
        """Ask for the time."""
        if time.monotonic() > self.deadline:
            raise SecurityError(f"it takes longer than {SECONDS:g} seconds")

    def size(self, value: Any, limit: int = MOST) -> int:
        """Characters and items in a value and in all that it holds, once for each place. Stops
        at `limit`."""
        # A list of what is still to be looked at instead of recursion: values may be nested deeply,
        # and one that holds itself ends at the limit.
        total = 0
        todo = [value]
        while todo:
            one = todo.pop()
            if isinstance(one, str | bytes):
                total += len(one)
            elif isinstance(one, dict):
                todo += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple | set | frozenset):
                todo += one
            total += 1
            if total + len(todo) > limit:
                raise SecurityError(f"it makes more than {limit:,} characters")
        return total

    def measured(self, value: Any) -> Any:
        """The value, which is not too large."""
        self.tick()
        self.size(value)
        return value

    def watched(self, values: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, each of which asks for the time."""
        for value in values:
            self.tick()
            yield value

    def joined(self, parts: Iterable[Any]) -> str:
        """All parts as one text; they are weighed before it is made."""
        parts = list(parts)
        self.measured(parts)
        return "".join(map(str, parts))

    def grows(self, size: int) -> None:
        """Refuse what is about to become too large."""
        if size > MOST:
            raise SecurityError(f"it makes more than {MOST:,} characters")


class _Metered(NodeTransformer):
    """Puts the meter into a parsed template: at loops, at what is stored and at what `~` joins.

    The names of its methods are jinja2's: `visit_` and the kind of a node. Each returns what
    stands in the node's place."""

    def _filtered(self, node: nodes.Expr, name: str) -> nodes.Expr:
        """The expression with one of the meter's functions around it, as if it said `| name`."""
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """`for x in values`: every item asks for the time."""
        self.generic_visit(node)
        node.iter = self._filtered(node.iter, "_watched")
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        """`set x = value`: what is stored has a bounded size."""
        self.generic_visit(node)
        node.node = self._filtered(node.node, "_measured")
        return node

    def visit_With(self, node: nodes.With) -> nodes.Node:
        """`with x = value`: the same."""
        self.generic_visit(node)
        node.values = [self._filtered(value, "_measured") for value in node.values]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b`: parts are weighed before they are joined."""
        self.generic_visit(node)
        return self._filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")


class Generation(Extension):
    """{% generation %} marks an assistant's text for training; to render it is to render
    what it holds."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Read up to the end tag; what stands between is rendered as if the tags were not there."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Environment(ImmutableSandboxedEnvironment):
    """What chat templates expect, in a sandbox whose every operation is metered.

    Templates are written for transformers, so that settings, globals and extensions are as there.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self.meter = Meter()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            finalize=self.meter.measured,
        )
        self.concat = self.meter.joined
        # 1. What transformers adds to jinja2, and what jinja2 has that only makes long texts.
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.tests["none"] = lambda value: value is None or isinstance(value, Null)
        self.filters["tojson"] = _tojson  # jinja's own escapes HTML
        # 2. Filters: some refused, the others weighed, and the meter's own, which `_Metered` names.
        for name in REFUSED_FILTERS:
            self.filters.pop(name)
        self.filters = {name: self._guarded(name, filter) for name, filter in self.filters.items()}
        self.filters["_watched"] = self.meter.watched
        self.filters["_measured"] = self.meter.measured
        self.filters["_joined"] = self.meter.joined

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """jinja2's hook behind its parser: here the meter enters the template."""
        return _Metered().visit(super()._parse(source, name, filename))

    def _guarded(self, name: str, function: Callable) -> Callable:
        """A filter that weighs what goes in and what comes out."""
        # jinja's context comes before the value
        own = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)  # jinja looks for its marks on it
        def guarded(*arguments: Any, **named: Any) -> Any:
            """The filter itself, between two looks at the meter."""
            self._weigh(name, [*arguments[own:], *named.values()])
            return self.meter.measured(function(*arguments, **named))

        return guarded

    def _weigh(self, name: str, arguments: list[Any]) -> None:
        """Refuse arguments of a call or filter that are too large, or that would make too much."""
        self.meter.tick()
        for argument in arguments:
            self.meter.size(argument)
            if isinstance(argument, int) and abs(argument) > MOST:
                raise SecurityError(f"{name} with a number above {MOST:,} would make too much")
        self.meter.grows(self._growth(name, arguments))

    def _growth(self, name: str, arguments: list[Any]) -> int:
        """The most characters a call can make of its arguments; 0 where that is no more
        than they have."""
        size = self.meter.size
        # A separator may come between all parts, whatever the order of the arguments.
        if name == "join":
            return prod(size(argument) for argument in arguments)
        if not arguments or not isinstance(arguments[0], str):
            return 0
        text = arguments[0]
        rest = arguments[1:]
        # An empty text is replaced at every place between characters.
        if name == "replace" and len(rest) >= 2:
            places = len(text) // max(1, size(rest[0]) - 1) + 1
            return places * size(rest[1])
        # The width may be a number or a text; every line gets it.
        if name == "indent":
            widths = [width if isinstance(width, int) else size(width) for width in rest]
            return (text.count("\n") + 1) * max(widths, default=4)
        # Every field may show all of the arguments.
        if name in ("format", "format_map"):
            if LONG_NUMBER.search(text):
                raise SecurityError("a format with a width like that would make too much")
            return (text.count("{") + text.count("%")) * size(rest)
        return 0

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        """jinja2's hook for every call: weighed before and after, and a few methods refused."""
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "a call")
        if isinstance(owner, str) and name in REFUSED_METHODS:
            raise SecurityError(f"{name} is not possible")
        itself = [owner] if isinstance(owner, str | list | tuple | dict) else []
        self._weigh(name, [*itself, *arguments, *named.values()])
        return self.meter.measured(super().call(context, function, *arguments, **named))

    def wrap_str_format(self, value: Any) -> Callable | None:
        """The sandbox's own str.format, which call() would not know."""
        formats = super().wrap_str_format(value)
        if formats is None:
            return None

        def bounded(*arguments: Any, **named: Any) -> str:
            """str.format, weighed before it runs."""
            self._weigh("format", [value.__self__, *arguments, *named.values()])
            return formats(*arguments, **named)

        return bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """jinja2's hook for + * ** %: refused before a number or a text becomes too large."""
        self.meter.tick()
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**":
                bits = left.bit_length() * right
            else:
                bits = left.bit_length() + right.bit_length()
            if bits > MOST_BITS:
                raise SecurityError("a number becomes too large")
        elif operator == "*":
            # A text or a list, so many times
            times = max([side for side in (left, right) if isinstance(side, int)], default=1)
            self.meter.grows(self.meter.size([left, right]) * times)
        elif operator == "%" and isinstance(left, str):
            self._weigh("format", [left, right])
        return self.meter.measured(super().call_binop(context, operator, left, right))


def compiled(source: str) -> Template:
    """A template, compiled within the same bounds. TemplateError and others for a broken one."""
    environment = Environment()
    environment.meter.size(source)
    return environment.from_string(source)


def rendered(template: Template, variables: dict[str, Any]) -> str:
    """The text of a compiled template. Whatever fails is a TemplateError or an error of
    Python's own."""
    meter = template.environment.meter
    meter.start()
    pieces = []
    length = 0
    for piece in template.generate(variables):
        meter.tick()
        length += len(piece)
        meter.grows(length)
        pieces.append(piece)
    return "".join(pieces)


def _raise(message: str) -> None:
    """`raise_exception(...)`, with which templates refuse messages."""
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: characters as they are."""
    if isinstance(indent, int) and indent > 16:
        raise SecurityError(f"tojson with indent={indent} would make too much")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
