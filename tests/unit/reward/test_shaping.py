import pytest

from plimsoll.reward.shaping import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.025), (90, -0.25), (99, -0.475), (100, -0.5), (120, -0.5)]
)
def test_penalty_falls_linearly_over_the_buffer(length: int, expected: float) -> None:
    assert overlong_penalty(length, max_tokens=100, buffer=20, penalty=0.5) == pytest.approx(expected)


def test_no_buffer_is_no_penalty() -> None:
    assert overlong_penalty(100, max_tokens=100, buffer=0, penalty=1.0) == 0.0
