"""Which part of a full tensor this rank holds, and from which bytes of which file that part comes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from operator import mul
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

from plimsoll.weights.box import Box
from plimsoll.weights.files import StoredTensor
from plimsoll.weights.pieces import ParameterTable, Piece

Interval: TypeAlias = tuple[int, int]
"""First index, and one past the last."""


@dataclass(slots=True, kw_only=True, frozen=True)
class LocalBox:
    """A part of a rank's local tensor, as it lies in the full tensor and in the local one; both of one shape."""

    full: Box
    local: Box


@dataclass(slots=True, kw_only=True, frozen=True)
class Transfer:
    """Stored elements that go to a part of a local tensor."""

    stored: StoredTensor
    stored_box: Box
    piece: Piece
    """How dims of the stored tensor and of the parameter belong together."""
    target: Tensor
    """Local, detached."""
    target_box: Box
    """In coordinates of `target`."""

    @property
    def target_as_stored(self) -> Tensor:
        """A view of the elements to fill with the dims and the shape of `stored_box`."""
        return self.piece.as_stored(self.target[self.target_box.slices])


def local_boxes(tensor: Tensor) -> tuple[LocalBox, ...]:
    """Which parts of the full tensor this rank's local tensor holds. None when it is empty; for a plain tensor, all.

    A DTensor: Shard, _StridedShard and Replicate on any mesh, uneven lengths and fewer rows than ranks included. More
    than one box only where an axis cuts a dim in strides. Fills no memory: works on the meta device.
    """
    if not isinstance(tensor, DTensor):
        whole = Box.whole(tensor.shape)
        return (LocalBox(full=whole, local=whole),) if whole.num_elements else ()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # a rank outside of the mesh
        return ()
    return sharded_boxes(
        tuple(tensor.shape),
        tensor.placements,
        tuple(tensor.device_mesh.shape),
        tuple(coordinate),
        tuple(local_tensor(tensor).shape),
    )


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of it, detached; shares its memory."""
    detached: Any = tensor.detach()  # torch leaves to_local without a type
    return detached.to_local() if isinstance(tensor, DTensor) else detached


def sharded_boxes(
    shape: tuple[int, ...],
    placements: Sequence[Placement],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    local_shape: tuple[int, ...] | None = None,
) -> tuple[LocalBox, ...]:
    """`local_boxes` of a rank at `coordinate` of a mesh. `local_shape` must be what the local tensor has, if given."""
    cuts = [(axis, _cut_dim(placement)) for axis, placement in enumerate(placements)]
    intervals: list[list[Interval]] = []
    for dim, length in enumerate(shape):
        axes = [
            (mesh_shape[axis], coordinate[axis], split_factor)
            for axis, (cut, split_factor) in cuts
            if cut is not None and cut % len(shape) == dim
        ]
        choices = [_cut_by(length, _in_order_of_cutting(axes)), _cut_by(length, axes)]
        # fully_shard on top of tensor parallelism cuts what that has left, as if by plain chunks in another order.
        # Where lengths are uneven and ranks many, the same placements from distribute_tensor are another cut; the
        # local tensor says which of both it is.
        wanted = None if local_shape is None else local_shape[dim]
        fitting = [choice for choice in choices if wanted is None or sum(b - a for a, b in choice) == wanted]
        assert fitting or (local_shape is not None and 0 in local_shape), f"{shape} by {placements}: {local_shape}"
        intervals.append(fitting[0] if fitting else [])
    return tuple(_boxes(intervals))


def replica_index(tensor: Tensor) -> tuple[int, int]:
    """(index, count): this rank's ordinal among the ranks that hold the same part of the tensor, and their number.

    They are those that differ only along axes that replicate it; also along axes of the root mesh that its own mesh is
    not part of (a norm that only `fully_shard` has cut, in a model that is tensor-parallel beside): every rank must
    have the tensor. A plain tensor: (0, 1).
    """
    if not isinstance(tensor, DTensor):
        return 0, 1
    mesh: Any = tensor.device_mesh
    coordinate: list[int] | None = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    replicated: list[tuple[int, int]] = [
        (coordinate[axis], int(mesh.size(axis)))
        for axis, placement in enumerate(tensor.placements)
        if _keeps(placement)
    ]
    index: int = 0
    count: int = 1
    for position, size in [*_outer_axes(mesh), *replicated]:
        index, count = index * size + position, count * size
    return index, count


def transfers(
    tables: Mapping[str, ParameterTable], stored: Mapping[str, StoredTensor], targets: Mapping[str, Tensor]
) -> list[Transfer]:
    """What this rank has to read to fill its part of `targets` (by parameter name), in file order.

    Parameters whose table has a conversion instead of pieces are left out.
    """
    found: list[Transfer] = []
    for name, tensor in targets.items():
        local = local_tensor(tensor)
        for box in local_boxes(tensor):
            found += part_transfers(tables[name], stored, box, local)
    return sorted(found, key=lambda transfer: (str(transfer.stored.path), _first_byte(transfer)))


def part_transfers(
    table: ParameterTable, stored: Mapping[str, StoredTensor], box: LocalBox, local: Tensor
) -> list[Transfer]:
    """What fills `box.local` of `local` with the elements `box.full` of a parameter."""
    found: list[Transfer] = []
    for piece in table.pieces:
        common = piece.target_box.intersect(box.full)
        stored_box = piece.stored_part(box.full)
        if common is None or stored_box is None:
            continue
        inside = common.within(box.full)
        start = tuple(a + b for a, b in zip(inside.start, box.local.start, strict=True))
        found.append(
            Transfer(
                stored=stored[piece.stored],
                stored_box=stored_box,
                piece=piece,
                target=local,
                target_box=Box(start=start, shape=inside.shape),
            )
        )
    return found


def byte_runs(stored: StoredTensor, box: Box) -> Iterator[tuple[int, int]]:
    """(offset in the file, number of bytes) of every run of a part. One after the other: the part, row-major."""
    itemsize = stored.dtype.itemsize
    length, starts = runs(box, stored.shape)
    return ((stored.offset + start * itemsize, length * itemsize) for start in starts)


def runs(box: Box, shape: tuple[int, ...]) -> tuple[int, Iterator[int]]:
    """Where the elements of a part of a row-major tensor lie: elements of one run, and the start of every run."""
    first = run_dim(box, shape)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    base = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    outer = product(
        *(range(0, length * stride, stride) for length, stride in zip(box.shape[:first], strides, strict=False))
    )
    return prod(box.shape[first:]), (base + sum(index) for index in outer)


def run_dim(box: Box, shape: tuple[int, ...]) -> int:
    """The outermost dim along which the elements of a part still lie one behind the other."""
    first = len(shape)
    while first > 0 and box.shape[first - 1] == shape[first - 1]:
        first -= 1
    return max(first - 1, 0)


def cut_box(box: Box, limit: int) -> Iterator[Box]:
    """Parts of at most `limit` elements that cover the box once, in row-major order: blocks of rows where they fit."""
    if box.num_elements <= limit:
        if box.num_elements:
            yield box
        return
    dim = next(dim for dim, length in enumerate(box.shape) if length > 1)
    rows = max(1, limit // prod(box.shape[dim + 1 :]))
    for begin in range(0, box.shape[dim], rows):
        start, shape = list(box.start), list(box.shape)
        start[dim] += begin
        shape[dim] = min(rows, box.shape[dim] - begin)
        yield from cut_box(Box(start=tuple(start), shape=tuple(shape)), limit)


def _first_byte(transfer: Transfer) -> int:
    return next(byte_runs(transfer.stored, transfer.stored_box))[0]


def _keeps(placement: Placement) -> bool:
    return _cut_dim(placement)[0] is None


def _cut_dim(placement: Placement) -> tuple[int | None, int]:
    """The dim that a placement cuts (None: it replicates) and its split factor (1: plain chunks)."""
    # Before Shard: in some versions of torch it is a kind of Shard, in others not.
    if isinstance(placement, _StridedShard):
        strided: Any = placement
        return int(strided.dim), int(strided.split_factor)
    if isinstance(placement, Shard):
        shard: Any = placement  # the dim has no type
        return int(shard.dim), 1
    assert isinstance(placement, Replicate), f"weights that are {placement}"
    return None, 1


def _outer_axes(mesh: Any) -> list[tuple[int, int]]:
    """(position of this rank, length) of every axis of the root mesh along which this mesh does not run."""
    root = mesh._get_root_mesh()
    own = root.get_coordinate()
    if own is None or root.size() == mesh.size():
        return []
    where: Tensor = torch.isin(root.mesh, mesh.mesh).nonzero()
    fixed = (where == where[0]).all(0)
    return [(int(own[axis]), int(root.size(axis))) for axis in range(root.ndim) if bool(fixed[axis])]


def _in_order_of_cutting(axes: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(size, position, split factor) of the axes that cut a dim, in the order in which plain chunks give the same.

    An axis of split factor f comes after those to its right that cut the dim in f parts.
    """
    ordered: list[tuple[int, int, int]] = []
    for size, position, split_factor in reversed(list(axes)):
        parts = [1, *accumulate((axis[0] for axis in ordered), mul)]
        place, factor = (parts.index(split_factor), 1) if split_factor in parts else (0, split_factor)
        ordered.insert(place, (size, position, factor))
    return ordered


