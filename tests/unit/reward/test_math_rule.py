import subprocess
import sys

import numpy
import pytest

from plimsoll.config.reward import RewardConfig
from plimsoll.reward.pool import ScoringPool
from tests.unit.reward.requests import requests_for

pytest.importorskip("math_verify")
from plimsoll.reward.math_rule import math
from tests.extras import needs

pytestmark = needs("math")

GSM8K_SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = 72 altogether.\n#### 72"
MATH_SOLUTION = r"The vertex is at $x = 3$, so the distance is $\boxed{\frac{\sqrt{3}}{2}}$."


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### 42\n" + "x" * 400, 42),  # far from the end of the response
        ("#### 42\n" + "7 " * 200, "42"),  # numbers behind the mark do not count
        (r"\boxed{41}, no: \boxed{42}", 42),
        (r"\boxed{41} #### 42", 42),
        ("#### 41\nAnswer: 42", 42),
        ("1,234", 1234),
        (r"\boxed{1,234}", "1234"),
        ("Answer: $1,234.", 1234),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\frac12}", r"\frac{1}{2}"),
        (r"so \(\boxed{\dfrac{\sqrt{3}}{2}}\)", MATH_SOLUTION),
        ("She sold 72 clips.\n#### 72", GSM8K_SOLUTION),
        ("Answer: $x = 5$", 5),
        ("**Answer:** 5", 5),
        ("**Final Answer**: \\(5\\)", 5),
        ("Answer:\n\n$\\frac{10}{2}$", 5),
        ("Answer: 5 apples", 5),
        ("Answer: the value is $5$, as asked", 5),
        (r"\boxed{5 \text{ cm}}", 5),
        (r"\boxed{90^\circ}", 90),
        (r"\boxed{\$42}", r"\$42"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{50\%}", "0.5"),
        ("Answer: 042", "042"),  # AIME answers have three digits
        ("Answer: 42", "042"),
        (r"\boxed{(x+1)^2}", "x^2 + 2x + 1"),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
        (r"\boxed{(1,2)}", "(1, 2)"),
        (r"\boxed{\left[0, 1\right)}", "[0,1)"),
        (r"\boxed{2, -2}", r"\pm 2"),
        (r"\boxed{3\frac{1}{2}}", "7/2"),
        (r"\boxed{Tuesday}", r"\text{Tuesday}"),
        (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("so there are 7", 7),  # no mark
        ("so we get $x = 7$.", "7"),
        ("The final answer is 7. I checked it 3 times.", 7),
        ("7", ["six", "7"]),
        (r"\boxed{7}", numpy.array(["6", "7"])),
        (r"\boxed{7}", numpy.int64(7)),
    ],
)
def test_right_answers(response: str, answer: object) -> None:
    assert math("", response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{42}, no: \boxed{41}", 42),
        ("#### 42\nAnswer: 41", 42),
        (r"\boxed{5x}", 5),
        (r"\boxed{5i}", 5),
        (r"\boxed{5!}", 5),
        ("Answer: 5 and 6", 5),
        ("Answer: 2x + 5", 5),
        (r"\boxed{(0,1)}", "[0,1)"),
        (r"\boxed{(2,1)}", "(1,2)"),
        (r"\boxed{x > 5}", "x < 5"),
        (r"\boxed{10000000000000000000001}", "10000000000000000000000"),
        (r"\boxed{\frac{1}{2", "0.5"),  # cut off
        (r"\boxed{}", 5),
        ("Answer: Monday", r"\text{Tuesday}"),
        ("I do not know", 7),
        ("", 7),
        ("8", ["6", "7"]),
    ],
)
def test_wrong_answers(response: str, answer: object) -> None:
    assert math("", response, answer) == 0.0


def test_options() -> None:
    assert math("", "#### 1", 1, right=2.0, wrong=-1.0) == 2.0
    assert math("", "#### 3", 1, right=2.0, wrong=-1.0) == -1.0
    assert math("", "it is 1", 1) == 1.0
    assert math("", "it is 1", 1, strict=True) == 0.0
    assert math("", "Answer: 1", 1, strict=True) == 1.0


@pytest.mark.parametrize("answer", ["", "  ", "#### ", "???", r"\frac{", ")(", None, True, [], float("nan"), ["1", ""]])
def test_an_answer_that_is_no_mathematics_is_the_fault_of_the_row(answer: object) -> None:
    with pytest.raises(ValueError, match="this row's"):
        math("", "#### 1", answer)


def test_scores_come_out_of_the_pool_and_what_cannot_be_computed_costs_itself() -> None:
    config = RewardConfig(function="math", workers=1, timeout=2.5, max_error_share=1.0)
    responses = [r"\boxed{\sqrt{4}}", "Answer: $9^{9^{9}}$", r"\boxed{3}"]
    with ScoringPool(config) as pool:
        scores = pool.score(requests_for(responses, answer="2"))
    assert [(score.status, score.value) for score in scores] == [("ok", 1.0), ("timeout", None), ("ok", 0.0)]


def test_no_signal_is_used() -> None:
    # On another thread a time-out by signal raises, and math-verify then says 0 to everything.
    code = """
import threading
from plimsoll.reward.math_rule import math
found = []
thread = threading.Thread(target=lambda: found.append(math("", r"\\\\boxed{\\\\sqrt{4}}", "2")))
thread.start(); thread.join()
assert found == [1.0], found
import sys
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
