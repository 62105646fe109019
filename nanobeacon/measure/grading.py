r"""Whether a text ends in the right answer: the last \boxed{...} that is closed, or else the last number.

Answers are compared as exact fractions where both are numbers, whatever their spelling, and as strings where
not: `x^2+1` and `1+x^2` differ. Knows text alone; nothing of models, prompts or files.
"""

import re
from fractions import Fraction

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_LAST = r"-?\\[dtc]?frac\{-?\d+\}\{\d+\}|(?:(?<![\w.)}])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?"
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
_POWER = r"(?:\s*\^\s*\{?\d\}?)?"
_UNITS = (
    r"degrees?|percent|dollars?|cents?|euros?|units?|inch(?:es)?|feet|foot|ft|yards?|miles?|mph|[kcm]m|kg"
    r"|(?:kilo|centi|milli)?met(?:er|re)s?|(?:kilo)?grams?|lit(?:er|re)s?|seconds?|sec|minutes?|min|hours?"
    r"|days?|weeks?|months?|years?|points?|ways|people|students"
)
_CLEANING = [  # (pattern, replacement), in this order
    (r"\u2212", "-"),
    (r"\\[dtc]frac", r"\\frac"),
    (rf"^{_TEXT}$", r"\1"),
    (rf"(?<=[\d}}])\s*(?:\\ )?{_TEXT}{_POWER}\s*$", ""),  # behind a number words are units …
    (_TEXT, r"\1"),  # … elsewhere they belong to the answer
    (r"\{,\}", ","),
    (r"\\(?:left|right)(?![a-z])|\\displaystyle|\\[!,;: ()\[\]]|~", ""),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\\?%|\\?\$|\.\s*$", ""),
    (r"\s+", " "),
    (rf"(?<=[\d}}]) ?(?:square |cubic )?(?:{_UNITS}){_POWER}(?: ?(?:per|/) ?[a-z]+)? ?$", ""),
    (r"(\\frac|\\sqrt) ?(\\pi|\w)", r"\1{\2}"),
    (r"(\\frac\{(?:[^{}]|\{[^{}]*\})*\}) ?(\\pi|\w)", r"\1{\2}"),
    (r"([\^_])\{(\w)\}", r"\1\2"),
    (r"(?<=\d) (\d+)/(\d+) ?$", r"\\frac{\1}{\2}"),
    (r" ", ""),
    (r"^[a-zA-Z]=", ""),
    (r"^\(([A-Za-z])\)$", r"\1"),
]
_DIGITS = r"\d+\.?\d*|\.\d+"
_FRACTION = rf"(\d*)\\frac\{{(-?)({_DIGITS})\}}\{{({_DIGITS})\}}"  # a whole number may stand before it
_NUMBER = re.compile(rf"([+-]?)(?:{_FRACTION}|({_DIGITS})(?:/({_DIGITS}))?)")


def answer_in(text: str) -> str | None:
    """What a text gives as its answer; None where it has neither a closed box nor a number."""
    for box in reversed(list(_BOX.finditer(text))):
        depth = 1
        for end in range(box.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[box.end() : end]
    numbers = re.findall(_LAST, text.replace("\u2212", "-"))
    return numbers[-1].rstrip(",") if numbers else None


def normalise(answer: str) -> str:
    """One spelling for equal answers: "p/q" or "p" for a number, else the text without its trimmings."""
    text = answer.strip()
    for pattern, replacement in _CLEANING:
        text = re.sub(pattern, replacement, text)
    thousands = re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text)
    number = _NUMBER.fullmatch(text.replace(",", "") if thousands else text)
    if number is None:
        return text
    minus, whole, minus_too, top, bottom, plain, divisor = number.groups()
    try:
        value = Fraction(whole or 0) + Fraction(top or plain) / Fraction(bottom or divisor or 1)
    except (ZeroDivisionError, ValueError):  # ValueError: more digits than Python reads
        return text
    return str(-value if (minus == "-") != (minus_too == "-") else value)


def is_right(text: str, answer: object) -> bool:
    """Whether the answer in a text is the wanted one, which may stand in a box itself."""
    given, wanted = answer_in(text), str(answer)
    wanted = answer_in(wanted) if _BOX.search(wanted) else wanted
    return given is not None and wanted is not None and normalise(given) == normalise(wanted)
