import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from plimsoll.config.base import Options
from plimsoll.config.data import DataConfig
from plimsoll.data.gym import NOT_REPEATABLE, encode, gym_rows, gym_tasks
from plimsoll.data.load import load_dataset
from plimsoll.data.sources import RawRow
from plimsoll.data.tasks.generate import EVAL_PARTS, Split, is_held_out
from plimsoll.data.tokenizer import load_tokenizer
from plimsoll.errors import DataError, RecipeError
from plimsoll.reward.gym import decode
from tests.extras import needs

pytest.importorskip("reasoning_gym")

pytestmark = needs("tasks")

TINY = Path(__file__).parents[3] / "recipes" / "models" / "tiny"
SUMS: Options = {"min_terms": 2, "max_terms": 3, "max_digits": 2, "train_size": 200, "eval_size": 30}


def rows(names: str, options: Options, split: Split = "train", seed: int = 0) -> list[RawRow]:
    return list(gym_rows(names, options, split=split, seed=seed))


def questions(names: str, options: Options, split: Split = "train", seed: int = 0) -> list[str]:
    return [row.columns["prompt"] for row in rows(names, options, split, seed)]


def test_a_row_carries_question_answer_and_the_item_that_scores_it() -> None:
    row = rows("chain_sum", {**SUMS, "train_size": 1})[0]
    item = decode(json.loads(row.columns["gym"]["item"]))
    assert row.columns["data_source"] == "gym:chain_sum"
    assert (row.columns["prompt"], row.columns["answer"]) == (item["question"], item["answer"])
    assert row.columns["answer"] == str(eval(row.columns["prompt"].partition(":")[2].strip(" =?.")))
    assert row.columns["gym"]["config"] == {"min_terms": 2, "max_terms": 3, "max_digits": 2}
    assert len(item["metadata"]["expression"].split(" ")) in (3, 5)


def test_the_parameters_shape_the_problems() -> None:
    assert all(text.count("+") + text.count(" - ") == 1 for text in questions("chain_sum", SUMS | {"max_terms": 2}))


@pytest.mark.parametrize("seeds", list(itertools.pairwise(range(4))))
def test_no_held_out_problem_is_trained_on_whatever_the_seed(seeds: tuple[int, int]) -> None:
    # So few problems that most of each split are drawn.
    few: Options = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "train_size": 150, "eval_size": 20}
    trained, held_out = questions("chain_sum", few, "train", seeds[0]), questions("chain_sum", few, "eval", seeds[1])
    assert not set(trained) & set(held_out)
    assert len(set(trained)) == 150
    assert len(set(held_out)) == 20
    assert all(map(is_held_out, held_out))


def test_training_follows_the_seed_and_held_out_problems_do_not() -> None:
    assert questions("gcd", {"train_size": 50}, seed=1) == questions("gcd", {"train_size": 50}, seed=1)
    assert questions("gcd", {"train_size": 50}, seed=1) != questions("gcd", {"train_size": 50}, seed=2)
    assert questions("gcd", {"eval_size": 50}, "eval", 1) == questions("gcd", {"eval_size": 50}, "eval", 2)


def test_a_larger_source_begins_with_the_smaller_one() -> None:
    assert questions("gcd", {"train_size": 700})[:40] == questions("gcd", {"train_size": 40})


def test_a_mix_is_interleaved_by_weight() -> None:
    mix: Options = {"chain_sum": {"max_terms": 3, "weight": 2}, "gcd": {}, "train_size": 300}
    sources = [row.columns["data_source"] for row in rows("chain_sum,gcd", mix)]
    assert Counter(sources) == {"gym:chain_sum": 200, "gym:gcd": 100}
    assert all(Counter(sources[i : i + 3])["gym:gcd"] == 1 for i in range(0, 300, 3))


def test_parameters_of_the_other_source_are_left_alone() -> None:
    tasks, _ = gym_tasks("gcd", {"chain_sum": {"max_terms": 3}, "gcd": {"max_numbers": 3}})
    assert [(task.name, task.parameters) for task in tasks] == [("gcd", {"max_numbers": 3})]


def test_the_dataset_is_made_of_these_rows_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    config = DataConfig(train="gym:boxnet", task={"train_size": 40}, prompts_per_step=4, max_prompt_tokens=100_000)
    data = load_dataset(config.train, config, load_tokenizer(TINY), split="train", seed=0, need="answer")
    assert len(data.prompts) == 40
    assert {prompt.answer for prompt in data.prompts} == {""}  # this generator names no answer
    assert capsys.readouterr().out == ""  # and it prints dots


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        ("chain_sums", {}, ["gym:chain_sums", "nearest: chain_sum"]),
        ("chain_sum", {"max_term": 3}, ["data.task.max_term is not", "nearest: max_terms", "allow_negation"]),
        ("chain_sum", {"max_terms": 1}, ["data.task.max_terms=1", "max_terms must be >= min_terms"]),
        ("chain_sum", {"max_terms": "two"}, ["data.task", "two", "gym:chain_sum"]),
        ("chain_sum", {"max_terms": 2.5}, ["data.task", "2.5", "gym:chain_sum"]),
        ("chain_sum", {"train_size": 0}, ["data.task.train_size=0"]),
        ("chain_sum", {"seed": 3}, ["data.task.seed is not a parameter"]),
        ("chain_sum,gcd", {"max_terms": 3}, ["data.task.max_terms", "data.task.chain_sum.max_terms"]),
        ("chain_sum,gcd", {"gcd": {"weight": 0}}, ["data.task.gcd.weight=0"]),
        ("chain_sum,gcd", {"gcd": {"max_number": 3}}, ["data.task.gcd.max_number", "nearest: max_numbers"]),
        ("gcd,gcd", {}, ["twice"]),
        ("word_ladder", {}, ["gym:word_ladder", "resumed"]),
        ("composite", {}, ["gym:composite"]),
    ],
)
def test_what_is_wrong_is_named_before_any_row_is_made(names: str, options: Options, words: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        gym_rows(names, options, split="train", seed=0)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_too_few_problems_are_an_error_that_names_the_size() -> None:
    few: Options = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "train_size": 5000}
    with pytest.raises(DataError, match=r"gym:chain_sum has about 1\d\d different train problems.*train_size=5000"):
        rows("chain_sum", few)


@pytest.mark.parametrize(
    "value",
    [(1, (2, [3])), {1: "a", (0, 1): {"b"}}, {"$": "x"}, {"a": frozenset({2, 10}), "b": [(), None, 1.5, True, "é"]}],
)
def test_values_that_json_lacks_come_back_as_they_were(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.slow
def test_problems_are_the_same_in_processes_with_other_hashes() -> None:
    code = (
        "import json, sys; from plimsoll.data.gym import gym_rows;"
        "print(json.dumps([dict(r.columns) for r in gym_rows('gcd,spell_backward', {'train_size': 20}, "
        "split='train', seed=1)]))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert "gcd" not in NOT_REPEATABLE


def test_without_the_library_the_command_that_installs_it_is_named() -> None:
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from plimsoll.data.gym import gym_rows\n"
        "from plimsoll.errors import RecipeError\n"
        "try: gym_rows('gcd', {}, split='train', seed=0)\n"
        "except RecipeError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "pip install 'plimsoll-rl[tasks]'" in out


def test_one_problem_of_eight_is_held_out() -> None:
    held_out = sum(is_held_out(f"problem {i}") for i in range(8000))
    assert abs(held_out - 8000 / EVAL_PARTS) < 150
