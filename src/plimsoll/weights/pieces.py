"""How parameters of a module are made of tensors in files: tables of rectangular pieces, for reading and for writing.

A renamed tensor is one piece. Three projections stored as one are three parameters of one piece each. One stacked
expert weight [E, 2I, H] is 2E pieces, each stored as a matrix [I, H] of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from plimsoll.weights.box import Box


@dataclass(slots=True, kw_only=True, frozen=True)
class Piece:
    """A part of one parameter and the equal part of one stored tensor.

    For a target of shape [E, 2I, H] and a stored matrix [I, H] that is the lower half of expert 3:
    stored_box = [0:I, 0:H], target_box = [3:4, I:2I, 0:H], dims = (None, 0, 1).
    """

    stored: str
    """Name of the stored tensor."""
    stored_box: Box
    """Part of the stored tensor."""
    target_box: Box
    """Part of the parameter (of the full one, not of a shard)."""
    dims: tuple[int | None, ...]
    """For each dim of the parameter the stored dim that runs along it; None: a dim of length 1 in `target_box` that the
    stored tensor does not have. A transposed matrix has (1, 0)."""

    def stored_part(self, target_part: Box) -> Box | None:
        """The stored elements of a part of the parameter; None when they lie outside of this piece."""
        common = self.target_box.intersect(target_part)
        if common is None:
            return None
        inside = common.within(self.target_box)
        starts, shape = list(self.stored_box.start), list(self.stored_box.shape)
        for target_dim, stored_dim in enumerate(self.dims):
            if stored_dim is not None:
                starts[stored_dim] += inside.start[target_dim]
                shape[stored_dim] = inside.shape[target_dim]
        return Box(start=tuple(starts), shape=tuple(shape))

    def as_target(self, stored: Tensor) -> Tensor:
        """A view of (part of) the stored tensor with the dims of the parameter."""
        kept = [dim for dim in self.dims if dim is not None]
        view = stored.permute(kept)
        for target_dim, stored_dim in enumerate(self.dims):
            if stored_dim is None:
                view = view.unsqueeze(target_dim)
        return view

    def as_stored(self, target: Tensor) -> Tensor:
        """The way back: a view of (part of) the parameter with the dims of the stored tensor."""
        kept = [dim for dim in self.dims if dim is not None]
        view = target
        for target_dim in reversed([d for d, stored_dim in enumerate(self.dims) if stored_dim is None]):
            view = view.squeeze(target_dim)
        return view.permute([kept.index(dim) for dim in range(len(kept))])


@dataclass(slots=True, kw_only=True, frozen=True)
class Conversion:
    """A conversion that no table of boxes can express: the stored tensors are read whole, one parameter at a time."""

    stored: tuple[str, ...]
    """Names of the tensors that it needs."""
    convert: Callable[[Mapping[str, Tensor]], Tensor]
    """Stored tensors by name (CPU, in the dtype of the file) → the full parameter."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ParameterTable:
    """Where one parameter (or persistent buffer) is stored."""

    name: str
    """Name in the module's state_dict; of tied ones the first."""
    aliases: tuple[str, ...]
    """Its other names in the module: tied weights."""
    shape: tuple[int, ...]
    """Of the full parameter."""
    pieces: tuple[Piece, ...]
    """They cover it exactly once; empty when `conversion` is set."""
    conversion: Conversion | None = None


def identity_table(name: str, shape: tuple[int, ...]) -> ParameterTable:
    """For a tensor that is stored as it is, under its own name."""
    whole = Box.whole(shape)
    piece = Piece(stored=name, stored_box=whole, target_box=whole, dims=tuple(range(len(shape))))
    return ParameterTable(name=name, aliases=(), shape=shape, pieces=(piece,))
