"""A worker's weights and moments to and from files, on any number of ranks: each writes and reads its own part.

Moments are stored as full tensors beside their step counts, `NAME.exp_avg`, `NAME.exp_avg_sq` and `NAME.step`, whatever
the sharding: another number of ranks and another mesh read their parts of the same files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plimsoll.errors import CheckpointError
from plimsoll.update.optimizer import Optimizer
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.export import architecture_of, copy_companions, model_outgoings, write_config
from plimsoll.weights.file_layout import FileLayout, Outgoing, lay_out, whole
from plimsoll.weights.files import StoredTensor, WeightFiles
from plimsoll.weights.pieces import identity_table
from plimsoll.weights.read import read_parameters
from plimsoll.weights.write import ShardWriter, create_files

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


@dataclass(slots=True, kw_only=True, frozen=True)
class StateFolders:
    """Where the tensors of one training state go; both folders exist."""

    model: Path
    """Becomes a Hugging Face folder."""
    optimizer: Path
    tokenizer: Path
    """Tokenizer, chat template and generation config are copied from here."""


def state_writer(
    lm: PreTrainedModel,
    optimizer: Optimizer,
    folders: StateFolders,
    *,
    control: ControlGroup,
    budget_bytes: int,
) -> ShardWriter:
    """This rank's writer of weights (in their own dtype) and moments. Rank 0 also makes everything but their bytes.

    Sends nothing: every rank must have returned from here before one of them runs its writer. What is written are the
    tensors themselves, not copies: they may change once `ShardWriter.tensors_read` is set.

    Raises:
        OSError, CheckpointError: a full disk, a folder that is not writable, a tokenizer that is gone.
    """
    model = lay_out(model_outgoings(lm, None))
    moments = lay_out(_moment_outgoings(optimizer), stem="optimizer")
    if control.rank == 0:
        create_files(folders.model, model)
        create_files(folders.optimizer, moments)
        write_config(folders.model, lm.config, _dtype_of(lm), architecture_of(lm))
        copy_companions(folders.tokenizer, folders.model)
    # One writer for both: one set of staging buffers, one moment from which everything may change.
    root = folders.model.parent
    layouts = [*_inside(folders.model, root, model), *_inside(folders.optimizer, root, moments)]
    return ShardWriter(root, layouts, rank=control.rank, ranks=control.ranks, budget_bytes=budget_bytes)


def read_moments(optimizer: Optimizer, files: Sequence[Path]) -> None:
    """Fill the optimizer from the files that `state_writer` made, each rank its own part. Sends nothing.

    Raises:
        CheckpointError: tensors are missing, of another shape, or belong to no parameter.
        RefusedError: a file is damaged. In both cases the moments are not to be used.
    """
    with WeightFiles(files) as opened:
        moments = optimizer.empty_moments()
        steps = {name: torch.zeros((), dtype=torch.float32) for name in moments if f"{name}.{_STEP}" in opened.tensors}
        targets = {f"{name}.{moment}": moments[name][moment] for name in steps for moment in _MOMENTS}
        targets |= {f"{name}.{_STEP}": count for name, count in steps.items()}
        _check_fit(targets, opened.tensors)
        tables = {name: identity_table(name, tuple(tensor.shape)) for name, tensor in targets.items()}
        read_parameters(opened, tables, targets)
    optimizer.finish_load({name: float(count) for name, count in steps.items()})


def _check_fit(targets: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """A parameter of which nothing is stored has had no gradient when it was saved: no target of that name is asked."""
    problems: dict[str, list[str]] = {
        "missing": sorted(set(targets) - set(stored)),
        "of no parameter": sorted(set(stored) - set(targets)),
        "of another shape": sorted(
            name for name in set(targets) & set(stored) if tuple(targets[name].shape) != stored[name].shape
        ),
    }
    said = [f"{len(names)} {what} ({', '.join(names[:8])})" for what, names in problems.items() if names]
    if said:
        raise CheckpointError(f"the optimizer state does not fit the model: {'; '.join(said)}")


def _moment_outgoings(optimizer: Optimizer) -> list[Outgoing]:
    steps = optimizer.steps_by_name()
    found: list[Outgoing] = []
    for name, moments in optimizer.moments().items():
        found += [whole(f"{name}.{moment}", moments[moment]) for moment in _MOMENTS]
        found.append(whole(f"{name}.{_STEP}", torch.tensor(steps[name], dtype=torch.float32)))
    return found


def _inside(folder: Path, root: Path, layouts: Sequence[FileLayout]) -> list[FileLayout]:
    """Named from `root`."""
    return [replace(layout, name=f"{folder.relative_to(root).as_posix()}/{layout.name}") for layout in layouts]


def _dtype_of(lm: PreTrainedModel) -> torch.dtype:
    return next(parameter.dtype for parameter in lm.parameters())
