r"""The rule `math`: equality of mathematical answers by math-verify (extra `math`), which decides with sympy.

math-verify's own time-outs are signals; they are switched off. What bounds a response such as `9^{9^{9}}`, which sympy
would expand, is the pool: the worker process is killed at `reward.timeout` and that response alone is lost.
"""

import logging
import math as numbers
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, cast, runtime_checkable

from math_verify import parse, verify
from sympy import Basic, MatrixBase

from plimsoll.reward.marks import last_marked
from plimsoll.reward.rules import bare_number

# It warns that its time-outs are off, in every worker.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Not the `\\` that ends a row of a matrix.
_MARKUP = re.compile(r"(?<!\\)\\[()\[\],;:! ]|\\(?:left|right|displaystyle)(?![A-Za-z])|\\?\$|\*\*")
_INLINE = re.compile(r"\$[^$]+\$|\\\(.+?\\\)")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
# "42 apples" in a marked line. Words that change the value are no units.
_UNITS = re.compile(r"(\S*\d)\s+(?!(?:pi|or|and|to|times)\b)[A-Za-z]{2,}(?:\s+[A-Za-z]{2,})*")


@runtime_checkable
class _Array(Protocol):
    """numpy's arrays and scalars; numpy is not imported for this."""

    def tolist(self) -> Any: ...


def math(
    prompt: str, response: str, answer: object, *, right: float = 1.0, wrong: float = 0.0, strict: bool = False
) -> float:
    r"""`right` where the response's answer is mathematically equal to the row's, else `wrong`.

    The response's answer is the last mark of the whole text: `\boxed{…}`, `#### …` or a line `Answer: …`. Without one
    it is what math-verify finds (roughly: after "answer is", else the last formula or number), or with `strict` wrong.
    The row's answer is a number, a formula, a worked solution that ends in a mark, or a list of accepted ones.
    Raises ValueError for an answer that is empty or no mathematics.
    """
    accepted = tuple(_gold(one) for one in _accepted(answer))
    for gold in accepted:
        _parsed_gold(gold)  # an answer that nobody can meet is told whatever the response is
    marked = last_marked(response, answer_lines=True)
    if marked is None and strict:
        return wrong
    given = response if marked is None else _clean(marked)
    if any(_same_text_or_number(given, gold) for gold in accepted):
        return right
    if marked is not None and all(_integers(given, gold) for gold in accepted):
        return wrong
    parsed = _parse(response if marked is None else _readable(marked))
    found = any(verify(_parsed_gold(gold), parsed, timeout_seconds=None) for gold in accepted)
    return right if found else wrong


def _accepted(answer: object) -> Sequence[object]:
    """The answers that count: the one of the row, or all of its list."""
    if isinstance(answer, _Array):
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        return [answer]
    answers = cast("Sequence[object]", answer)
    if not answers:
        raise ValueError("math needs an answer; this row's is an empty list")
    return answers


def _gold(answer: object) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"math needs a number or text as answer; this row's is {answer!r}")
    if isinstance(answer, float) and not numbers.isfinite(answer):
        raise ValueError(f"math needs a finite number as answer; this row's is {answer!r}")
    text = str(answer)
    marked = last_marked(text, answer_lines=True)
    gold = _clean(text if marked is None else marked)
    if not gold:
        raise ValueError(f"math needs an answer; this row's is {answer!r}")
    return gold


@lru_cache(maxsize=256)
def _parsed_gold(gold: str) -> list[Any]:
    """The samples of a group share their answer; parsing it is most of the work."""
    parsed = _parse(_formula(gold))
    if not any(isinstance(one, Basic | MatrixBase) for one in parsed):
        raise ValueError(f"math cannot read this row's answer as mathematics: {gold!r}")
    return parsed


def _parse(text: str) -> list[Any]:
    # None is meant for this and works; its annotation forgets it.
    return cast("list[Any]", parse(text, parsing_timeout=cast("int", None)))


def _clean(text: str) -> str:
    """Without the mark-up around an answer: `$…$`, `\\(…\\)`, `**…**`, a full stop."""
    text = _MARKUP.sub(lambda match: " " if match[0] in ("\\ ", "\\,", "\\;", "\\:") else "", text)
    return text.strip().rstrip(".").strip()


def _readable(marked: str) -> str:
    """For math-verify: a formula as it is, and of "the value is $5$" only what is marked as one."""
    prose = _INLINE.sub("", marked)
    if prose != marked and re.search(r"[A-Za-z]", prose):
        return marked
    return _formula(_clean(marked))


def _formula(text: str) -> str:
    units = _UNITS.fullmatch(text)
    return f"${units[1] if units else text}$"


def _same_text_or_number(given: str, gold: str) -> bool:
    """The cheap comparison, enough for most right answers."""
    if _normalized(given) == _normalized(gold):
        return True
    number = bare_number(gold)
    return number is not None and bare_number(given) == number


def _integers(given: str, gold: str) -> bool:
    """Both are whole numbers; being different is then the last word."""
    return all(text.removeprefix("-").isdecimal() for text in (given, gold))


def _normalized(text: str) -> str:
    text = _TEXT.sub(r"\1", _clean(text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    text = re.sub(r"\s+", " ", text)
    return re.sub(r" ?([^\w\s]) ?", r"\1", text)
