"""Plain and sharded tensors under one name."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory with `tensor`: of a sharded one the shard itself, whose storage may be set.

    (`weights.layout.local_tensor` gives a detached alias, which is enough to read and write through.)
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def full(tensor: Tensor) -> Tensor:
    """The whole tensor. On one rank it shares memory; on several it is gathered, so every rank must call."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if tensor.device_mesh.size() == 1:
        return tensor.to_local()
    return tensor.full_tensor()


@torch.no_grad()
def load_full(target: Tensor, source: Tensor) -> None:
    """Copy the whole tensor `source` into `target` in place, each rank its own part; nothing is sent."""
    if isinstance(target, DTensor) and target.device_mesh.size() > 1:
        part = distribute_tensor(
            source.to(target.device, target.dtype), target.device_mesh, target.placements, src_data_rank=None
        )
        source = part.to_local()
    local(target).copy_(source)
