"""Which part a rank holds and where its bytes lie, against torch.chunk and numpy."""

from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from plimsoll.weights.box import Box
from plimsoll.weights.files import StoredTensor
from plimsoll.weights.layout import (
    LocalBox,
    byte_runs,
    cut_box,
    local_boxes,
    part_transfers,
    replica_index,
    runs,
    sharded_boxes,
    transfers,
)
from plimsoll.weights.pieces import ParameterTable, Piece, identity_table


def chunk(tensor: Tensor, count: int, index: int, dim: int) -> Tensor:
    chunks = torch.chunk(tensor, count, dim=dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def filled(full: Tensor, boxes: tuple[LocalBox, ...], shape: tuple[int, ...]) -> Tensor:
    local = torch.full(shape, -1)
    for box in boxes:
        assert local[box.local.slices].eq(-1).all(), "an element is in two boxes"
        local[box.local.slices] = full[box.full.slices]
    return local


def check(
    full: Tensor, placements: list[Placement], mesh: tuple[int, ...], rank: tuple[int, ...], local: Tensor
) -> None:
    boxes = sharded_boxes(tuple(full.shape), placements, mesh, rank, tuple(local.shape))
    assert torch.equal(filled(full, boxes, tuple(local.shape)), local), f"{placements} {mesh} {rank}"


@pytest.mark.parametrize("rows", range(14))
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 3), (3, 4), (5, 2)])
def test_fsdp_over_tensor_parallel_is_a_chunk_of_the_tensor_parallel_chunk(rows: int, mesh: tuple[int, int]) -> None:
    full = torch.arange(rows * 3).reshape(rows, 3)
    data, tensor = mesh
    for d, t in product(range(data), range(tensor)):
        local = chunk(chunk(full, tensor, t, 0), data, d, 0)
        check(full, [_StridedShard(0, split_factor=tensor), Shard(0)], mesh, (d, t), local)
        check(full, [Replicate(), _StridedShard(0, split_factor=tensor), Shard(0)], (2, *mesh), (1, d, t), local)


@pytest.mark.parametrize("rows", range(10))
def test_axes_cut_what_those_before_them_have_left(rows: int) -> None:
    full = torch.arange(rows * 5).reshape(rows, 5)
    for a, b in product(range(3), range(2)):
        check(full, [Shard(0), Shard(1)], (3, 2), (a, b), chunk(chunk(full, 3, a, 0), 2, b, 1))
        check(full, [Shard(0), Shard(0)], (3, 2), (a, b), chunk(chunk(full, 3, a, 0), 2, b, 0))
        check(full, [Replicate(), Shard(-1)], (3, 2), (a, b), chunk(full, 2, b, 1))


def test_a_strided_axis_alone_takes_its_part_of_every_piece() -> None:
    full = torch.arange(11)
    for position in range(2):
        pieces = [chunk(full, 3, piece, 0) for piece in range(3)]
        local = torch.cat([chunk(piece, 2, position, 0) for piece in pieces])
        check(full, [_StridedShard(0, split_factor=3)], (2,), (position,), local)


def test_every_box_of_a_rank_is_read_to_its_own_place() -> None:
    full = torch.arange(24).reshape(8, 3)
    stored = {"w": StoredTensor(name="w", path=Path("f"), dtype=full.dtype, shape=(8, 3), offset=0)}
    boxes = sharded_boxes((8, 3), [_StridedShard(0, split_factor=2)], (2,), (1,))
    assert len(boxes) == 2
    local = torch.full((4, 3), -1)
    for box in boxes:
        for transfer in part_transfers(identity_table("w", (8, 3)), stored, box, local):
            transfer.target_as_stored.copy_(full[transfer.stored_box.slices])
    assert torch.equal(local, full[[2, 3, 6, 7]])


