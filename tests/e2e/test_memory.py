"""Memory as the commands show it: refusals before anything is read, engines, plans of other versions."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from plimsoll.checkpoint.saving import TrainingSaver
from plimsoll.cli import main
from plimsoll.config import files
from plimsoll.config.derived import ADDED
from plimsoll.errors import CheckpointError
from tests.e2e.small import Small, metrics

NO_EVAL = "data.eval=null"


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the extra were installed."""
    monkeypatch.setattr(files, "installed", lambda _: True)


def large_without_weights(folder: Path, model: Path) -> Path:
    """A folder with the config of 154 million parameters: 2.3 GiB with gradients and moments. Its weights are no
    weights, so whoever opens them says something else."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10}
    config["layer_types"] = ["full_attention"] * 10
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


def test_host_memory_that_is_not_enough_is_refused_before_a_weight_file_is_opened(
    small: Small, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    large = large_without_weights(small.folder / "large", model)
    arguments = (f"model.path={large}", NO_EVAL)
    small.train(*arguments, "memory.host_memory=1GiB", expect=2)
    said = capfd.readouterr().err
    assert "host memory: the node of rank 0 needs 2." in said
    assert " GiB and has 1.00 GiB" in said
    assert "the largest part is optimizer_state" in said
    assert not small.runs.exists()


def test_an_engine_that_cannot_serve_the_run_is_refused_before_the_earlier_run_is_deleted(
    small: Small, with_vllm: None, capfd: pytest.CaptureFixture[str]
) -> None:
    run = small.train(NO_EVAL, "train.steps=1")
    held = sorted(run.rglob("*"))
    small.train(NO_EVAL, "train.steps=1", "rollout.engine=vllm", "--overwrite", expect=2)
    assert "rollout.engine=vllm needs a GPU" in capfd.readouterr().err
    assert sorted(run.rglob("*")) == held


def test_what_samples_nothing_needs_no_engine(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    if files.installed("vllm"):
        pytest.skip("for an environment without vLLM")
    run = small.sft(NO_EVAL, "train.steps=1", "rollout.engine=vllm")
    assert len(metrics(run)) == 1
    small.sft("name=other", "train.steps=1", "rollout.engine=vllm", expect=2)
    assert "plimsoll-rl[vllm]" in capfd.readouterr().err


def test_a_run_of_another_engine_is_evaluated_by_ours_which_is_said(
    small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    run = small.train("train.steps=1")
    recipe: dict[str, Any] = json.loads((run / "recipe.json").read_text())
    recipe["rollout"]["engine"] = "vllm"
    (run / "recipe.json").write_text(json.dumps(recipe))
    capfd.readouterr()
    assert main(["eval", str(run), "--json"]) == 0
    said = capfd.readouterr()
    assert "`rollout.engine=vllm` samples in training alone" in said.err
    assert json.loads(said.out.splitlines()[-1])["accuracy"] == metrics(run)[-1]["eval/accuracy"]


def rewrite_plan(run: Path, memory: dict[str, Any] | None) -> None:
    """As another version has left it: without what came later, or with a memory plan of other fields."""
    path = run / "plan.json"
    plan = json.loads(path.read_text())
    for key in ADDED:
        del plan[key]
    path.write_text(json.dumps(plan if memory is None else {**plan, "memory": memory}))


@pytest.mark.parametrize("memory", [None, {"fits": True, "rows": []}], ids=["none", "of other fields"])
def test_a_run_of_another_version_goes_on_with_a_memory_plan_of_this_machine(
    small: Small, memory: dict[str, Any] | None
) -> None:
    run = small.train(NO_EVAL, "train.steps=1")
    before = json.loads((run / "plan.json").read_text())
    rewrite_plan(run, memory)
    small.train(NO_EVAL, "train.steps=2", "--resume")
    after = json.loads((run / "plan.json").read_text())
    assert after["memory"]["fits"]
    different = {key for key in before if before[key] != after[key]}
    assert different <= {"steps", "optimizer_steps", "memory"}
    assert [row["step"] for row in metrics(run)] == [1, 2]


def test_why_the_run_ends_is_said_last_when_its_last_checkpoint_fails_too(
    small: Small, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise CheckpointError("no room")

    monkeypatch.setattr(TrainingSaver, "save", fails)
    small.reward.write_text("def reward(prompt, response, answer, **extra):\n    return 1.0\n")
    dynamic = ("algorithm.dynamic_sampling=true", "algorithm.dynamic_max_rounds=2")
    small.train(*dynamic, NO_EVAL, expect=1)
    said = capfd.readouterr().err.splitlines()
    assert any("could not be saved: no room" in line for line in said)
    assert "groups with a signal after 2 rounds" in said[-1]
