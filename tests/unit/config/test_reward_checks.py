"""`reward`: several functions, their tables in a recipe and on the command line, and what does not go together."""

import re
from pathlib import Path

import pytest

from plimsoll.config.checks import check_eval, check_sft, check_train
from plimsoll.config.reward import RewardPart, RewardRule
from tests.unit.config.recipes import MINIMAL, causes_of, load, one_cause
from tests.unit.config.test_load import assert_readable

PARTS = MINIMAL + (
    "reward: {parts: {format: {function: regex, options: {pattern: a}, weight: 0.2}, right: {function: number}}}"
)
BY_SOURCE = "reward.function=by_source"


def refused(folder: Path, *overrides: str, text: str = PARTS) -> str:
    """The one cause of the refusal, which must read well."""
    cause = one_cause(lambda: check_train(load(folder, text, overrides)))
    assert_readable(cause)
    return cause


def test_entries_are_overridden_key_by_key_and_options_hold_any_value(tmp_path: Path) -> None:
    overrides = ["reward.parts.format.weight=0.5", "reward.parts.right.options.schema={a: [1, null]}"]
    reward = load(tmp_path, PARTS, overrides).reward
    assert reward.parts == {
        "format": RewardPart(function="regex", options={"pattern": "a"}, weight=0.5),
        "right": RewardPart(function="number", options={"schema": {"a": [1, None]}}),
    }
    overrides = [BY_SOURCE, "reward.sources.openai/gsm8k.function=math", "reward.sources.openai/gsm8k.options.right=2"]
    recipe = load(tmp_path, MINIMAL, overrides)
    check_train(recipe)
    assert recipe.reward.sources == {"openai/gsm8k": RewardRule(function="math", options={"right": 2})}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("format.weight=text", "`reward.parts.format.weight='text'` is not valid .*it takes a number"),
        ("format.weight=true", "`reward.parts.format.weight=true` is not valid .*it takes a number"),
        ("format.weight=.nan", "`reward.parts.format.weight=nan` is not valid .*it takes a number"),
        ("format.function=3", "`reward.parts.format.function=3` is not valid .*it takes text"),
        ("format.options=3", "`reward.parts.format.options=3` is not valid .*a mapping"),
        ("format.options={1: 2}", "`reward.parts.format.options.1=1` .*the keys of .* are text"),
        ("format.options.day=2024-01-02", "`reward.parts.format.options.day=.*values are text, numbers"),
        ("format.wieght=1", "unknown key `reward.parts.format.wieght` .*did you mean `reward.parts.format.weight`"),
        ("format.colour=1", "unknown key `reward.parts.format.colour`: .*takes `function`, `options` and `weight`"),
        ("other.weight=1", "`reward.parts.other.function` is required"),
        ("format=1", "`reward.parts.format=1` is not valid: .*takes `function`, `options` and `weight`"),
        ("={1: {function: number}}", "`reward.parts.1=1` is not valid: .*a text as name"),
        ("=3", "`reward.parts=3` is not valid: it takes a mapping from names to mappings with `function`"),
    ],
)
def test_what_is_wrong_inside_an_entry_is_told_under_its_own_key(tmp_path: Path, override: str, told: str) -> None:
    cause = refused(tmp_path, f"reward.parts{'' if override[0] == '=' else '.'}{override}")
    assert re.search(told, cause), cause


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("reward.function=number", "`reward.function=number` is not read, because `reward.parts` is set"),
        ("reward.options.strip=true", "`reward.options` is not read, because `reward.parts` is set"),
        ("reward.parts.a/b={function: number}", "`reward.parts`: 'a/b' cannot be a name"),
        ("reward.sources.mine={function: number}", "`reward.sources` is read by `by_source` only"),
        ("rollout.eval.correct_part=rigth", "`rollout.eval.correct_part=rigth` is not one of `reward.parts`"),
    ],
)
def test_what_would_not_be_read_is_refused(tmp_path: Path, override: str, told: str) -> None:
    assert told in refused(tmp_path, override)


def test_weights_that_are_all_zero_are_refused_and_one_of_zero_is_only_logged(tmp_path: Path) -> None:
    check_train(load(tmp_path, PARTS, ["reward.parts.format.weight=0"]))
    cause = refused(tmp_path, "reward.parts.format.weight=0", "reward.parts.right.weight=0")
    assert "every weight is 0" in cause


def test_by_source_has_no_options_and_does_not_lead_to_itself(tmp_path: Path) -> None:
    assert "`reward.options` is not read by `by_source`" in refused(
        tmp_path, BY_SOURCE, "reward.options.a=1", text=MINIMAL
    )
    part = "reward.parts.format={function: by_source, options: {a: 1}}"
    assert "`reward.parts.format.options` is not read by `by_source`" in refused(tmp_path, part)
    loop = refused(tmp_path, BY_SOURCE, "reward.sources.x={function: by_source}", text=MINIMAL)
    assert "leads back" in loop
    star = refused(tmp_path, BY_SOURCE, "reward.sources.a*b={function: number}", text=MINIMAL)
    assert "only one at the end" in star
    check_train(load(tmp_path, PARTS, ["reward.parts.format={function: by_source}", "reward.sources.x.function=math"]))


def test_a_number_inside_a_part_may_decide_what_is_correct(tmp_path: Path) -> None:
    check_train(load(tmp_path, PARTS, ["rollout.eval.correct_part=right/acc"]))
    check_train(load(tmp_path, MINIMAL, ["rollout.eval.correct_part=acc"]))  # a dict's number: not known before a run


def test_every_command_that_scores_checks_it(tmp_path: Path) -> None:
    recipe = load(tmp_path, PARTS, ["reward.function=number", "data.eval=task:add"])
    for check in (check_train, check_sft, check_eval):
        (cause,) = causes_of(lambda check=check: check(recipe))
        assert "`reward.function=number` is not read" in cause
