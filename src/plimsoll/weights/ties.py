"""Tied weights: one parameter under two names, usually the embedding and the head."""

from collections.abc import Iterable, Mapping
from contextlib import closing

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plimsoll.errors import RefusedError
from plimsoll.weights.box import Box
from plimsoll.weights.checkpoint_tables import NAMES_SHOWN, CheckpointTables, TiedPair
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.hf_names import declared_ties
from plimsoll.weights.layout import LocalBox, cut_box, part_transfers
from plimsoll.weights.pieces import ParameterTable
from plimsoll.weights.read import read_transfers
from plimsoll.weights.ring import StagingRing

_COMPARED_ELEMENTS = 2**20
"""Of two stored tensors at a time."""


def shared_names(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, ...]]:
    """The names of each distinct tensor, in their order."""
    groups: dict[int, list[str]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return [tuple(names) for names in groups.values()]


def tied_names(model: PreTrainedModel, members: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Every name → all names of the same tensor, in the module's order. RefusedError when a declared tie is lost."""
    groups = {name: names for names in shared_names(members.items()) for name in names}
    lost = [
        f"{name} and {source} are one weight by the config (tie_word_embeddings) and two parameters in the model: a tie"
        " is lost when fully_shard wraps one of the two modules alone; put both into the same group, the root's"
        for name, source in declared_ties(model).items()
        if name in groups and name not in groups.get(source, ())
    ]
    if lost:
        raise RefusedError(lost)
    return groups


def untie(model: PreTrainedModel, name: str) -> None:
    """Give `name` a parameter of its own, equal in shape, dtype and device, its values undefined.

    To be called after building and before sharding: `fully_shard` keeps for itself which modules share a parameter.
    """
    owner, _, leaf = name.rpartition(".")
    shared = model.get_parameter(name)
    own = nn.Parameter(torch.empty_like(shared), requires_grad=shared.requires_grad)
    model.get_submodule(owner).register_parameter(leaf, own)
    declared_ties(model).pop(name, None)  # what saving and loading by transformers go by


def empty_on(model: nn.Module, device: torch.device) -> None:
    """`model.to_empty`, with tied weights still tied: torch gives every name of a meta parameter memory of its own."""
    groups = shared_names(model.named_parameters(remove_duplicate=False))
    doubles = {name: kept for kept, *others in groups for name in others}
    model.to_empty(device=device)
    for name, kept in doubles.items():
        owner, _, leaf = name.rpartition(".")
        shared = model.get_parameter(kept)
        if model.get_parameter(name) is not shared:
            model.get_submodule(owner).register_parameter(leaf, shared)


def broken_ties(
    files: WeightFiles, found: CheckpointTables, members: Mapping[str, Tensor], *, part: int = 0, parts: int = 1
) -> list[TiedPair]:
    """Of names that are one tensor in the model and two in the files, those whose stored values differ.

    Compared as the model would hold them, in its dtype, in small blocks: `from_pretrained` keeps or parts them by the
    same rule, whatever the config says. `members`: the model's tensors by name. `part` of `parts`: look at every
    `parts`-th block only, so that ranks can share the work. RefusedError where one is made by a conversion that is no
    table.
    """
    # Its memory is taken only where something has to be cast.
    with closing(StagingRing(buffer_bytes=_COMPARED_ELEMENTS * 8, num_buffers=1)) as ring:

        def equal(pair: TiedPair) -> bool:
            kept, dtype = found.tables[pair.kept], members[pair.kept].dtype
            boxes = list(cut_box(Box.whole(kept.shape), _COMPARED_ELEMENTS))[part::parts]
            return all(
                torch.equal(*(_block(files, table, box, dtype, ring) for table in (kept, pair.table))) for box in boxes
            )

        return [pair for pair in found.tied_pairs_to_compare if not equal(pair)]


def _block(files: WeightFiles, table: ParameterTable, box: Box, dtype: torch.dtype, ring: StagingRing) -> Tensor:
    """A part of a parameter."""
    if table.conversion is not None:
        raise RefusedError(
            f"{table.name} is tied by the config and stored under two names, and transformers computes it from "
            f"{', '.join(table.conversion.stored[:NAMES_SHOWN])}: whether the tie holds is not known; set "
            "tie_word_embeddings to false in its config.json"
        )
    block = torch.empty(box.shape, dtype=dtype)
    part = LocalBox(full=box, local=Box.whole(box.shape))
    read_transfers(files, part_transfers(table, files.tensors, part, block), ring=ring, threads=1)
    return block
