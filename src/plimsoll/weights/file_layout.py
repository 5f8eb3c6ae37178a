"""safetensors files before they are written: which tensor is where, from names, dtypes and shapes alone.

Every rank computes the same layout without a message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from plimsoll.weights.box import Box
from plimsoll.weights.pieces import Piece
from plimsoll.weights.tensors import cut_by_size, file_names, header_of, index_text

SHARD_BYTES = 5 * 1000**3
"""Size of one weights file at most (a larger tensor has a file of its own)."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Outgoing:
    """One tensor of a file, and the tensors in memory that it is made of."""

    name: str
    dtype: torch.dtype
    """In the file."""
    shape: tuple[int, ...]
    """In the file; of the full tensor."""
    parts: tuple[tuple[Piece, Tensor], ...]
    """Their `stored_box`es cover it exactly once. Each tensor is a parameter as this rank has it: plain (then every
    rank has all of it) or a DTensor, on any device and of any dtype; its full shape is what the piece speaks of."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.dtype.itemsize * prod(self.shape)


@dataclass(slots=True, kw_only=True, frozen=True)
class LaidOut:
    """A tensor with its place in a file."""

    outgoing: Outgoing
    offset: int
    """Of its first byte, from the start of the file."""


@dataclass(slots=True, kw_only=True, frozen=True)
class FileLayout:
    """One safetensors file before it is written."""

    name: str
    header: bytes
    """With the eight bytes of its length in front."""
    tensors: tuple[LaidOut, ...]
    """In file order."""
    num_bytes: int
    """Of the whole file."""


def whole(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Outgoing:
    """A tensor that is stored as it is, under one name. `dtype`: None for its own."""
    box = Box.whole(tensor.shape)
    piece = Piece(stored=name, stored_box=box, target_box=box, dims=tuple(range(tensor.dim())))
    return Outgoing(name=name, dtype=dtype or tensor.dtype, shape=box.shape, parts=((piece, tensor),))


def lay_out(
    outgoings: Sequence[Outgoing], stem: str = "model", max_file_bytes: float = SHARD_BYTES
) -> tuple[FileLayout, ...]:
    """Cut tensors, in the order given, into files of at most `max_file_bytes` of data, and place them.

    One file is called stem.safetensors, several stem-0000i-of-0000n.safetensors. Every rank must pass the same names,
    dtypes and shapes in the same order; the result is then the same but for the tensors in memory.
    """
    for outgoing in outgoings:
        covered = sum(piece.stored_box.num_elements for piece, _ in outgoing.parts)
        assert covered == prod(outgoing.shape), f"{outgoing.name}: parts of {covered} elements for {outgoing.shape}"
    cut = cut_by_size(outgoings, max_file_bytes)
    names = file_names(stem, len(cut))
    return tuple(_lay_out_file(name, group) for name, group in zip(names, cut, strict=True))


def index_of(layouts: Sequence[FileLayout]) -> str:
    """The index of several files as JSON text."""
    return index_text({layout.name: [placed.outgoing for placed in layout.tensors] for layout in layouts})


def _lay_out_file(name: str, outgoings: Sequence[Outgoing]) -> FileLayout:
    header, ordered, num_bytes = header_of(outgoings)
    placed = tuple(LaidOut(outgoing=outgoing, offset=offset) for outgoing, offset in ordered)
    return FileLayout(name=name, header=header, tensors=placed, num_bytes=num_bytes)
