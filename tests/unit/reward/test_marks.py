from fractions import Fraction

import pytest

from plimsoll.reward.marks import last_marked
from plimsoll.reward.rules import bare_number


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("#### 1 \\boxed{2}", "2"),
        ("\\boxed{#### 2}", "#### 2"),
        ("\\boxed{\\text{Answer: } 2} so", "\\text{Answer: } 2"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{1 \\right.}", "\\left\\{1 \\right."),  # escaped braces need no partner
        ("} \\boxed{1}", "1"),
        ("\\boxed{" * 20_000 + "\\boxed{1}", "1"),
        ("Answer: 1\nanswers: 2", "1"),
        ("no mark", None),
    ],
)
def test_the_last_mark(text: str, content: str | None) -> None:
    assert last_marked(text, answer_lines=True) == content


def test_answer_lines_are_marks_only_on_request() -> None:
    assert last_marked("#### 1\nAnswer: 2") == "1"


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,234", 1234), ("-1/2", Fraction(-1, 2)), (r"5 \text{ cm}", 5), ("5 cm", None), ("5x", None), ("1 2", None)],
)
def test_a_bare_number_is_nothing_else(text: str, number: Fraction | int | None) -> None:
    assert bare_number(text) == number
