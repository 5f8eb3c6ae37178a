r"""The rule `regex`: the response matches a regular expression of Python's `re`."""

import re

from plimsoll.config.base import Options
from plimsoll.errors import RecipeError

_ANSWER = "{answer}"


def regex(
    prompt: str,
    response: str,
    answer: object,
    *,
    pattern: str | None = None,
    full: bool = True,
    ignore_case: bool = False,
    dotall: bool = True,
    right: float = 1.0,
    wrong: float = 0.0,
) -> float:
    r"""`right` where the response matches `pattern`, else `wrong`.

    Without `pattern` the row's answer is the pattern. In `pattern`, `{answer}` stands for the row's answer, character
    for character, as one group: `<answer>\s*{answer}\s*</answer>` (the literal text is `[{]answer}`; it cannot stand
    inside `[…]`). `full` asks for a match of the whole response, white space at its ends included; otherwise anywhere.
    `dotall` lets `.` match newlines. A pattern that takes exponential time is ended by `reward.timeout`, which loses
    that response. Raises ValueError for an answer that is no pattern, or none where `{answer}` asks for it.
    """
    flags = (re.IGNORECASE if ignore_case else 0) | (re.DOTALL if dotall else 0)
    compiled = _of_answer(answer, flags) if pattern is None else re.compile(_filled(pattern, answer), flags)
    found = compiled.fullmatch(response) if full else compiled.search(response)
    return wrong if found is None else right


def check_options(options: Options) -> None:
    """Raises RecipeError, with the position, for a pattern that does not compile."""
    pattern = options.get("pattern")
    if pattern is None:
        return
    if not isinstance(pattern, str):
        raise RecipeError(f"reward.options.pattern: {pattern!r} is not text.")
    stand_in = f"(?:{'x' * (len(_ANSWER) - 4)})"  # as long as what it stands for: positions in messages stay right
    try:
        re.compile(pattern.replace(_ANSWER, stand_in))
    except (re.error, OverflowError, RecursionError) as error:
        raise RecipeError(
            f"reward.options.pattern: {pattern!r} is not a regular expression of Python: {error}."
        ) from error


def _filled(pattern: str, answer: object) -> str:
    if _ANSWER not in pattern:
        return pattern
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"regex needs text or a number as answer for {_ANSWER}; this row's is {answer!r}")
    return pattern.replace(_ANSWER, f"(?:{re.escape(str(answer))})")


def _of_answer(answer: object, flags: int) -> re.Pattern[str]:
    if not isinstance(answer, str):
        raise ValueError(
            "regex needs a pattern: set the option `pattern`, or give rows whose answer is one; "
            f"this row's is {answer!r}"
        )
    try:
        return re.compile(answer, flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"regex cannot compile this row's answer {answer!r}: {error}") from error
