from fractions import Fraction

import pytest

from plimsoll.reward.rules import exact_match, find_number, number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 42\n" + "x" * 400, 42),  # far from the end of the response
        ("#### 42\n" + "7 " * 200, 42),  # numbers after the marked line do not count
        ("#### 1\nno, wait\n#### 2", 2),
        (r"\boxed{1} and then \boxed{2}", 2),
        (r"\boxed{1} #### 2", 2),
        (r"#### 2 \boxed{3}", 3),
        ("1,234", 1234),
        ("12,34", 34),  # not a thousands separator
        ("It costs $1,000.50.", Fraction(2001, 2)),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"\boxed{-\dfrac{3}{4}}", Fraction(-3, 4)),
        (r"\boxed{x = 5}", 5),
        (r"\boxed{42 \text{ apples}}", 42),
        (r"\boxed{\$42}", 42),
        (r"\boxed{12", 12),  # never closed: no mark
        (r"\boxed{2x + 1}", None),
        (r"\boxed{\sqrt{2}}", None),
        (r"\boxed{(1, 2)}", None),
        ("#### 6 * 7 = 42", 42),
        ("#### none of them, not even 3 or 4", None),
        ("so 3/4", Fraction(3, 4)),
        ("10-5", 5),
        ("= -5", -5),
        ("\N{MINUS SIGN}5", -5),
        ("5e-1", Fraction(1, 2)),
        ("1e999999999", None),  # must not be expanded
        ("1/0", None),
        ("9" * 5000, None),
        ("no number", None),
    ],
)
def test_find_number(text: str, expected: Fraction | int | None) -> None:
    assert find_number(text) == expected


@pytest.mark.parametrize(
    ("response", "answer"), [("0.50", "1/2"), ("#### 42", 42), ("42.0", "6*7\n#### 42"), ("0.1", 0.1)]
)
def test_number_is_equality_by_value(response: str, answer: object) -> None:
    assert number("", response, answer) == 1.0


def test_number_of_a_response_without_one_is_zero() -> None:
    assert number("", "I do not know", 42) == 0.0


@pytest.mark.parametrize("answer", ["forty-two", None, True, ["42"]])
def test_number_refuses_an_answer_without_a_number(answer: object) -> None:
    with pytest.raises(ValueError, match="needs an answer with a number"):
        number("", "42", answer)


def test_exact_match_options() -> None:
    assert exact_match("", " Paris\n", "Paris") == 1.0
    assert exact_match("", " Paris\n", "Paris", strip=False) == 0.0
    assert exact_match("", "paris", "Paris") == 0.0
    assert exact_match("", "paris", "Paris", case_sensitive=False) == 1.0
    assert exact_match("", "42", 42) == 1.0
    with pytest.raises(TypeError, match="answer is list"):
        exact_match("", "42", [42])
