"""Which part of a tensor a rank holds, against what torch gives it. Four ranks, one group for every case."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from plimsoll.weights.layout import local_boxes, replica_index
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)

SHAPES = [(8, 4), (5, 3), (3, 2), (1, 7), (0, 4), (9,), (1,), (2, 6, 5)]
SIZES = [3, 4, 7, 10]
"""Of layers, cut in two by two."""


def mistakes(full: Tensor, tensor: DTensor, case: str) -> list[str]:
    local = tensor.detach().to_local()
    made = torch.full_like(local, -1)
    for box in local_boxes(tensor):
        if not made[box.local.slices].eq(-1).all():
            return [f"{case}: an element is in two boxes"]
        made[box.local.slices] = full[box.full.slices]
    return [] if torch.equal(made, local) else [f"{case}: {local.tolist()} taken for {made.tolist()}"]


def distributed(line: DeviceMesh, square: DeviceMesh) -> list[str]:
    found: list[str] = []
    for shape in SHAPES:
        full = torch.arange(torch.Size(shape).numel()).reshape(shape)
        kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        cases = [(line, [kind]) for kind in kinds] + [(square, list(pair)) for pair in product(kinds, kinds)]
        cases += [(square, [_StridedShard(dim, split_factor=2), Shard(dim)]) for dim in range(len(shape))]
        for mesh, placements in cases:
            tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            found += mistakes(full, tensor, f"{shape} {placements}")
    return found


def layer(size: int, *, start: int = 0) -> nn.Module:
    module = nn.Sequential(nn.Linear(size, size + 1), nn.LayerNorm(size + 1), nn.Linear(size + 1, size, bias=False))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(start, start + parameter.numel()).reshape(parameter.shape))
            start += parameter.numel()
    return module


def sharded(line: DeviceMesh, square: DeviceMesh, tensor_parallel: DeviceMesh) -> list[str]:
    found: list[str] = []
    for size in SIZES:
        expected = dict(layer(size).named_parameters())
        for how in ("line", "hybrid", "tensor"):
            if how == "tensor" and size % 2 == 0:
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                module = parallelize_module(layer(size), tensor_parallel["tensor"], plan)
                fully_shard(module, mesh=tensor_parallel["shard"])
            else:
                module = layer(size)
                fully_shard(module, mesh=square if how == "hybrid" else line)
            for name, parameter in module.named_parameters():
                assert isinstance(parameter.data, DTensor)
                found += mistakes(expected[name].detach(), parameter.data, f"{size} {how} {name}")
    return found


def replicas(line: DeviceMesh, square: DeviceMesh, tensor_parallel: DeviceMesh) -> dict[str, Any]:
    full = torch.arange(8.0)

    def of(mesh: DeviceMesh, *placements: Placement) -> tuple[tuple[int, int], list[float]]:
        tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
        return replica_index(tensor), tensor.to_local().tolist()

    return {
        "sharded": of(line, Shard(0)),
        "replicated": of(line, Replicate()),
        "hybrid": of(square, Replicate(), Shard(0)),
        "other axis": of(tensor_parallel["shard"], Shard(0)),
        "both": of(square, Replicate(), Replicate()),
    }


def work(rank: int, ranks: int) -> dict[str, Any]:
    line = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tensor_parallel = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    return {
        "distributed": distributed(line, square),
        "sharded": sharded(line, square, tensor_parallel),
        "replicas": replicas(line, square, tensor_parallel),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, 4, tmp_path_factory.mktemp("layout"))


@pytest.mark.parametrize("what", ["distributed", "sharded"])
def test_boxes_hold_what_torch_put_into_the_local_tensor(ranks: list[dict[str, Any]], what: str) -> None:
    assert [found[what] for found in ranks] == [[]] * 4


@pytest.mark.parametrize(
    ("case", "copies"), [("sharded", 1), ("replicated", 4), ("hybrid", 2), ("other axis", 2), ("both", 4)]
)
def test_ranks_with_the_same_part_are_numbered(ranks: list[dict[str, Any]], case: str, copies: int) -> None:
    holders: dict[tuple[float, ...], list[int]] = {}
    for found in ranks:
        (index, count), part = found["replicas"][case]
        assert count == copies
        holders.setdefault(tuple(part), []).append(index)
    assert all(sorted(indexes) == list(range(copies)) for indexes in holders.values())
    assert sum(len(part) for part in holders) == 8