def test_a_plain_tensor_is_whole_and_an_empty_one_has_no_boxes() -> None:
    assert local_boxes(torch.empty(3, 2, device="meta")) == (LocalBox(full=Box.whole((3, 2)), local=Box.whole((3, 2))),)
    assert local_boxes(torch.tensor(1.0)) == (LocalBox(full=Box.whole(()), local=Box.whole(())),)
    assert local_boxes(torch.empty(0, 4)) == ()
    assert replica_index(torch.empty(3)) == (0, 1)


def boxes_in(shape: tuple[int, ...]) -> list[Box]:
    parts = [[(a, n) for a in range(length) for n in range(1, length - a + 1)] for length in shape]
    return [Box(start=tuple(a for a, _ in part), shape=tuple(n for _, n in part)) for part in product(*parts)]


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 3), (1, 4, 1)])
def test_byte_runs_are_the_bytes_that_numpy_picks_and_as_few_as_can_be(shape: tuple[int, ...]) -> None:
    stored = StoredTensor(name="t", path=Path("f"), dtype=torch.int16, shape=shape, offset=10)
    data = np.arange(prod(shape), dtype=np.int16).reshape(shape)
    file = bytes(10) + data.tobytes() + bytes(4)
    for box in boxes_in(shape):
        found = list(byte_runs(stored, box))
        assert b"".join(file[a : a + n] for a, n in found) == data[box.slices].tobytes()
        assert len({n for _, n in found}) == 1
        flat = np.sort(data[box.slices].reshape(-1)).astype(int)
        # Runs of equal length that follow one another along an outer dim are not joined unless the dim is whole.
        assert len(found) >= 1 + int((np.diff(flat) > 1).sum())
        length, starts = runs(box, shape)
        assert [(10 + 2 * start, 2 * length) for start in starts] == found


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 12, 60, 61])
def test_parts_of_a_box_cover_it_once_in_order(limit: int) -> None:
    full = torch.arange(4 * 5 * 6).reshape(4, 5, 6)
    box = Box(start=(1, 0, 2), shape=(3, 5, 4))
    parts = list(cut_box(box, limit))
    assert all(0 < part.num_elements <= limit for part in parts)
    assert torch.equal(torch.cat([full[part.slices].reshape(-1) for part in parts]), full[box.slices].reshape(-1))
    assert list(cut_box(Box.whole((0, 3)), limit)) == []


def test_transfers_are_in_file_order_and_fill_a_stacked_parameter_from_its_matrices() -> None:
    matrices = {f"e{i}.{half}": torch.randn(2, 3) for i in range(3) for half in ("up", "gate")}
    stored = {
        name: StoredTensor(name=name, path=Path("f"), dtype=torch.float32, shape=(2, 3), offset=1000 - 24 * index)
        for index, name in enumerate(matrices)
    }
    pieces = tuple(
        Piece(
            stored=f"e{i}.{half}",
            stored_box=Box.whole((2, 3)),
            target_box=Box(start=(i, 2 * j, 0), shape=(1, 2, 3)),
            dims=(None, 0, 1),
        )
        for i in range(3)
        for j, half in enumerate(("gate", "up"))
    )
    tables = {
        "experts": ParameterTable(name="experts", aliases=(), shape=(3, 4, 3), pieces=pieces),
        "norm": identity_table("norm", (4,)),
    }
    stored["norm"] = StoredTensor(name="norm", path=Path("e"), dtype=torch.float32, shape=(4,), offset=8)
    target = torch.zeros(3, 4, 3)
    found = transfers(tables, stored, {"experts": target, "norm": torch.zeros(4)})
    places = [(str(transfer.stored.path), transfer.stored.offset) for transfer in found]
    assert places == sorted(places)
    assert len(found) == 7
    for transfer in found[1:]:
        transfer.target_as_stored.copy_(matrices[transfer.stored.name][transfer.stored_box.slices])
    expected = [torch.cat([matrices[f"e{i}.gate"], matrices[f"e{i}.up"]]) for i in range(3)]
    assert torch.equal(target, torch.stack(expected))
