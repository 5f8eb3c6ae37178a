"""On a CPU the plan's host memory and the ledger's agree in every phase, for a model whose training takes a GiB."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from plimsoll.jsonl import read_jsonl
from plimsoll.memory.plan.job import GIB, MIB
from tests.e2e.small import CHECKSUM, TOKENIZER, environment

RECIPE = """
name: planned
model: {{init: random, config: {model}, tokenizer: {model}}}
run_root: {runs}
data:
  train: task:reverse_string
  task: {{length: 3, train_size: 16, eval_size: 7}}
  prompts_per_step: 2
  max_prompt_tokens: 24
rollout: {{samples_per_prompt: 2, max_response_tokens: 6}}
reward: {{function: "{reward}:reward", workers: 1}}
algorithm: {{name: dapo, dynamic_sampling: false}}
train: {{steps: 2, learning_rate: 1e-3, threads: 1}}
observe: {{console: "off", memory_interval: 0.005, report: false}}
"""

TOLERANCE = 32 * MIB
SHARE = 0.05


class Planned:
    """A folder with a model of 69 M parameters, float32, and a recipe for it."""

    def __init__(self, folder: Path) -> None:
        model = folder / "model"
        shutil.copytree(TOKENIZER, model)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        config |= {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 8,
            "layer_types": ["full_attention"] * 8,
            "num_attention_heads": 12,
        }
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        reward = folder / "checksum.py"
        reward.write_text(CHECKSUM, encoding="utf-8")
        self.recipe = folder / "recipe.yaml"
        self.runs = folder / "runs"
        self.recipe.write_text(RECIPE.format(model=model, runs=self.runs, reward=reward), encoding="utf-8")

    def run(self, command: str, *overrides: str) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
        """The memory of plan.json, and the rows of memory.jsonl."""
        arguments = [command, str(self.recipe), *overrides, "--overwrite"]
        # A process of its own: what a run before this one has left in the heap would be taken again, and not be seen.
        done = subprocess.run(
            [sys.executable, "-m", "plimsoll", *arguments],
            env=environment() | {"CUDA_VISIBLE_DEVICES": ""},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        folder = self.runs / "planned"
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["memory"]
        return plan, list(read_jsonl(folder / "memory.jsonl"))


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    return Planned(tmp_path)


def check(plan: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Every row within the tolerance; all of them are told of when one is not."""
    step = next(row for row in plan["phases"] if row["phase"] == "update/step")
    assert sum(step["residents"].values()) >= GIB
    lines: list[str] = []
    worst = 0.0
    for row in rows:
        over = row["planned_host"] - row["host_growth_peak"]
        worst = max(worst, abs(over) / max(SHARE * row["host_growth_peak"], TOLERANCE))
        lines.append(
            f"step {row['step']} {row['phase']}: planned {row['planned_host'] / MIB:.1f} MiB,"
            f" measured {row['host_growth_peak'] / MIB:.1f}, over by {over / MIB:+.1f}"
        )
    assert worst <= 1, "\n".join(lines)


def phases(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [row["phase"] for row in rows]


def test_a_policy_without_a_reference(planned: Planned) -> None:
    # So many tokens that what a backward leaves in the C library's heap would show.
    plan, rows = planned.run("train", "data.prompts_per_step=4", "rollout.samples_per_prompt=4")
    assert plan["calibrated"]
    assert phases(rows) == ["load", *["rollout", "update", "sync"] * 2, "save"]
    check(plan, rows)


def test_supervised_training(planned: Planned) -> None:
    plan, rows = planned.run("sft")
    assert plan["calibrated"]
    assert phases(rows) == ["load", "update", "update", "save"]
    check(plan, rows)


@pytest.mark.slow
@pytest.mark.parametrize("calibration", ["on", "off"])
@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.kl_coefficient=0.01"],
        ["algorithm.kl_coefficient=0.01", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1"],
        ["train.token_budget=40"],  # several micro-batches
        ["rollout.samples_per_prompt=16"],  # a few hundred tokens in one
        ["algorithm.entropy_coefficient=0.01", "data.eval=task:reverse_string"],
    ],
    ids=["reference", "reward", "several", "many", "entropy"],
)
def test_other_runs(planned: Planned, overrides: list[str], calibration: str) -> None:
    """With what a micro-batch was measured to take, and by the formulas alone."""
    plan, rows = planned.run("train", f"memory.calibration={calibration}", *overrides)
    assert plan["calibrated"] == (calibration == "on")
    check(plan, rows)


@pytest.mark.slow
def test_weights_from_a_file(planned: Planned) -> None:
    """What an earlier run has saved, read through the ring; its calibration is remembered."""
    planned.run("sft", "train.steps=1")
    shutil.move(planned.runs / "planned", planned.runs / "first")
    plan, rows = planned.run("sft", f"model.path={planned.runs / 'first'}", "model.init=pretrained")
    assert plan["calibrated"]
    check(plan, rows)
    load = next(row for row in plan["phases"] if row["phase"] == "load")
    assert "calibration" not in load["workspace"]
