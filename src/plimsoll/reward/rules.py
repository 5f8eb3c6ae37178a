"""The built-in rules: exact match, and equality of numbers. Both have our own signature and return 1.0 or 0.0."""

import re
from fractions import Fraction

from plimsoll.reward.marks import last_marked

_MAX_EXPONENT = 400
"""Larger exponents are not numbers to us: 1e999999999 as a Fraction would take all memory."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,400}(?!\d))"
# A minus is a sign only where no operand stands before it: "10-5" ends with 5, "= -5" with -5.
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-+])?\$?(?<![\w.])"
    rf"(?:\\[dt]?frac\{{(?P<top>-?{_DIGITS})\}}\{{(?P<bottom>{_DIGITS})\}}"
    rf"|(?P<whole>{_DIGITS}(?:\.\d{{1,400}}(?!\d))?|\.\d{{1,400}}(?!\d))"
    rf"(?:[eE](?P<exponent>[-+]?\d{{1,400}})(?!\d)|\s?/\s?(?P<over>{_DIGITS})(?![\d/]))?)"
)
_DECORATION = re.compile(r"\\(?:text|mathrm|textbf)\s*\{[^{}]*\}|\\[,!;$%]|\^\s*\{?\\circ\}?")


def exact_match(
    prompt: str, response: str, answer: object, *, strip: bool = True, case_sensitive: bool = True
) -> float:
    """1.0 where the response is the answer, character for character.

    `strip` removes white space around both, `case_sensitive` False compares without case. Numbers are compared as
    Python prints them. Raises TypeError for an answer that is not text or a number.
    """
    if not isinstance(answer, str | int | float):
        raise TypeError(f"exact_match compares with text or a number; this row's answer is {type(answer).__name__}")
    given, expected = response, str(answer)
    if strip:
        given, expected = given.strip(), expected.strip()
    if not case_sensitive:
        given, expected = given.casefold(), expected.casefold()
    return float(given == expected)


def number(prompt: str, response: str, answer: object) -> float:
    r"""1.0 where the response's number equals the answer's, by value: "1,234" = 1234, "1/2" = 0.5 = "\frac{1}{2}".

    The number is looked for in the text after the last `####` (up to the end of its line) or inside the last
    `\boxed{}`, whichever comes later; without either it is the last number of the response. The answer is read in the
    same way, so that worked solutions that end in `#### 42` serve as answers. No number in the response: 0.0.
    Raises ValueError where the answer has no number.
    """
    expected = find_number(str(answer)) if isinstance(answer, str | int | float) and answer is not True else None
    if expected is None or isinstance(answer, bool):
        raise ValueError(f"number needs an answer with a number in it; this row's answer is {answer!r}")
    return float(find_number(response) == expected)


def find_number(text: str) -> Fraction | None:
    """The number that the text gives as its answer (see `number`), or None."""
    text = text.replace("\N{MINUS SIGN}", "-")
    marked = last_marked(text)
    if marked is None:
        found = _numbers(text)
        return found[-1] if found else None
    marked = _DECORATION.sub(" ", marked).rpartition("=")[2]
    found = _numbers(marked)
    around = _NUMBER.sub("", marked)
    # "42 apples" is a number; "2x + 1", "\sqrt{2}" and "x^2" are not.
    return found[0] if len(found) == 1 and not set(around) & set("\\^_{}") else None


def bare_number(text: str) -> Fraction | None:
    r"""The number that the text is, decoration (`\$`, `\text{ apples}`, `^\circ`) aside; None where it is more."""
    text = _DECORATION.sub(" ", text.replace("\N{MINUS SIGN}", "-")).strip()
    match = _NUMBER.fullmatch(text)
    return None if match is None else _value(match)


def _numbers(text: str) -> list[Fraction]:
    values = (_value(match) for match in _NUMBER.finditer(text))
    return [value for value in values if value is not None]


def _value(match: re.Match[str]) -> Fraction | None:
    top = match["top"] or match["whole"]
    bottom = match["bottom"] or match["over"] or "1"
    exponent = int(match["exponent"] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        return None
    denominator = Fraction(bottom.replace(",", ""))
    if denominator == 0:
        return None
    value = Fraction(top.replace(",", "")) / denominator * Fraction(10) ** exponent
    return -value if match["sign"] == "-" else value
