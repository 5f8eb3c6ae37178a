"""Numbers that all ranks must agree on."""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from plimsoll.parallel.tensors import local


def global_norm(gradients: list[Tensor]) -> float:
    """Euclidean norm over all gradients of all ranks; sharded and plain ones may be mixed. Equal on every rank.

    Not torch's `clip_grad_norm_`: that refuses a mixture. Squares are added in float64, so the order of ranks and
    parameters does not show; NaN and infinity come through.
    """
    sharded: list[Tensor] = []
    plain: list[Tensor] = []
    for gradient in gradients:
        part = local(gradient)
        wide = torch.promote_types(part.dtype, torch.float32)
        norm = cast("Tensor", torch.linalg.vector_norm(part, dtype=wide))
        square = norm.double().square()
        if isinstance(gradient, DTensor):
            sharded.append(square / _copies(gradient))
        else:
            plain.append(square)
    total = _sum(sharded)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return float((total + _sum(plain)).sqrt())


def _sum(squares: list[Tensor]) -> Tensor:
    return torch.stack(squares).sum().cpu() if squares else torch.zeros((), dtype=torch.float64)


def _copies(tensor: DTensor) -> int:
    """Ranks that hold the same shard: the sum over all ranks counts it so often."""
    return dist.get_world_size() // _num_shards(tensor)


def _num_shards(tensor: DTensor) -> int:
    shards = 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            shards *= tensor.device_mesh.size(axis)
    return shards
