"""Rules that a plan needs: those of training without what is not built yet, and how ranks are grouped."""

from pathlib import Path

import pytest

from plimsoll.config.checks import check_plan
from plimsoll.errors import RecipeError
from tests.unit.config.recipes import MINIMAL, load


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.ranks=32", "cluster.ranks_per_node=8", "cluster.backend=ray", "parallel.shard=16"],
        ["rollout.engine=sglang", "rollout.tensor_parallel=2", "cluster.ranks=2"],
        ["model.path=null", "model.config=somewhere"],
    ],
)
def test_what_is_not_built_or_not_here_can_be_planned(tmp_path: Path, overrides: list[str]) -> None:
    check_plan(load(tmp_path, MINIMAL, overrides), "policy")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.ranks=8", "parallel.shard=3"], "set `parallel.shard` to 2 or 4"),
        (["cluster.ranks=8", "rollout.tensor_parallel=16"], "set `rollout.tensor_parallel` to 8"),
        (["model.path=null"], "`model.path` is not set"),
        (["rollout.samples_per_prompt=1"], "a group needs at least 2"),
    ],
)
def test_rules_between_keys_hold_for_a_plan_too(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_plan(load(tmp_path, MINIMAL, overrides), "policy")
    assert said in caught.value.causes[0]


def test_supervised_recipes_count_rows_and_know_no_groups(tmp_path: Path) -> None:
    check_plan(load(tmp_path, MINIMAL, ["rollout.samples_per_prompt=1"]), "supervised")
    with pytest.raises(RecipeError, match="rows a step"):
        check_plan(load(tmp_path, MINIMAL, ["data.prompts_per_step=63", "cluster.ranks=2"]), "supervised")
