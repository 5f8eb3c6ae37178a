r"""Where a text marks its answer: `\boxed{…}`, `#### …`, a line `Answer: …`. The mark that comes last counts.

The whole text is searched: a mark far from the end is as good as one in the last line.
"""

import re
from dataclasses import dataclass

_HASHES = re.compile(r"####[ \t]*([^\n]*)")
# "**Answer:** 5", "Final answer: 5", and the answer on the next line.
_ANSWER_LINE = re.compile(r"(?<!\w)answer[ \t*_]{0,8}:[*_]{0,3}\s*([^\n]*)", re.IGNORECASE)
# Escaped braces are characters, not groups.
_BRACES = re.compile(r"(?P<box>\\boxed\s*\{)|\\[{}]|(?P<open>\{)|(?P<close>\})")


@dataclass(slots=True, kw_only=True, frozen=True)
class Mark:
    """A marked answer; positions are characters of the text."""

    start: int  # of the mark itself
    end: int  # after its content
    content: str


def last_mark(text: str, *, answer_lines: bool = False) -> Mark | None:
    r"""The last closed `\boxed{}` or the line after the last `####`, whichever comes later in the text.

    With `answer_lines` a line `Answer: …` is a mark too. A box within a marked line, and a marked line within a box,
    count as the box. None where there is no mark.
    """
    lines = [_last_line(_HASHES, text)]
    if answer_lines:
        lines.append(_last_line(_ANSWER_LINE, text))
    line = max((mark for mark in lines if mark is not None), key=lambda mark: mark.start, default=None)
    box = _last_box(text)
    return line if box is None or (line is not None and line.start >= box.end) else box


def last_marked(text: str, *, answer_lines: bool = False) -> str | None:
    """The content of `last_mark`, or None."""
    mark = last_mark(text, answer_lines=answer_lines)
    return None if mark is None else mark.content


def _last_line(pattern: re.Pattern[str], text: str) -> Mark | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return None if last is None else Mark(start=last.start(), end=last.end(), content=last.group(1))


def _last_box(text: str) -> Mark | None:
    """The closed box that begins last; nested braces stay whole. One pass: there may be thousands of open boxes."""
    opened: list[re.Match[str]] = []
    found: Mark | None = None
    for brace in _BRACES.finditer(text):
        if brace["box"] or brace["open"]:
            opened.append(brace)
        elif brace["close"] and opened:
            opening = opened.pop()
            if opening["box"] and (found is None or opening.start() > found.start):
                content = text[opening.end() : brace.start()]
                found = Mark(start=opening.start(), end=brace.end(), content=content)
    return found
