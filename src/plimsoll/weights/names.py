"""Names of a Hugging Face checkpoint: which stored tensors make which parameter, and the way back."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plimsoll.errors import RefusedError
from plimsoll.weights.checkpoint_tables import (
    NAMES_SHOWN,
    CheckpointTables,
    ExportTensor,
    Mismatch,
    NamedShape,
    StoredShape,
    TiedPair,
    misfit_error,
)
from plimsoll.weights.hf_names import (
    Group,
    declared_ties,
    failed_operation,
    forgiven_missing,
    forgiven_unexpected,
    group_names,
    natural_key,
    saved_state,
)
from plimsoll.weights.pieces import Conversion, ParameterTable, Piece
from plimsoll.weights.ties import tied_names
from plimsoll.weights.trace import MisshapenError, Traced, export_parts, load_pieces

__all__ = [
    "CheckpointTables",
    "ExportTensor",
    "Mismatch",
    "NamedShape",
    "StoredShape",
    "TiedPair",
    "checkpoint_tables",
    "export_tables",
    "misfit_error",
    "module_tensors",
    "plain_name",
    "sources_of",
    "uncompiled",
]

_log = logging.getLogger(__name__)


def plain_name(name: str) -> str:
    """Without what activation checkpointing and `torch.compile` put in between."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def uncompiled(model: nn.Module) -> nn.Module:
    """The module itself where `torch.compile` has wrapped the whole of it."""
    return dict(model.named_children()).get("_orig_mod", model)


def module_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers by plain name, tied ones under each of their names; full shapes."""
    persistent = {plain_name(name) for name in model.state_dict()}
    every = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {plain: tensor for name, tensor in every if (plain := plain_name(name)) in persistent}


def checkpoint_tables(model: PreTrainedModel, stored: Mapping[str, StoredShape]) -> CheckpointTables:
    """Tables as `from_pretrained` of transformers maps the names: renamed, merged, split, with or without the base
    model's prefix, tied under either name. No data is read.

    `model` may lie on the meta device and may be sharded by `fully_shard` already. Which conversions were used is noted
    in it, as `from_pretrained` does, so that `save_pretrained` reverts those. RefusedError when the config ties two
    parameters and the module holds two different ones.
    """
    members = module_tensors(model)
    ties = tied_names(model, members)
    grouped = group_names(model, stored, members)
    found: dict[str, ParameterTable] = {}
    mismatched: list[Mismatch] = []
    unexpected = _unexpected(model, grouped.unmatched, stored)
    for group in grouped.groups:
        for name, made in _make(model, group, stored, members).items():
            if name not in members:
                shape = () if made is None else made.shape
                unexpected.append(NamedShape(name=f"{name} (made of {_sources(group)})", shape=shape, head=False))
            elif made is not None and made.shape == tuple(members[name].shape):
                found[name] = made
            else:
                mismatched.append(_mismatch(name, group, made, members[name]))
    missing, forgiven = _missing(model, members, {*found, *(entry.name for entry in mismatched)}, ties)
    tables, pairs = _join_ties(model, found, ties)
    used = {name for table in (*tables.values(), *(pair.table for pair in pairs)) for name in sources_of(table)}
    return CheckpointTables(
        tables=tables,
        missing=missing,
        forgiven=forgiven,
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
        tied_pairs_to_compare=pairs,
        stored_shapes={name: tuple(stored[name].shape) for name in stored if name in used},
    )


def sources_of(table: ParameterTable) -> tuple[str, ...]:
    """Names of the stored tensors that a parameter is made of."""
    if table.conversion is not None:
        return table.conversion.stored
    return tuple(dict.fromkeys(piece.stored for piece in table.pieces))


def _make(
    model: PreTrainedModel, group: Group, stored: Mapping[str, StoredShape], members: Mapping[str, Tensor]
) -> dict[str, ParameterTable | None]:
    """Name in the module → table; None where shapes do not allow to join the stored tensors."""
    names = [name for _, name in group.collected]
    try:
        made = group.convert(model, {name: Traced.of(name, stored[name].shape) for name in names})
        return {
            name: ParameterTable(name=name, aliases=(), shape=tuple(traced.shape), pieces=load_pieces(traced))
            for name, traced in made.items()
        }
    except MisshapenError:
        return {group.first_target: None}
    except Exception as error:
        # An operation asked the symbol for what only a tensor has. Whatever it was, it is run on tensors instead.
        _log.debug("%s has no table: %s: %s", group.first_target, type(error).__name__, error)
    return _convert_whole(model, group, stored, members)


def _convert_whole(
    model: PreTrainedModel, group: Group, stored: Mapping[str, StoredShape], members: Mapping[str, Tensor]
) -> dict[str, ParameterTable | None]:
    """For operations without a table: transformers' own, on whole tensors, when the parameter is read."""
    names = tuple(name for _, name in group.collected)
    dtype = members[group.first_target].dtype
    empty = {name: torch.empty(stored[name].shape, dtype=dtype, device="meta") for name in names}
    try:
        made = group.convert(model, empty)
    except Exception as error:
        raise RefusedError(
            f"{group.first_target} cannot be made of {_sources(group)}: transformers' {group.operations} failed on"
            f" their shapes: {type(error).__name__}: {error}"
        ) from error

    def converter(target: str) -> Conversion:
        def convert(tensors: Mapping[str, Tensor]) -> Tensor:
            # Cast before it is converted, as from_pretrained does: an operation that computes rounds differently.
            return group.convert(model, {name: tensors[name].to(dtype) for name in names})[target]

        return Conversion(stored=names, convert=convert)

    return {
        name: ParameterTable(name=name, aliases=(), shape=tuple(tensor.shape), pieces=(), conversion=converter(name))
        for name, tensor in made.items()
    }


