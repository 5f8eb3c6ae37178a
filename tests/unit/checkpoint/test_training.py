"""A training checkpoint, out and back: training goes on as if it had never stopped."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plimsoll.checkpoint.rng import restore_rng
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import read_training_checkpoint, write_training_checkpoint
from plimsoll.errors import CheckpointError
from plimsoll.weights.tensors import write_tensors
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
        write_training_checkpoint(
            folder,
            state=state,
            optimizer_state=trainer.moments(),
            write_model=lambda model: void(write_tensors(model / "model.safetensors", trainer.model.state_dict())),
        )

    path = CheckpointStore(tmp_path, keep=1).save(12, write)
    trainer.step()

    torch.manual_seed(1)
    resumed = Trainer(dtype)
    read = read_training_checkpoint(path)
    assert read.state == state
    assert read.model_folder == path / "model"
    resumed.load(read.model, read.optimizer)
    restore_rng(read.state.rng, "cpu")
    resumed.step()

    for name, value in trainer.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    for name, value in trainer.moments().items():
        assert torch.equal(resumed.moments()[name], value), name


def void(_: object) -> None:
    """Drops a result."""


@pytest.mark.parametrize(
    ("gone", "said"), [("model/m.safetensors", "holds no"), ("optimizer.safetensors", "is missing")]
)
def test_a_part_that_is_missing_is_named(tmp_path: Path, gone: str, said: str) -> None:
    write(tmp_path)
    (tmp_path / gone).unlink()

    with pytest.raises(CheckpointError, match=said):
        read_training_checkpoint(tmp_path)


def test_tensors_that_are_cut_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(CheckpointError, match="cannot be read"):
        read_training_checkpoint(tmp_path)


def write(folder: Path) -> None:
    write_training_checkpoint(
        folder,
        state=training_state(),
        optimizer_state={"m": torch.ones(2)},
        write_model=lambda model: void(write_tensors(model / "m.safetensors", {"w": torch.ones(2)})),
    )
