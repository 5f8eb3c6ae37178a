"""Rules between keys."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from plimsoll.config.checks import check_eval, check_sft, check_train
from plimsoll.config.load import load_recipe
from plimsoll.config.presets import PRESETS
from tests.unit.config.recipes import MINIMAL, causes_of, load, one_cause
from tests.unit.config.test_load import assert_readable


def refused(folder: Path, overrides: Sequence[str]) -> str:
    """The one cause for which `train` refuses, which must read well."""
    cause = one_cause(lambda: check_train(load(folder, MINIMAL, overrides)))
    assert_readable(cause)
    return cause


def test_the_minimal_recipe_passes_every_check(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL, ["data.eval=task:add"])
    assert check_train(recipe) == ()
    assert check_sft(recipe) == ()
    assert check_eval(recipe) == ()


def test_an_evaluation_says_that_it_takes_another_engine_than_the_run(tmp_path: Path) -> None:
    (note,) = check_eval(load(tmp_path, MINIMAL, ["data.eval=task:add", "rollout.engine=vllm"]))
    assert note.startswith("`rollout.engine=vllm`")
    assert "native engine" in note


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_group_of_one_is_refused_for_group_estimators(tmp_path: Path, name: str) -> None:
    overrides = ["rollout.samples_per_prompt=1", "data.prompts_per_step=1", f"algorithm.name={name}"]
    cause = refused(tmp_path, overrides)
    assert "a group needs at least 2" in cause
    assert "`rollout.samples_per_prompt=1`" in cause
    check_train(load(tmp_path, MINIMAL, [*overrides, "rollout.samples_per_prompt=2"]))


@pytest.mark.parametrize("setting", ["rollout.top_p=0.9", "rollout.top_k=50"])
@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_truncated_sampling_with_importance_correction_is_refused(
    tmp_path: Path, setting: str, correction: str
) -> None:
    importance = f"algorithm.importance_correction={correction}"
    cause = refused(tmp_path, [setting, importance])
    assert f"`{setting}`" in cause
    assert f"`{importance}`" in cause
    check_train(load(tmp_path, MINIMAL, [setting, "algorithm.importance_correction=none"]))


def test_evaluation_may_truncate(tmp_path: Path) -> None:
    check_train(load(tmp_path, MINIMAL, ["rollout.eval.top_p=0.9", "rollout.eval.top_k=5"]))


def test_k1_in_the_loss_is_refused_and_both_ways_out_work(tmp_path: Path) -> None:
    overrides = ["algorithm.kl_estimator=k1", "algorithm.kl_in=loss", "algorithm.kl_coefficient=0.1"]
    cause = refused(tmp_path, overrides)
    for advice in ("algorithm.kl_estimator=k2", "algorithm.kl_in=reward"):
        assert f"`{advice}`" in cause
        check_train(load(tmp_path, MINIMAL, [*overrides, advice]))


@pytest.mark.parametrize(
    ("prompts", "samples", "words"),
    [(512, 1, "510 or 516"), (512, 8, "510 or 516"), (64, 8, "510 or 516"), (1, 2, "`data.prompts_per_step` to 6,")],
)
def test_a_batch_that_does_not_divide_over_the_ranks(tmp_path: Path, prompts: int, samples: int, words: str) -> None:
    overrides = [f"data.prompts_per_step={prompts}", f"rollout.samples_per_prompt={samples}", "cluster.ranks=6"]
    causes = causes_of(lambda: check_train(load(tmp_path, MINIMAL, overrides)))
    cause = next(cause for cause in causes if "do not divide" in cause)
    assert words in cause
    assert "`cluster.ranks=6`" in cause
    assert f"`data.prompts_per_step={prompts}`" in cause
    # Every value that is proposed is one that works.
    for key, values in re.findall(r"`([a-z_.]+)` to (\d+(?: or \d+)?)", cause):
        for value in values.split(" or "):
            again = causes_of(lambda o=f"{key}={value}": check_train(load(tmp_path, MINIMAL, [*overrides, o, *more])))
            assert not any("do not divide" in cause for cause in again)


more = ["cluster.backend=ray"]  # something else to be refused, so that the list of causes is never empty


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_in_the_reward_takes_k1_only(tmp_path: Path, estimator: str) -> None:
    overrides = ["algorithm.kl_in=reward", "algorithm.kl_coefficient=0.1"]
    cause = refused(tmp_path, [f"algorithm.kl_estimator={estimator}", *overrides])
    assert "`algorithm.kl_estimator=k1`" in cause
    check_train(load(tmp_path, MINIMAL, ["algorithm.kl_estimator=k1", *overrides]))


def test_rows_of_a_supervised_step_divide_over_the_ranks_too(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL, ["data.prompts_per_step=512", "cluster.ranks=6"])
    cause = next(cause for cause in causes_of(lambda: check_sft(recipe)) if "do not divide" in cause)
    assert "510 or 516" in cause


def test_more_mini_batches_than_samples_are_refused(tmp_path: Path) -> None:
    overrides = ["data.prompts_per_step=2", "rollout.samples_per_prompt=2", "train.mini_batches_per_step=5"]
    cause = refused(tmp_path, overrides)
    assert "`train.mini_batches_per_step` to at most 4" in cause
    assert "`data.prompts_per_step` to at least 3" in cause
    check_train(load(tmp_path, MINIMAL, [*overrides, "train.mini_batches_per_step=4"]))
    check_train(load(tmp_path, MINIMAL, [*overrides, "data.prompts_per_step=3"]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.path=null"], "`model.path` is not set"),
        (["model.init=random", "model.config=a"], "`model.path=somewhere` is not read"),
        (["model.init=random", "model.path=null"], "in `model.config`"),
        (["rollout.eval.samples=4"], "`rollout.eval.temperature` above 0"),
        (["algorithm.overlong_buffer=256"], "`algorithm.overlong_buffer` to at most 255"),
        (["train.eval_every=5"], "`data.eval`"),
        (["data.train=rows.jsonl", "data.task.length=5"], "`data.task={}`"),
        (["rollout.kv_memory=0"], "`rollout.kv_memory` above 0"),
        (
            [
                "model.init=random",
                "model.config=a",
                "model.path=null",
                "algorithm.kl_coefficient=0.1",
                "model.reference_placement=ring",
            ],
            "`model.reference_placement` to `device`, `arena` or `auto`",
        ),
    ],
)
def test_other_rules(tmp_path: Path, overrides: list[str], words: str) -> None:
    assert words in refused(tmp_path, overrides)


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.engine=sglang",
        "rollout.tensor_parallel=2",
        "cluster.backend=local",
        "cluster.backend=ray",
        "cluster.ranks=2",
        "cluster.ranks_per_node=2",
        "cluster.max_restarts=1",
        "cluster.min_ranks=2",
        "cluster.stall_timeout=60",
        "parallel.shard=2",
        "parallel.context=2",
        "parallel.tensor=2",
    ],
)
def test_what_is_valid_but_not_built_is_refused_by_name(tmp_path: Path, setting: str) -> None:
    cause = refused(tmp_path, [setting])
    key = setting.partition("=")[0]
    assert "not in this version" in cause
    assert cause.startswith(f"`{key}=")
    instead = re.findall(r"`([^`]+)`", cause)[-1]
    check_train(load(tmp_path, MINIMAL, [f"{key}={instead}"]))
    recipe = load(tmp_path, MINIMAL, [setting, "data.eval=task:add"])
    for check in (check_sft, check_eval):
        assert any("not in this version" in cause for cause in causes_of(lambda c=check: c(recipe)))


def test_evaluation_needs_rows(tmp_path: Path) -> None:
    assert "`data.eval` is not set" in one_cause(lambda: check_eval(load(tmp_path)))


def test_supervised_training_does_not_ask_for_what_only_reinforcement_learning_reads(tmp_path: Path) -> None:
    check_sft(load(tmp_path, MINIMAL, ["rollout.samples_per_prompt=1", "rollout.top_p=0.5"]))


def test_epochs_beside_steps_are_said_and_any_recipe_runs_with_two_steps(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL + "train: {epochs: 3}", ["train.steps=2"])
    (note,) = check_train(recipe)
    assert "`train.epochs=3` is not read" in note


ROOT = Path(__file__).parents[3]


NOT_BUILT = {
    "dapo_math_17k_qwen2_5_7b.yaml": {"cluster.backend=local", "cluster.ranks=8"},
    "qwen3_8b_8xh200.yaml": {"cluster.backend=local", "cluster.ranks=8"},
    "qwen3_32b_8xh200.yaml": {"cluster.backend=local", "cluster.ranks=8", "rollout.tensor_parallel=2"},
    "qwen3_next_80b_4x8xa800.yaml": {
        "cluster.backend=ray",
        "cluster.ranks=32",
        "cluster.ranks_per_node=8",
        "parallel.shard=16",
        "rollout.tensor_parallel=8",
    },
}
"""Recipes that ask for what this version refuses, and exactly that."""


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_that_we_ship_loads_and_passes_also_with_two_steps(path: Path) -> None:
    for overrides in ([], ["train.steps=2"]):
        recipe = load_recipe(path, overrides)
        check = check_sft if recipe.model.init == "random" or "sft" in path.stem else check_train
        if path.name in NOT_BUILT:
            causes = causes_of(partial(check, recipe))
            assert {cause.split("`")[1] for cause in causes if "is not in this version" in cause} == NOT_BUILT[
                path.name
            ]
            assert len(causes) == len(NOT_BUILT[path.name]), causes
        else:
            check(recipe)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_what_a_shipped_recipe_names_inside_recipes_is_shipped_too(path: Path) -> None:
    recipe = load_recipe(path, [])
    named = (recipe.model.config, recipe.data.train, recipe.data.eval)
    assert [name for name in named if name and name.startswith("recipes/") and not (ROOT / name).exists()] == []
