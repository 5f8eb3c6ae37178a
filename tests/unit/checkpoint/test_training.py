"""A training checkpoint, out and back: training goes on as if it had never stopped."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plimsoll.checkpoint.rng import restore_rng
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import read_training_checkpoint, start_training_checkpoint
from plimsoll.errors import CheckpointError
from plimsoll.weights.tensors import TensorFiles, write_tensors
from tests.unit.checkpoint.states import training_state


class Trainer:
    """Two layers, AdamW, noise from the global generator."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1)).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.dtype = dtype

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 5, dtype=self.dtype)).square().sum().backward()
        self.optimizer.step()

    def moments(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        }

    def load(self, model: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(dict(model))
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter] = {
                key: moments[f"{name}.{key}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")
            }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_resumed_trainer_is_bitwise_the_uninterrupted_one(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    trainer = Trainer(dtype)
    trainer.step()
    trainer.step()
    state = training_state()

    def write(folder: Path) -> None:
        start_training_checkpoint(folder, state)
        write_tensors(folder / "model" / "model.safetensors", trainer.model.state_dict())
        write_tensors(folder / "optimizer" / "optimizer.safetensors", trainer.moments())

    path = CheckpointStore(tmp_path, keep=1).save(12, write)
    trainer.step()

    torch.manual_seed(1)
    resumed = Trainer(dtype)
    read = read_training_checkpoint(path)
    assert read.state == state
    assert read.model == path / "model"
    resumed.load(TensorFiles([read.model / "model.safetensors"]), TensorFiles(read.optimizer))
    restore_rng(read.state.rng, "cpu")
    resumed.step()

    for name, value in trainer.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    for name, value in trainer.moments().items():
        assert torch.equal(resumed.moments()[name], value), name


def write(folder: Path) -> None:
    start_training_checkpoint(folder, training_state())
    write_tensors(folder / "model" / "m.safetensors", {"w": torch.ones(2)})
    write_tensors(folder / "optimizer" / "o.safetensors", {"m": torch.ones(2)})


@pytest.mark.parametrize("gone", ["model/m.safetensors", "optimizer/o.safetensors"])
def test_a_part_that_is_missing_is_named(tmp_path: Path, gone: str) -> None:
    write(tmp_path)
    (tmp_path / gone).unlink()

    with pytest.raises(CheckpointError, match=f"{gone.partition('/')[0]} holds no"):
        read_training_checkpoint(tmp_path)


def test_moments_in_one_file_beside_the_model_are_found(tmp_path: Path) -> None:
    """Checkpoints were written so when one rank wrote all of it."""
    write(tmp_path)
    (tmp_path / "optimizer" / "o.safetensors").rename(tmp_path / "optimizer.safetensors")
    (tmp_path / "optimizer").rmdir()

    assert read_training_checkpoint(tmp_path).optimizer == (tmp_path / "optimizer.safetensors",)