def _cut_by(length: int, axes: Iterable[tuple[int, int, int]]) -> list[Interval]:
    """Indexes that are left of a dim after every axis, (size, position, split factor), has taken its part."""
    left: list[Interval] = [(0, length)] if length else []
    for size, position, split_factor in axes:
        taken = [part for i in range(split_factor) for part in _chunk(_chunk(left, split_factor, i), size, position)]
        left = _joined(taken)
    return left


def _chunk(intervals: Sequence[Interval], count: int, index: int) -> list[Interval]:
    """As torch.chunk: rounded up, the last ones shorter or empty."""
    total = sum(end - begin for begin, end in intervals)
    size = -(-total // count)
    low, high = index * size, (index + 1) * size
    found: list[Interval] = []
    position = 0
    for begin, end in intervals:
        first, last = max(low - position, 0), min(high - position, end - begin)
        if first < last:
            found.append((begin + first, begin + last))
        position += end - begin
    return found


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for begin, end in intervals:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def _boxes(intervals: Sequence[Sequence[Interval]]) -> Iterator[LocalBox]:
    with_local = [
        list(zip(dim, accumulate((end - begin for begin, end in dim), initial=0), strict=False)) for dim in intervals
    ]
    for parts in product(*with_local):
        shape = tuple(end - begin for (begin, end), _ in parts)
        full = Box(start=tuple(begin for (begin, _), _ in parts), shape=shape)
        yield LocalBox(full=full, local=Box(start=tuple(local for _, local in parts), shape=shape))
