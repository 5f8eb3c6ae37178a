"""Tied weights: one parameter under two names, usually the embedding and the head."""

import os
from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.box import Box
from plimsoll.weights.checkpoint_tables import CheckpointTables, TiedPair
from plimsoll.weights.files import StoredTensor, WeightFiles
from plimsoll.weights.hf_names import declared_ties
from plimsoll.weights.pieces import ParameterTable

_BLOCK_BYTES = 4 * 1024**2
"""Read at a time of each of two tensors that are compared."""


def tied_names(model: PreTrainedModel, members: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Every name → all names of the same tensor, in the module's order. RefusedError when a declared tie is lost."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in members.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    groups = {name: tuple(names) for names in by_tensor.values() for name in names}
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
    before = list(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    doubles = {name: kept for name, tensor in before if (kept := first.setdefault(id(tensor), name)) != name}
    model.to_empty(device=device)
    for name, kept in doubles.items():
        owner, _, leaf = name.rpartition(".")
        shared = model.get_parameter(kept)
        if model.get_parameter(name) is not shared:
            model.get_submodule(owner).register_parameter(leaf, shared)


def broken_ties(model: PreTrainedModel, found: CheckpointTables, files: WeightFiles) -> list[str]:
    """Names to `untie`: stored beside the name that the config ties them to, and with other values.

    The files decide, as in `from_pretrained`: a config may say tied where training has parted the two. Compared in the
    model's dtype, 8 MiB in memory at a time. RefusedError where neither is stored as it is.
    """
    return [pair.name for pair in found.tied_pairs_to_compare if not _are_equal(model, found, pair, files)]


def _are_equal(model: PreTrainedModel, found: CheckpointTables, pair: TiedPair, files: WeightFiles) -> bool:
    kept, own = (files.tensors[_stored_whole(table)] for table in (found.tables[pair.kept], pair.table))
    dtype = model.get_parameter(pair.name).dtype
    blocks = zip(_blocks(files, kept), _blocks(files, own), strict=True)
    return all(torch.equal(a.to(dtype), b.to(dtype)) for a, b in blocks)


def _stored_whole(table: ParameterTable) -> str:
    whole = Box.whole(table.shape)
    first = table.pieces[0] if table.pieces else None
    if first is None or first.stored_box != whole or first.dims != tuple(range(len(whole.shape))):
        raise RefusedError(
            f"{table.name} is tied by the config and stored under two names by way of a conversion: whether the tie"
            " holds is not known; set tie_word_embeddings to false in its config.json"
        )
    return first.stored


def _blocks(files: WeightFiles, stored: StoredTensor) -> Iterator[Tensor]:
    """The elements in order, flat, as many at a time for every dtype."""
    descriptor = files.descriptor(stored.path)
    size, remaining = stored.dtype.itemsize, prod(stored.shape)
    position = stored.offset
    while remaining:
        count = min(remaining, _BLOCK_BYTES // 8)
        data = os.pread(descriptor, count * size, position)
        if len(data) != count * size:
            raise CheckpointError(f"{stored.path} ended within {stored.name}")
        yield torch.frombuffer(bytearray(data), dtype=stored.dtype)
        position += len(data)
        remaining -= count
