"""Follows transformers' own conversion operations on symbols instead of tensors, to learn where elements come from.

The operations that merge experts, concatenate projections and transpose matrices are plain `torch.stack`, `torch.cat`
and the like. Run on a `Traced` they yield boxes of the sources, so no operation is written here a second time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from plimsoll.weights.box import Box
from plimsoll.weights.pieces import Piece


class UntraceableError(Exception):
    """An operation that moves elements in a way that boxes cannot express, or that computes with them."""


class MisshapenError(Exception):
    """Tensors whose shapes do not allow to join them."""


@dataclass(slots=True, frozen=True)
class Part:
    """A box of a source tensor that is a box of the traced one."""

    source: str
    source_box: Box
    box: Box
    dims: tuple[int | None, ...]
    """For each dim of the traced tensor the source's dim along it; None: a dim of length 1 that the source lacks."""


class Traced:
    """Stands for a tensor made of parts of sources. Answers what data movement asks for, and nothing else."""

    def __init__(self, shape: Sequence[int], parts: Sequence[Part]) -> None:
        self.shape = torch.Size(shape)
        self.parts = tuple(parts)

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> "Traced":
        """A source tensor as it is."""
        whole = Box.whole(shape)
        return cls(shape, [Part(name, whole, whole, tuple(range(len(shape))))])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What torch calls for its functions when an argument is a `Traced`."""
        follow = _FUNCTIONS.get(func)
        if follow is None:
            raise UntraceableError(str(func))
        return follow(*args, **(kwargs or {}))

    def __getitem__(self, index: Any) -> "Traced":
        found = self
        dropped = 0
        for position, item in enumerate(cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)):
            dim = position - dropped
            if isinstance(item, int):
                found = found.narrow(dim, item % found.shape[dim], 1).squeeze(dim)
                dropped += 1
            elif isinstance(item, slice) and item.step in (None, 1):
                start, stop, _ = item.indices(found.shape[dim])
                found = found.narrow(dim, start, max(0, stop - start))
            else:
                raise UntraceableError(f"index {item}")
        return found

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def contiguous(self) -> "Traced":
        """As it is: only where elements come from counts."""
        return self

    def permute(self, *dims: Any) -> "Traced":
        """As of a tensor: dims one by one or as a sequence."""
        given: Sequence[int] = dims if len(dims) != 1 or isinstance(dims[0], int) else dims[0]
        order = [dim % self.ndim for dim in given]
        return Traced(
            [self.shape[dim] for dim in order],
            [replace(p, box=_reorder(p.box, order), dims=tuple(p.dims[dim] for dim in order)) for p in self.parts],
        )

    def transpose(self, dim0: int, dim1: int) -> "Traced":
        """As of a tensor."""
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permute(order)

    def unsqueeze(self, dim: int) -> "Traced":
        """As of a tensor."""
        at = dim % (self.ndim + 1)
        return Traced(
            _insert(self.shape, at, 1),
            [
                replace(
                    part,
                    box=Box(start=_insert(part.box.start, at, 0), shape=_insert(part.box.shape, at, 1)),
                    dims=(*part.dims[:at], None, *part.dims[at:]),
                )
                for part in self.parts
            ],
        )

    def squeeze(self, dim: int | None = None) -> "Traced":
        """As of a tensor: of one dim, or of all dims of length 1."""
        if dim is None:
            found = self
            for index in reversed(range(self.ndim)):
                found = found.squeeze(index)
            return found
        at = dim % self.ndim
        if self.shape[at] != 1:
            return self
        return Traced(
            _drop(self.shape, at),
            [
                replace(
                    part,
                    box=Box(start=_drop(part.box.start, at), shape=_drop(part.box.shape, at)),
                    dims=(*part.dims[:at], *part.dims[at + 1 :]),
                )
                for part in self.parts
            ],
        )

    def narrow(self, dim: int, start: int, length: int) -> "Traced":
        """As of a tensor."""
        at = dim % self.ndim
        window = Box(start=_put((0,) * self.ndim, at, start), shape=_put(self.shape, at, length))
        parts: list[Part] = []
        for part in self.parts:
            common = part.box.intersect(window)
            if common is None:
                continue
            source = part.source_box
            source_dim = part.dims[at]
            if source_dim is not None:
                begin = source.start[source_dim] + common.start[at] - part.box.start[at]
                source = Box(
                    start=_put(source.start, source_dim, begin), shape=_put(source.shape, source_dim, common.shape[at])
                )
            parts.append(replace(part, source_box=source, box=common.within(window)))
        return Traced(window.shape, parts)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple["Traced", ...]:
        """As of a tensor."""
        length = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
        if sum(sizes) != length:
            raise MisshapenError(f"{length} rows cannot be split into {list(sizes)}")
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return tuple(self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple["Traced", ...]:
        """As of a tensor: the last chunks may be shorter or absent."""
        return self.split(max(1, -(-self.shape[dim] // chunks)), dim)


def cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    """As torch.cat."""
    at = dim % tensors[0].ndim
    if len({_drop(tensor.shape, at) for tensor in tensors}) > 1 or len({tensor.ndim for tensor in tensors}) > 1:
        raise MisshapenError(f"cannot concatenate {[list(tensor.shape) for tensor in tensors]} along dim {at}")
    parts: list[Part] = []
    begin = 0
    for tensor in tensors:
        for part in tensor.parts:
            moved = _put(part.box.start, at, part.box.start[at] + begin)
            parts.append(replace(part, box=replace(part.box, start=moved)))
        begin += tensor.shape[at]
    return Traced(_put(tensors[0].shape, at, begin), parts)


def stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    """As torch.stack."""
    if len({tensor.shape for tensor in tensors}) > 1:
        raise MisshapenError(f"cannot stack {sorted({tuple(tensor.shape) for tensor in tensors})}")
    return cat([tensor.unsqueeze(dim) for tensor in tensors], dim if dim >= 0 else dim + tensors[0].ndim + 1)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cat: cat,
    torch.concat: cat,
    torch.stack: stack,
    torch.chunk: Traced.chunk,
    torch.split: Traced.split,
    torch.transpose: Traced.transpose,
    torch.permute: Traced.permute,
    torch.squeeze: Traced.squeeze,
    torch.unsqueeze: Traced.unsqueeze,
    torch.narrow: Traced.narrow,
}


def load_pieces(traced: Traced) -> tuple[Piece, ...]:
    """Sources are stored tensors, the traced one is a parameter. UntraceableError where a piece cannot say it."""
    pieces: list[Piece] = []
    for part in traced.parts:
        if {dim for dim in part.dims if dim is not None} != set(range(len(part.source_box.shape))):
            raise UntraceableError("a stored dim of length 1 that the parameter lacks")
        pieces.append(Piece(stored=part.source, stored_box=part.source_box, target_box=part.box, dims=part.dims))
    return tuple(pieces)


def export_parts(name: str, traced: Traced) -> tuple[tuple[str, Piece], ...]:
    """Sources are parameters, the traced one is the stored tensor `name`."""
    parts: list[tuple[str, Piece]] = []
    for part in traced.parts:
        if None in part.dims:
            raise UntraceableError("a stored dim of length 1 that the parameter lacks")
        dims = tuple(part.dims.index(dim) if dim in part.dims else None for dim in range(len(part.source_box.shape)))
        parts.append((part.source, Piece(stored=name, stored_box=part.box, target_box=part.source_box, dims=dims)))
    return tuple(parts)


def _put(values: Sequence[int], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _insert(values: Sequence[int], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at:])


def _drop(values: Sequence[int], at: int) -> tuple[int, ...]:
    return (*values[:at], *values[at + 1 :])


def _reorder(box: Box, order: Sequence[int]) -> Box:
    return Box(start=tuple(box.start[dim] for dim in order), shape=tuple(box.shape[dim] for dim in order))
