"""What is found out about a checkpoint's names, and the error that says what does not fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from plimsoll.errors import RefusedError
from plimsoll.weights.pieces import ParameterTable, Piece

NAMES_SHOWN = 8
"""Of each kind, in a message about names that do not fit."""


class StoredShape(Protocol):
    """What is known of a stored tensor without reading it."""

    @property
    def dtype(self) -> torch.dtype:
        """In the file."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """In the file."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class NamedShape:
    """A tensor that is missing or unexpected."""

    name: str
    """Missing: its name in the module. Unexpected: its name in the checkpoint."""
    shape: tuple[int, ...]
    head: bool
    """It lies outside of the base model: a head, which a model for another task does not share."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Mismatch:
    """A parameter of another shape than what is stored for it."""

    name: str
    """In the module."""
    stored: tuple[str, ...]
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...] | None
    """Of what the stored tensors make; None when they cannot even be joined."""


@dataclass(slots=True, kw_only=True, frozen=True)
class TiedPair:
    """Two names of one parameter that are both stored. The tie holds only if the stored values are equal."""

    name: str
    """The name that `untie` takes (the one that would lose its tie)."""
    kept: str
    """The name whose table is in `tables`."""
    table: ParameterTable
    """Of `name`, on its own."""


@dataclass(slots=True, kw_only=True, frozen=True)
class CheckpointTables:
    """How a model is made of the tensors of a checkpoint, and what does not fit."""

    tables: Mapping[str, ParameterTable]
    """By the name of the parameter or persistent buffer; of tied ones there is one table with aliases."""
    missing: tuple[NamedShape, ...]
    forgiven: tuple[str, ...]
    """In the module and not in the checkpoint, which the family allows: to be initialised."""
    unexpected: tuple[NamedShape, ...]
    mismatched: tuple[Mismatch, ...]
    tied_pairs_to_compare: tuple[TiedPair, ...]
    stored_shapes: Mapping[str, tuple[int, ...]]
    """Of every stored tensor that is used."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ExportTensor:
    """One tensor to be stored and the parts of parameters that it is made of; they cover it exactly once."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, Piece], ...]
    """(name of the parameter in `tables`' terms, piece with `stored` = this tensor's name)."""


def misfit_error(found: CheckpointTables, source: str, fresh: Sequence[str] = ()) -> RefusedError | None:
    """All that does not fit as one error, the same on every rank; None when all fits.

    `source`: what to call the checkpoint. `fresh`: names, or their beginnings up to a dot, of new heads that it may
    lack; heads of another task that it holds are then not an error either.
    """
    missing = [entry for entry in found.missing if not _is_named(entry.name, fresh)]
    unexpected = [entry for entry in found.unexpected if not (fresh and entry.head)]
    causes = [
        *_cause(source, "missing", [f"{entry.name} {list(entry.shape)}" for entry in missing]),
        *_cause(source, "unexpected", [f"{entry.name} {list(entry.shape)}" for entry in unexpected]),
        *_cause(source, "misshapen", [_describe(entry) for entry in found.mismatched]),
    ]
    return RefusedError(causes) if causes else None


def _is_named(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix.removesuffix('.')}.") for prefix in prefixes)


def _cause(source: str, kind: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    more = f", and {len(entries) - NAMES_SHOWN} more" if len(entries) > NAMES_SHOWN else ""
    plural = "" if len(entries) == 1 else "s"
    return [f"{source} has {len(entries)} {kind} tensor{plural}: {', '.join(entries[:NAMES_SHOWN])}{more}"]


def _describe(entry: Mismatch) -> str:
    if entry.stored_shape is None:
        return f"{entry.name} is {list(entry.shape)}, and its {len(entry.stored)} stored tensors do not fit together"
    return f"{entry.name} is {list(entry.shape)} in the model, {list(entry.stored_shape)} in the checkpoint"
