"""Small runs: a model of a few thousand weights, data of a few rows, commands in this process."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from plimsoll.cli import main
from plimsoll.jsonl import read_jsonl

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "recipes" / "models" / "tiny"

CHECKSUM = """
def reward(prompt, response, answer, **extra):
    return float(sum(response.encode()) % 2)
"""
"""0 or 1, about half of the responses each: every group of a few samples has a signal, without anything learnt."""

TRAIN = """
name: rl
model: {path: unset}
data:
  train: task:reverse_string
  eval: task:reverse_string
  task: {length: 3, train_size: 16, eval_size: 7}
  prompts_per_step: 4
  max_prompt_tokens: 24
rollout:
  samples_per_prompt: 4
  max_response_tokens: 6
reward: {function: unset, workers: 1}
algorithm: {name: dapo, dynamic_sampling: false}
train: {steps: 2, learning_rate: 1e-3, threads: 1}
observe: {console: "off", rollout_samples: 16, memory_interval: 1.0, report: false}
"""
"""What `arguments` fills in: model.path, reward.function, run_root."""


def save_model(folder: Path, *, seed: int = 0) -> Path:
    """A Hugging Face folder with random weights, float32: the shipped tokenizer, one layer of width 32."""
    config = AutoConfig.from_pretrained(
        TOKENIZER,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_key_value_heads=2,
        initializer_range=0.3,  # far from uniform, so that wrong log-probs would show
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """One row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class Small:
    """A folder to work in, and the recipe of `TRAIN` in it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(TRAIN, encoding="utf-8")
        self.reward = folder / "checksum.py"
        self.reward.write_text(CHECKSUM, encoding="utf-8")
        self.runs = folder / "runs"

    def arguments(self, overrides: Sequence[str] = ()) -> list[str]:
        """RECIPE and its overrides; later ones win over the usual ones."""
        usual = {
            "model.path": str(self.model),
            "reward.function": f"{self.reward}:reward",
            "run_root": str(self.runs),
        }
        options = [item for item in overrides if item.startswith("--")]
        settings = [item for item in overrides if not item.startswith("--")]
        given = {item.partition("=")[0] for item in settings}
        return [
            str(self.recipe),
            *(f"{key}={value}" for key, value in usual.items() if key not in given),
            *settings,
            *options,
        ]

    def train(self, *overrides: str, expect: int = 0) -> Path:
        """`plimsoll train`; the run's folder."""
        return self._run("train", overrides, expect)

    def sft(self, *overrides: str, expect: int = 0) -> Path:
        """`plimsoll sft`; the run's folder."""
        return self._run("sft", overrides, expect)

    def _run(self, command: str, overrides: Sequence[str], expect: int) -> Path:
        code = main([command, *self.arguments(overrides)])
        assert code == expect, f"plimsoll {command} ended with {code}"
        name = next((item.removeprefix("name=") for item in overrides if item.startswith("name=")), "rl")
        return self.runs / name


def metrics(run: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl."""
    return list(read_jsonl(run / "metrics.jsonl"))


def rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    """Rows of one step's rollouts."""
    return list(read_jsonl(run / "rollouts" / f"step_{step:06d}.jsonl"))


def last_line(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON object that ends stdout."""
    line = capfd.readouterr().out.splitlines()[-1]
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint."""
    return tensors(run / "checkpoints" / f"step_{step}" / "model")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files in a folder."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def environment() -> dict[str, str]:
    """For a subprocess: this environment, without a network and with one thread."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
