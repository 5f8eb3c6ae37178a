import pytest

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import RecipeError
from plimsoll.reward.pattern import check_options, regex
from plimsoll.reward.pool import ScoringPool
from tests.unit.reward.requests import requests_for

THINK = r"<think>.*</think>\s*<answer>.*</answer>"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>one\ntwo</think>\n<answer>3</answer>", 1.0),
        ("<think>one</think><answer></answer>", 1.0),
        ("<think>one</think> so <answer>3</answer>", 0.0),
        ("<think>one</think><answer>3</answer> and more", 0.0),
        ("well: <think>one</think><answer>3</answer>", 0.0),
        ("<answer>3</answer>", 0.0),
    ],
)
def test_format_of_thinking_and_answer(response: str, expected: float) -> None:
    assert regex("", response, None, pattern=THINK) == expected


def test_options() -> None:
    assert regex("", "so 3", None, pattern="3") == 0.0
    assert regex("", "so 3", None, pattern="3", full=False) == 1.0
    assert regex("", "YES", None, pattern="yes", right=2.0, wrong=-1.0) == -1.0
    assert regex("", "YES", None, pattern="yes", right=2.0, wrong=-1.0, ignore_case=True) == 2.0
    assert regex("", "a\nb", None, pattern="a.b") == 1.0
    assert regex("", "a\nb", None, pattern="a.b", dotall=False) == 0.0


def test_the_answer_in_the_pattern_is_literal_and_one_group() -> None:
    pattern = r"<answer>\s*{answer}\s*</answer>"
    assert regex("", "<answer> 1.5 </answer>", 1.5, pattern=pattern) == 1.0
    assert regex("", "<answer>1x5</answer>", "1.5", pattern=pattern) == 0.0
    assert regex("", "<answer>f(x)|2</answer>", "f(x)|2", pattern=pattern) == 1.0
    assert regex("", "abab", "ab", pattern="{answer}+") == 1.0
    assert regex("", "{answer}", "ab", pattern="[{]answer}") == 1.0


def test_without_a_pattern_the_answer_is_one() -> None:
    assert regex("", "42", r"\d+") == 1.0
    assert regex("", "forty", r"\d+") == 0.0


@pytest.mark.parametrize(
    ("answer", "pattern", "reason"),
    [
        ("(", None, r"cannot compile this row's answer '\('"),
        (42, None, "needs a pattern"),
        (None, "{answer}", "needs text or a number"),
        (True, "{answer}", "needs text or a number"),
    ],
)
def test_an_answer_that_does_not_serve_is_the_fault_of_the_row(
    answer: object, pattern: str | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        regex("", "x", answer, pattern=pattern)


def test_a_pattern_that_does_not_compile_is_refused_with_its_position() -> None:
    check_options({})
    check_options({"pattern": THINK})
    check_options({"pattern": "{answer}{2}"})
    with pytest.raises(RecipeError, match=r"unterminated subpattern at position 3"):
        check_options({"pattern": "ab (c"})
    with pytest.raises(RecipeError, match=r"at position 9"):  # behind the eight characters of {answer} and a space
        check_options({"pattern": "{answer} (c"})
    with pytest.raises(RecipeError, match="not text"):
        check_options({"pattern": 3})


def test_a_pattern_without_end_costs_its_response() -> None:
    config = RewardConfig(function="regex", options={"pattern": "(a+)+b"}, workers=1, timeout=0.5, max_error_share=1.0)
    with ScoringPool(config) as pool:
        scores = pool.score(requests_for(["aab", "a" * 60, "b"]))
    assert [(score.status, score.value) for score in scores] == [("ok", 1.0), ("timeout", None), ("ok", 0.0)]
