r"""The rule `choice`: multiple choice, where the letter stands in one of the ways in which models write it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from plimsoll.config.base import Options
from plimsoll.errors import RecipeError
from plimsoll.reward.marks import last_mark

_LATEX = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf|mathsf|left|right)(?![A-Za-z])|[${}]")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_OPENING = r"[\s*_`(\[\"']*"
# After these a capital A is a letter ("A because"); before any other small letter it is the article ("A dog").
_REASON = "as|because|by|due|for|from|since"
_AFTER_A_LETTER = f"{_REASON}|and|but|is|or|was|which|would"


def choice(
    prompt: str,
    response: str,
    answer: object,
    *,
    letters: str = "ABCDEFGHIJ",
    right: float = 1.0,
    wrong: float = 0.0,
    strict: bool = False,
) -> float:
    r"""`right` where the response chooses the answer's letter, else `wrong`.

    The answer is a letter ("B", "(B)", "b)") or an index that counts from 0 (1 is "B"). The response's choice is what
    it marks last: `\boxed{B}`, `#### B`, `Answer: B`, `<answer>B</answer>`, "the answer is (B)", "option B". Without a
    mark it is the letter that the response begins with ("B", "(B) Paris", "B. Paris"); else the last capital letter
    that stands alone, or nothing with `strict`. "A" and "I" as words do not count.
    Ambiguous is wrong: a mark with several letters ("A or B", "BC") or none. "Not" is not understood: "it is not B" is
    B where nothing is marked. Raises ValueError for an answer that is none of `letters`.
    """
    shapes = _shapes(letters.upper())
    expected = _expected(answer, letters.upper(), shapes)
    return right if _chosen(response, shapes, strict) == expected else wrong


def check_options(options: Options) -> None:
    """Raises RecipeError for letters that cannot be told apart."""
    letters = options.get("letters", "AB")
    if not isinstance(letters, str) or not letters.isalnum() or len(set(letters.upper())) != len(letters):
        raise RecipeError(
            f"reward.options.letters: {letters!r} should be different letters or digits in one text, such as ABCD."
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class _Shapes:
    alone: re.Pattern[str]  # a letter that is no part of a word, a name or a formula, and no article
    whole: re.Pattern[str]  # a text that is nothing but a letter; small ones too
    leading: re.Pattern[str]  # a letter and what sets it off from the text behind it
    phrase: re.Pattern[str]  # "the answer is (B)", "option B"
    joined: re.Pattern[str]  # right behind a letter: "or B", ", B"


@lru_cache(maxsize=8)
def _shapes(letters: str) -> _Shapes:
    one = f"[{re.escape(letters)}]"
    word = rf"(?![AI]\s+(?!(?:{_AFTER_A_LETTER})\b)[a-z])"
    alone = rf"(?<![\w'’.\-\\])(?<!\w\(){word}({one})(?![\w'’\-]|\.\w)"
    leads = (
        r"(?:answer|option|choice)(?:\s+(?:is|was|must\s+be|should\s+be|would\s+be))?\s*:?\s*(?:(?:option|choice)\s+)?"
    )
    return _Shapes(
        alone=re.compile(alone),
        whole=re.compile(rf"{_OPENING}({one})[\s*_`)\]\"'.:]*", re.IGNORECASE),
        leading=re.compile(rf"{_OPENING}{alone}(?:[*_`\"']*[)\].:,]|[*_`\"']*[ \t]*\n|\s+(?:{_REASON})\b)"),
        phrase=re.compile(rf"\b(?i:{leads}){_OPENING}{alone}"),
        joined=re.compile(rf"[\s*_`)\]\"'.:]*(?:and|or|,|/|&|;){_OPENING}{alone}"),
    )


def _expected(answer: object, letters: str, shapes: _Shapes) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        return letters[answer]
    whole = shapes.whole.fullmatch(_plain(answer)) if isinstance(answer, str) else None
    if whole is None:
        raise ValueError(
            f"choice needs one of the letters {letters} or an index from 0 to {len(letters) - 1} as answer; "
            f"this row's is {answer!r}"
        )
    return whole[1].upper()


def _chosen(response: str, shapes: _Shapes, strict: bool) -> str | None:
    marks = list(_marks(response, shapes))
    if marks:
        return max(marks, key=lambda mark: mark[0])[1]
    text = _plain(response)
    begun = _begun(text, shapes)
    if begun is not None:
        return _unless_joined(text, begun, shapes)
    alone = [] if strict else [match for match in shapes.alone.finditer(text) if not _is_pronoun(text, match)]
    several = len(alone) > 1 and shapes.joined.match(text, alone[-2].end(1)) is not None
    return alone[-1][1] if alone and not several else None


def _marks(response: str, shapes: _Shapes) -> Iterator[tuple[int, str | None]]:
    """Where the last mark of each kind begins, and its letter (None: no single one)."""
    mark = last_mark(response, answer_lines=True)
    if mark is not None:
        yield mark.start, _letter(mark.content, shapes)
    tags = list(_TAG.finditer(response))
    if tags:
        yield tags[-1].start(), _letter(tags[-1][1], shapes)
    text = _LATEX.sub(lambda match: " " * len(match[0]), response)  # positions stay
    phrases = list(shapes.phrase.finditer(text))
    if phrases:
        yield phrases[-1].start(), _unless_joined(text, phrases[-1], shapes)


def _letter(content: str, shapes: _Shapes) -> str | None:
    """The one letter that a marked text names, or None."""
    text = _plain(content)
    begun = _begun(text, shapes)
    if begun is not None:
        return _unless_joined(text, begun, shapes)
    named = {match[1] for match in shapes.alone.finditer(text)}
    return named.pop() if len(named) == 1 else None


def _begun(text: str, shapes: _Shapes) -> re.Match[str] | None:
    """Where a text is a letter, or begins with one that is set off from the rest."""
    return shapes.whole.fullmatch(text) or shapes.leading.match(text)


def _unless_joined(text: str, match: re.Match[str], shapes: _Shapes) -> str | None:
    """The letter of the match; None for "A or B", which is no choice."""
    return None if shapes.joined.match(text, match.end(1)) else match[1].upper()


def _is_pronoun(text: str, match: re.Match[str]) -> bool:
    """An unmarked I is taken for the word unless it is set off: "(I)", "**I**"."""
    return match[1] == "I" and text[max(0, match.start(1) - 1) : match.start(1)] not in ("(", "*", "[")


def _plain(text: str) -> str:
    return _LATEX.sub(" ", text).strip()
