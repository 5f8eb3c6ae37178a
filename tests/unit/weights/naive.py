"""Tables applied in the plainest way: one process, whole files in memory."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from plimsoll.weights.buffers import rebuild_buffers
from plimsoll.weights.names import CheckpointTables, ExportTensor, checkpoint_tables, module_tensors
from plimsoll.weights.ties import empty_on

CPU = torch.device("cpu")


def stored_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def fill(model: PreTrainedModel, found: CheckpointTables, stored: dict[str, Tensor]) -> None:
    members = module_tensors(model)
    for name, table in found.tables.items():
        target = members[name].detach()
        if table.conversion is not None:
            target.copy_(table.conversion.convert({source: stored[source] for source in table.conversion.stored}))
        for piece in table.pieces:
            target[piece.target_box.slices] = piece.as_target(stored[piece.stored][piece.stored_box.slices])


def load(model: PreTrainedModel, stored: dict[str, Tensor]) -> CheckpointTables:
    """A model on the meta device gets memory, the stored values, and its buffers."""
    found = checkpoint_tables(model, stored)
    empty_on(model, CPU)
    for parameter in model.parameters():
        parameter.detach().fill_(torch.nan)
    fill(model, found, stored)
    rebuild_buffers(model, CPU)
    return found


def exported(model: PreTrainedModel, tables: dict[str, ExportTensor]) -> dict[str, Tensor]:
    members = module_tensors(model)
    made: dict[str, Tensor] = {}
    for name, entry in tables.items():
        made[name] = torch.full(entry.shape, torch.nan)
        for parameter, piece in entry.parts:
            made[name][piece.stored_box.slices] = piece.as_stored(members[parameter].detach()[piece.target_box.slices])
    return made


def differences(model: nn.Module, expected: nn.Module) -> list[str]:
    """Names of parameters and buffers that are not bitwise equal, of the same dtype, or present in one alone."""
    wrong: list[str] = []
    for kind in ("named_parameters", "named_buffers"):
        own = dict(getattr(model, kind)(remove_duplicate=False))
        theirs = dict(getattr(expected, kind)(remove_duplicate=False))
        wrong += sorted(set(own) ^ set(theirs))
        wrong += [
            name
            for name in own.keys() & theirs.keys()
            if own[name].dtype != theirs[name].dtype or not torch.equal(own[name], theirs[name])
        ]
    return wrong


def save(model: PreTrainedModel, folder: Path, stored: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The folder that transformers writes, its tensors replaced when others are given."""
    model.save_pretrained(folder)
    if stored is not None:
        copies = {name: tensor.detach().clone().contiguous() for name, tensor in stored.items()}
        save_file(copies, folder / "model.safetensors", metadata={"format": "pt"})
    return stored_in(folder)


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, dict[str, Any]]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    return model, info


def fits(found: CheckpointTables) -> bool:
    return not found.missing and not found.unexpected and not found.mismatched
