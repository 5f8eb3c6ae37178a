"""The contents of a training checkpoint: step_N/{state.json, model/, optimizer/}.

Both folders hold safetensors files of full tensors, whatever the sharding was: any number of ranks reads them, each its
own part. optimizer/ has `NAME.exp_avg`, `NAME.exp_avg_sq` and the scalar `NAME.step` for the parameter that the module
calls NAME.
"""

from dataclasses import dataclass
from pathlib import Path

from plimsoll.checkpoint.state import TrainingState, read_state, write_state
from plimsoll.errors import CheckpointError

MODEL = "model"
OPTIMIZER = "optimizer"

_ONE_FILE = "optimizer.safetensors"  # the moments before checkpoints were written by several ranks; the same tensors


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainingCheckpoint:
    """What a resumed run reads."""

    state: TrainingState
    model: Path  # a Hugging Face folder of the master weights
    optimizer: tuple[Path, ...]  # safetensors files


def start_training_checkpoint(folder: Path, state: TrainingState) -> None:
    """Write state.json and make the folders for the tensors; `folder` is the empty one that `CheckpointStore` gave."""
    write_state(folder, state)
    (folder / MODEL).mkdir()
    (folder / OPTIMIZER).mkdir()


def read_training_checkpoint(folder: Path) -> TrainingCheckpoint:
    """Read the state of a complete checkpoint and find its tensors.

    Raises:
        CheckpointError: a part is missing, or of a format that this version does not know.
    """
    state = read_state(folder)
    if not any((folder / MODEL).glob("*.safetensors")):
        raise CheckpointError(f"{folder / MODEL} holds no *.safetensors")
    one_file = folder / _ONE_FILE
    optimizer = tuple(sorted((folder / OPTIMIZER).glob("*.safetensors"))) or (one_file,)
    if optimizer == (one_file,) and not one_file.is_file():
        raise CheckpointError(f"{folder / OPTIMIZER} holds no *.safetensors")
    return TrainingCheckpoint(state=state, model=folder / MODEL, optimizer=optimizer)
