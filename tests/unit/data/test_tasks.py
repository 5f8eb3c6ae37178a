import itertools

import pytest
from pydantic import ValidationError

from plimsoll.config.base import Options
from plimsoll.data.tasks.generate import Split, generate, shuffled, task_options
from plimsoll.data.tasks.problems import TASKS
from plimsoll.errors import DataError, RecipeError


def problems(name: str, options: Options, split: Split, seed: int = 0) -> list[tuple[str, str]]:
    return [(r.columns["prompt"], r.columns["answer"]) for r in generate(name, options, split=split, seed=seed)]


def right_answer(name: str, prompt: str) -> str:
    """Worked out from the prompt alone, another way than the generator's."""
    if name in ("addition", "subtraction", "multiplication"):
        return str(eval(prompt.removesuffix("=")))
    if name == "count_letter":
        text, letter = prompt.split("#")
        return str(sum(character == letter for character in text))
    text = list(prompt[:-1])
    if name == "reverse_string":
        text.reverse()
    if name == "sort_digits":
        text.sort()
    return "".join(text)


@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_distinct_and_answers_right(name: str) -> None:
    rows = problems(name, {"train_size": 500}, "train")
    assert len({prompt for prompt, _ in rows}) == len(rows) == 500
    assert all(right_answer(name, prompt) == answer for prompt, answer in rows)


@pytest.mark.parametrize(("name", "options"), [("reverse_string", {"length": 3}), ("addition", {"digits": 1})])
def test_the_splits_of_a_whole_space_are_disjoint_for_every_seed(name: str, options: Options) -> None:
    checked = task_options(name, options)
    count = TASKS[name].count(checked)
    everything = {TASKS[name].make(checked, index).prompt for index in range(count)}
    assert len(everything) == count

    def whole(split: Split, seed: int) -> set[str]:
        rows = generate(name, {**options, f"{split}_size": count}, split=split, seed=seed)
        found: set[str] = set()
        with pytest.raises(DataError) as caught:
            found.update(row.columns["prompt"] for row in rows)
        assert f"has {len(found)} {split} problems" in str(caught.value)
        return found

    held_out = whole("eval", 0)
    assert 0.05 * count < len(held_out) < 0.25 * count
    assert [whole("train", seed) for seed in (0, 1, 2)] == [everything - held_out] * 3


def test_training_problems_come_from_the_seed_and_held_out_ones_do_not() -> None:
    options: Options = {"train_size": 50, "eval_size": 50}
    assert problems("reverse_string", options, "train", 1) == problems("reverse_string", options, "train", 1)
    assert problems("reverse_string", options, "train", 1) != problems("reverse_string", options, "train", 2)
    assert problems("reverse_string", options, "eval", 1) == problems("reverse_string", options, "eval", 2)


def test_a_larger_split_begins_with_the_smaller_one() -> None:
    small, large = (problems("sort_digits", {"train_size": size}, "train") for size in (20, 60))
    assert large[:20] == small


@pytest.mark.parametrize("count", [1, 2, 3, 17, 100])
def test_shuffled_is_a_permutation(count: int) -> None:
    assert sorted(shuffled(count, b"k")) == list(range(count))


def test_shuffled_reaches_every_permutation_equally_often() -> None:
    orders = [tuple(shuffled(3, b"%d" % seed)) for seed in range(600)]
    for order in itertools.permutations(range(3)):
        assert 70 < orders.count(order) < 130  # 100 expected, standard deviation 9


def test_a_space_too_large_to_enumerate_is_sampled() -> None:
    rows = problems("copy_string", {"length": 200, "alphabet": "ab", "train_size": 5}, "train")
    assert [len(prompt) for prompt, _ in rows] == [201] * 5


def test_options_are_checked_by_name_all_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        task_options("reverse_string", {"lenght": 3, "train_size": 0, "alphabet": "aab"})
    text = str(caught.value)
    assert len(caught.value.causes) == 3
    assert "data.task.lenght" in text
    assert "nearest: length" in text
    assert "data.task.train_size=0" in text
    assert "occurs twice" in text


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"task:revrse_string .*data\.train.*nearest: reverse_string"):
        task_options("revrse_string", {})


def test_options_are_frozen() -> None:
    options = task_options("addition", {"digits": 3})
    with pytest.raises(ValidationError):
        options.train_size = 3
