from typing import Any

import pytest
import torch
from torch import Tensor

from plimsoll.weights.trace import MisshapenError, Traced, UntraceableError, export_parts, load_pieces

SHAPES = {"a": (4, 6), "b": (4, 6), "c": (2, 6), "d": (6, 1, 4)}
MOVES = {
    "stack": lambda t: torch.stack([t["a"], t["b"]], dim=1),
    "stack from the end": lambda t: torch.stack([t["a"], t["b"]], dim=-1),
    "cat": lambda t: torch.cat([t["a"], t["c"], t["b"]]),
    "cat of stacks": lambda t: torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["b"], t["a"]])], dim=1),
    "uneven chunks": lambda t: torch.cat(list(reversed(torch.chunk(torch.cat([t["a"], t["c"]]), 4)))),
    "split": lambda t: torch.split(torch.cat([t["a"], t["b"]], dim=1), [5, 3, 4], dim=1)[1].contiguous(),
    "transpose": lambda t: torch.transpose(torch.stack([t["a"], t["b"]]), 0, 2),
    "permute": lambda t: torch.stack([t["a"], t["b"]]).permute(2, 0, 1),
    "slices": lambda t: torch.stack([t["a"], t["b"]])[1, 1:3],
    "squeeze": lambda t: torch.stack([t["a"], t["b"]])[:1].squeeze(),
    "transposed rows": lambda t: t["a"].transpose(0, 1)[2:5].unsqueeze(1),
}


def numbered() -> dict[str, Tensor]:
    return {
        name: torch.arange(100 * index, 100 * index + torch.Size(shape).numel()).reshape(shape)
        for index, (name, shape) in enumerate(SHAPES.items())
    }


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_every_element_is_followed_to_where_torch_takes_it(move: Any) -> None:
    real = numbered()
    expected = move(real)
    traced = move({name: Traced.of(name, shape) for name, shape in SHAPES.items()})
    assert traced.shape == expected.shape
    loaded = torch.full(expected.shape, -1)
    pieces = load_pieces(traced)
    for piece in pieces:
        part = piece.as_target(real[piece.stored][piece.stored_box.slices])
        assert bool((loaded[piece.target_box.slices] == -1).all()), "covered twice"
        loaded[piece.target_box.slices] = part
    assert torch.equal(loaded, expected)


@pytest.mark.parametrize("move", ["uneven chunks", "split", "slices", "transpose of one", "squeezed"])
def test_the_way_back_takes_parts_of_parameters(move: str) -> None:
    moves = MOVES | {"transpose of one": lambda t: t["a"].transpose(0, 1), "squeezed": lambda t: t["d"].squeeze(1)}
    real = numbered()
    expected = moves[move](real)
    made = torch.full(expected.shape, -1)
    for name, piece in export_parts("x", moves[move]({n: Traced.of(n, shape) for n, shape in SHAPES.items()})):
        made[piece.stored_box.slices] = piece.as_stored(real[name][piece.target_box.slices])
    assert torch.equal(made, expected)


def test_what_boxes_cannot_say_is_not_traced() -> None:
    a, b, c, d = (Traced.of(name, shape) for name, shape in SHAPES.items())
    with pytest.raises(UntraceableError, match="add"):
        torch.add(a, b)
    with pytest.raises(UntraceableError):
        a[::2]
    with pytest.raises(UntraceableError, match="lacks"):
        load_pieces(d.squeeze(1))
    with pytest.raises(UntraceableError, match="lacks"):
        export_parts("x", torch.stack([a, b]))
    with pytest.raises(MisshapenError):
        torch.stack([a, c])
    with pytest.raises(MisshapenError):
        torch.cat([a, c], dim=1)
    with pytest.raises(MisshapenError):
        torch.split(a, [1, 2])
