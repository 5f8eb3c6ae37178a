"""Pieces of parameters, against indexing of whole tensors."""

from itertools import product

import pytest
import torch
from torch import Tensor

from plimsoll.weights.box import Box
from plimsoll.weights.pieces import Piece, identity_table

FULL = torch.arange(4 * 6 * 5).reshape(4, 6, 5)
"""A stacked parameter [E, 2I, H]."""

STACKED = Piece(
    stored="experts.2.up",
    stored_box=Box.whole((3, 5)),
    target_box=Box(start=(2, 3, 0), shape=(1, 3, 5)),
    dims=(None, 0, 1),
)
TRANSPOSED = Piece(
    stored="experts.2.up",
    stored_box=Box(start=(1, 2), shape=(5, 3)),
    target_box=Box(start=(2, 3, 0), shape=(1, 3, 5)),
    dims=(None, 1, 0),
)
TURNED = Piece(stored="conv", stored_box=Box.whole((5, 4, 6)), target_box=Box.whole((4, 6, 5)), dims=(1, 2, 0))
PIECES = {"stacked": STACKED, "transposed": TRANSPOSED, "turned": TURNED}


def stored_tensor(piece: Piece) -> Tensor:
    """What a file would hold, so that reading the piece gives `FULL` in its target box; -1 around the piece."""
    shape = tuple(a + n + 1 for a, n in zip(piece.stored_box.start, piece.stored_box.shape, strict=True))
    stored = torch.full(shape, -1)
    part = FULL[piece.target_box.slices]
    for index in product(*map(range, part.shape)):
        place = list(piece.stored_box.start)
        for target_dim, stored_dim in enumerate(piece.dims):
            if stored_dim is not None:
                place[stored_dim] += index[target_dim]
        stored[tuple(place)] = part[index]
    return stored


@pytest.mark.parametrize("name", list(PIECES))
def test_every_part_of_a_parameter_is_found_in_the_stored_tensor(name: str) -> None:
    piece = PIECES[name]
    stored = stored_tensor(piece)
    rows = [(a, n) for a in range(6) for n in (1, 2, 6) if a + n <= 6]
    for (a, n), (b, m) in product(rows, rows):
        wanted = Box(start=(0, a, min(b, 4)), shape=(4, n, min(m, 5 - min(b, 4))))
        common = piece.target_box.intersect(wanted)
        part = piece.stored_part(wanted)
        assert (part is None) == (common is None)
        if part is not None and common is not None:
            assert torch.equal(piece.as_target(stored[part.slices]), FULL[common.slices])
            assert torch.equal(piece.as_stored(FULL[common.slices]), stored[part.slices])


def test_views_share_memory_with_what_they_look_at() -> None:
    parameter = FULL.clone()
    TRANSPOSED.as_stored(parameter[TRANSPOSED.target_box.slices]).copy_(torch.zeros(5, 3))
    assert parameter[2, 3:].eq(0).all()
    assert torch.equal(parameter[2, :3], FULL[2, :3])


def test_a_tensor_stored_as_it_is_has_one_piece() -> None:
    table = identity_table("norm.weight", (7,))
    (piece,) = table.pieces
    assert piece.stored_part(Box(start=(2,), shape=(3,))) == Box(start=(2,), shape=(3,))
    scalar = identity_table("scale", ()).pieces[0]
    assert scalar.stored_part(Box.whole(())) == Box.whole(())
    assert scalar.as_target(torch.tensor(3.0)).shape == ()