def _sources(group: Group) -> str:
    names = [name for _, name in group.collected]
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} tensors)"


def _mismatch(name: str, group: Group, made: ParameterTable | None, member: Tensor) -> Mismatch:
    return Mismatch(
        name=name,
        stored=tuple(source for _, source in group.collected),
        shape=tuple(member.shape),
        stored_shape=None if made is None else made.shape,
    )


def _is_head(model: PreTrainedModel, name: str) -> bool:
    """Outside of the base model, whose names a checkpoint has with or without its prefix."""
    body = model.base_model
    first = name.split(".")[0]
    return body is not model and first != model.base_model_prefix and first not in dict(body.named_children())


def _unexpected(
    model: PreTrainedModel, unmatched: Mapping[str, str], stored: Mapping[str, StoredShape]
) -> list[NamedShape]:
    forgiven = forgiven_unexpected(model)
    return [
        NamedShape(name=name, shape=tuple(stored[name].shape), head=_is_head(model, target))
        for name, target in unmatched.items()
        if forgiven is None or forgiven.search(target) is None
    ]


def _missing(
    model: PreTrainedModel,
    members: Mapping[str, Tensor],
    present: Collection[str],
    ties: Mapping[str, tuple[str, ...]],
) -> tuple[tuple[NamedShape, ...], tuple[str, ...]]:
    """What the checkpoint lacks and must not, and what it may."""
    pattern = forgiven_missing(model)
    absent = sorted((name for name in members if not any(other in present for other in ties[name])), key=natural_key)
    forgiven = tuple(name for name in absent if pattern is not None and pattern.search(name))
    missing = tuple(
        NamedShape(name=name, shape=tuple(members[name].shape), head=_is_head(model, name))
        for name in absent
        if name not in forgiven
    )
    return missing, forgiven


