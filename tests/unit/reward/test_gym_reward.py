import json
from typing import Any

import pytest

from plimsoll.config.base import Options
from plimsoll.config.reward import RewardConfig
from plimsoll.data.gym import CHUNK, NOT_REPEATABLE, encode, gym_rows
from plimsoll.errors import RecipeError
from plimsoll.reward.gym import Extract, check_options, extracted, reasoning_gym
from plimsoll.reward.pool import ScoringPool
from tests.extras import needs
from tests.unit.reward.requests import requests_for

pytest.importorskip("reasoning_gym")

pytestmark = needs("tasks")


def columns(name: str, options: Options | None = None) -> dict[str, Any]:
    given: Options = {"train_size": 1, **(options or {})}
    return dict(next(iter(gym_rows(name, given, split="train", seed=0))).columns)


def score(row: dict[str, Any], response: str, **options: Any) -> float:
    return reasoning_gym(row["prompt"], response, row["answer"], gym=row["gym"], **options)


@pytest.mark.parametrize(
    ("response", "extract", "answer", "expected"),
    [
        ("<answer>1</answer> no: <answer> 42 </answer>", "auto", "42", "42"),
        ("so \\boxed{1}\n<answer>42</answer>", "auto", "42", "42"),
        ("4 + 38 = 42\n#### 42.", "auto", "42", "42"),
        ("it is \\boxed{1,000}", "auto", "1000", "1000"),
        ("Answer: 42 apples", "auto", "42", "42"),
        ("4 + 38 is 42", "auto", "42", "42"),
        ("4 + 38 is 41", "auto", "42", "41"),
        ("no idea", "auto", "42", "no idea"),
        (" olleh\n", "auto", "hello", "olleh"),
        ("The word backwards:\nAnswer: olleh", "auto", "olleh", "olleh"),
        ("<think>#### 1</think>\n1 2\n3 4\n", "auto", "1 2\n3 4", "1 2\n3 4"),
        ("#### ['1', '2']", "auto", "['1', '2']", "['1', '2']"),
        ("42", "tag", "42", None),
        ("<answer>42", "tag", "42", None),
        ("\\boxed{4} #### 2", "boxed", "2", "4"),
        ("#### 2", "boxed", "2", None),
        ("a\n b \n\n", "last_line", "b", "b"),
        ("", "last_line", "b", None),
        ("1 then 2.50", "last_number", "2.50", "2.50"),
        ("none", "last_number", "2", None),
        (" a\nb ", "whole", "b", "a\nb"),
    ],
)
def test_where_the_answer_is_taken_from(response: str, extract: Extract, answer: str, expected: str | None) -> None:
    assert extracted(response, extract, answer) == expected


def test_a_right_answer_scores_one_and_a_wrong_one_nothing() -> None:
    row = columns("gcd")
    assert score(row, f"It is {row['answer']}.") == 1.0
    assert score(row, "It is 99999.") == 0.0
    assert score(row, "") == 0.0


def test_partial_credit_stays_and_consolation_does_not() -> None:
    row = columns("fraction_simplification")
    assert score(row, "nonsense", minimum=0.0) == 0.01
    assert score(row, "nonsense") == 0.0
    word = columns("spell_backward")
    assert 0.06 < score(word, f"it is {word['answer']}") < 1.0  # a fault of format: the answer is part of the text
    assert score(word, f"it is {word['answer']}", minimum=1.0) == 0.0


def test_an_answer_that_the_scorer_cannot_parse_is_wrong() -> None:
    assert score(columns("prime_factorization"), "two times three", extract="whole") == 0.0


def test_rows_of_other_sources_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="the column `gym`"):
        reasoning_gym("1 + 1", "2", "2")


def test_options_are_checked() -> None:
    check_options({"extract": "tag", "minimum": 1})
    with pytest.raises(RecipeError) as error:
        check_options({"extract": "tags", "minimum": 2, "gym": {}})
    assert [cause.split("=")[0].split(" ")[0] for cause in error.value.causes] == [
        "reward.options.extract",
        "reward.options.minimum",
        "reward.options.gym",
    ]


def test_it_scores_in_workers() -> None:
    row = columns("number_sorting")
    answers = [row["answer"], f"<answer>{row['answer']}</answer>", "[]", "?"]
    pool = ScoringPool(RewardConfig(function="reasoning_gym", workers=1, timeout=60.0))
    try:
        scores = pool.score(requests_for(answers, answer=row["answer"], gym=row["gym"]))
    finally:
        pool.close()
    assert [s.value for s in scores] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # what the generators' own parsers warn of
def test_the_own_answer_of_every_generator_is_right_after_the_way_through_the_row() -> None:
    import reasoning_gym as library
    from reasoning_gym.factory import DATASETS

    scores: dict[str, list[float]] = {}
    nameless: set[str] = set()  # several answers are right, and the generator names none
    for name in sorted(DATASETS.keys() - {"composite", *NOT_REPEATABLE}):
        item = library.create_dataset(name, seed=3, size=CHUNK)[0]
        if item["answer"] is None:
            nameless.add(name)
            continue
        answer = str(item["answer"])
        gym = {"task": name, "config": {}, "item": json.dumps(encode(item))}
        scores[name] = [
            reasoning_gym(item["question"], answer, answer, gym=gym, extract="whole"),
            reasoning_gym(item["question"], f"<answer>{answer}</answer>", answer, gym=gym),
        ]
    assert nameless == {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    assert len(scores) > 90
    assert {name: pair for name, pair in scores.items() if pair != [1.0, 1.0]} == {}
