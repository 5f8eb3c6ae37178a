"""The contents of a training checkpoint: step_N/{state.json, model/, optimizer.safetensors}."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from plimsoll.checkpoint.state import TrainingState, read_state, write_state
from plimsoll.errors import CheckpointError
from plimsoll.weights.tensors import TensorFiles, write_tensors

MODEL = "model"
OPTIMIZER = "optimizer.safetensors"


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainingCheckpoint:
    """What a resumed run reads. The tensors are read when they are asked for, one at a time."""

    state: TrainingState
    model_folder: Path  # a Hugging Face folder
    model: TensorFiles  # master weights, by the names in the files of model_folder
    optimizer: TensorFiles  # by the names given to `write_training_checkpoint`


def write_training_checkpoint(
    folder: Path,
    *,
    state: TrainingState,
    optimizer_state: Mapping[str, Tensor],
    write_model: Callable[[Path], None],
) -> None:
    """Fill `folder`, the argument that `CheckpointStore.save` hands to its writer.

    Args:
        optimizer_state: plain tensors (the local part of sharded ones), any device and strides; written bitwise.
        write_model: writes a Hugging Face folder in the dtype of the master weights into the folder it is given.
    """
    write_state(folder, state)
    (folder / MODEL).mkdir()
    write_model(folder / MODEL)
    write_tensors(folder / OPTIMIZER, optimizer_state)


def read_training_checkpoint(folder: Path) -> TrainingCheckpoint:
    """Open a complete checkpoint.

    Raises:
        CheckpointError: a part is missing, damaged, or of a format that this version does not know.
    """
    state = read_state(folder)
    weights = sorted((folder / MODEL).glob("*.safetensors"))
    if not weights:
        raise CheckpointError(f"{folder / MODEL} holds no *.safetensors")
    if not (folder / OPTIMIZER).is_file():
        raise CheckpointError(f"{folder / OPTIMIZER} is missing")
    try:
        model, optimizer = TensorFiles(weights), TensorFiles([folder / OPTIMIZER])
    except SafetensorError as error:
        raise CheckpointError(f"the tensors in {folder} cannot be read: {error}") from error
    return TrainingCheckpoint(state=state, model_folder=folder / MODEL, model=model, optimizer=optimizer)