def _join_ties(
    model: PreTrainedModel, found: Mapping[str, ParameterTable], ties: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, ParameterTable], tuple[TiedPair, ...]]:
    """One table for tied names: of the name that others are tied to, where it is stored, else of any that is."""
    declared = declared_ties(model)
    tables: dict[str, ParameterTable] = {}
    for names in dict.fromkeys(ties.values()):
        present = sorted((name for name in names if name in found), key=lambda name: name in declared)
        if present:
            tables[names[0]] = replace(found[present[0]], name=names[0], aliases=names[1:])
    pairs = tuple(
        TiedPair(name=name, kept=ties[name][0], table=found[name])
        for name, source in declared.items()
        if name in found and source in found
    )
    return tables, pairs


def export_tables(model: PreTrainedModel, source: CheckpointTables | None) -> Mapping[str, ExportTensor]:
    """What to store, by name: the source's key set, or without a source what `save_pretrained` would write.

    Stored tensors of the source that no parameter is made of (buffers that are recomputed today) are left out; where
    it stored both names of a tie, both are written. RefusedError names the parameter and the operation when a
    conversion has no way back as a table.
    """
    return _from_model(model) if source is None else _from_source(source)


def _from_source(source: CheckpointTables) -> dict[str, ExportTensor]:
    parts: dict[str, list[tuple[str, Piece]]] = {name: [] for name in source.stored_shapes}
    # The second name of a tie is made of the parameter that both share.
    doubles = [replace(pair.table, name=pair.kept) for pair in source.tied_pairs_to_compare]
    for table in (*source.tables.values(), *doubles):
        if table.conversion is not None:
            raise RefusedError(
                f"{table.name} was made of {', '.join(table.conversion.stored[:NAMES_SHOWN])} by an operation that has"
                " no way back: export without the source's names writes the names of save_pretrained"
            )
        for piece in table.pieces:
            parts[piece.stored].append((table.name, piece))
    exported = {
        name: ExportTensor(name=name, shape=shape, parts=tuple(parts[name]))
        for name, shape in source.stored_shapes.items()
    }
    for tensor in exported.values():
        _check_covered(tensor)
    return exported


def _from_model(model: PreTrainedModel) -> dict[str, ExportTensor]:
    members = module_tensors(model)
    ties = tied_names(model, members)
    kept = {_saved_name(model, names) for names in ties.values()}
    state = {name: Traced.of(ties[name][0], tensor.shape) for name, tensor in members.items() if name in kept}
    try:
        exported = _follow_saving(model, state)
    except Exception as error:
        raise RefusedError(_why_not_saved(model, state, error)) from error
    for tensor in exported.values():
        _check_covered(tensor)
    return exported


def _follow_saving(model: PreTrainedModel, state: Mapping[str, Traced]) -> dict[str, ExportTensor]:
    return {
        name: ExportTensor(name=name, shape=tuple(traced.shape), parts=export_parts(name, traced))
        for name, traced in saved_state(model, state).items()
    }


def _why_not_saved(model: PreTrainedModel, state: Mapping[str, Traced], error: Exception) -> list[str]:
    """Saving converts all parameters at once: one after the other they tell whose operation failed."""
    causes: list[str] = []
    for name, traced in state.items():
        try:
            _follow_saving(model, {name: traced})
        except Exception as own:
            causes.append(
                f"{name} cannot be exported: transformers' {failed_operation(own)} takes it apart in a way that is no"
                f" table of parts ({type(own).__name__}: {own})"
            )
    more = [f"and {len(causes) - NAMES_SHOWN} more parameters"] if len(causes) > NAMES_SHOWN else []
    return [*causes[:NAMES_SHOWN], *more] or [f"{type(model).__name__} cannot be exported: {error}"]


def _saved_name(model: PreTrainedModel, names: Sequence[str]) -> str:
    """Of tied names the one that others are tied to, as save_pretrained keeps it."""
    declared = declared_ties(model)
    return next((name for name in names if name not in declared), names[0])


def _check_covered(tensor: ExportTensor) -> None:
    covered = sum(piece.stored_box.num_elements for _, piece in tensor.parts)
    if covered != prod(tensor.shape):
        raise RefusedError(
            f"{tensor.name} cannot be exported: parameters make {covered} of its {prod(tensor.shape)} elements"
        )
