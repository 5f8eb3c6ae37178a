import pytest

from plimsoll.errors import RecipeError
from plimsoll.reward.choice import check_options, choice

MARKED_B = [
    "The answer is (B).",
    "The correct answer is **B**",
    "the answer is: $\\mathbf{B}$",
    "the answer is option (B)",
    "The best choice is B.",
    "option B",
    r"\boxed{B}",
    r"$\boxed{\text{B}}$",
    r"\boxed{\text{(B) } 5}",
    "Answer: B",
    "answer: b",
    "**Answer:** B",
    "Answer:\n\nB",
    "Answer: B. A dog",
    "Answer: B because A is a cat",
    "Answer: Paris (B)",
    "#### B",
    "<answer>B</answer>",
    "<answer> (B) Paris </answer>",
    "<answer>A</answer> No. <answer>B</answer>",
    r"\boxed{A}? No, \boxed{B}",
    "Option A is wrong. Option B is right.",
    "Answer: B\n" + "then A and C were " * 100,  # far from the end of the response
]
PLAIN_B = [
    "B",
    "b",
    "(B)",
    "(b)",
    "B.",
    "B)",
    "**B**",
    r"\text{B}",
    "B. A dog",
    "(B) Paris",
    "B\nbecause A is not",
    "B: x",
]


@pytest.mark.parametrize("response", MARKED_B + PLAIN_B)
@pytest.mark.parametrize("strict", [False, True])
def test_forms_of_b(response: str, strict: bool) -> None:
    assert choice("", response, "B", strict=strict) == 1.0


@pytest.mark.parametrize("response", ["I think it is B", "A dog is in B", "Not C, but rather B!", "It must be (B)"])
def test_the_last_lone_letter_counts_unless_strict(response: str) -> None:
    assert choice("", response, "B") == 1.0
    assert choice("", response, "B", strict=True) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "A dog barked",
        "I think so. A dog barked.",
        "The answer is a dog",
        "The answer is A dog",
        "J'ai faim",
        "A-level maths in the U.S.A.",
        "P(A) is small",
        "Answer: A or B",
        "The answer is A or B",
        "so (B) and (A)",
        r"\boxed{A, B}",
        r"\boxed{AB}",
        "",
    ],
)
def test_words_and_several_letters_are_no_choice(response: str) -> None:
    assert choice("", response, "A") == 0.0
    assert choice("", response, "B") == 0.0


@pytest.mark.parametrize("response", ["Am I?", "I do not know", "Answer: I do not know", "What am I"])
def test_the_pronoun_is_not_the_letter_i(response: str) -> None:
    assert choice("", response, "I") == 0.0


@pytest.mark.parametrize("response", ["The answer is A because it fits.", "A", "A.", "Answer: A", "So A is right"])
def test_a_letter_a_is_one(response: str) -> None:
    assert choice("", response, "A") == 1.0


@pytest.mark.parametrize("answer", ["B", "(B)", "b)", " b. ", r"\text{B}", 1])
def test_forms_of_the_answer(answer: object) -> None:
    assert choice("", "Answer: B", answer) == 1.0
    assert choice("", "Answer: C", answer, right=1.0, wrong=-0.5) == -0.5


@pytest.mark.parametrize("answer", ["E", "", "A or B", "Paris", 4, -1, True, None, ["A"]])
def test_an_answer_that_is_no_letter_is_the_fault_of_the_row(answer: object) -> None:
    with pytest.raises(ValueError, match="one of the letters ABCD"):
        choice("", "A", answer, letters="ABCD")


def test_letters_outside_the_range_are_words() -> None:
    assert choice("", "The answer is B, not E", "B", letters="ABCD") == 1.0
    assert choice("", "It is B. Vitamin E", "B", letters="ABCD") == 1.0


def test_letters_must_differ() -> None:
    check_options({})
    check_options({"letters": "abc"})
    for letters in ("", "AA", "Aa", "A B", 3):
        with pytest.raises(RecipeError, match="different letters"):
            check_options({"letters": letters})
