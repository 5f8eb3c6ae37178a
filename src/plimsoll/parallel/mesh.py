"""Process group and mesh. The axes, named here and nowhere else:

replicate   groups of ranks that hold the same shards (hybrid sharding); gradients are all-reduced over it
shard       ranks that split the parameters (FSDP2); gradients are reduce-scattered over it
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plimsoll.errors import RefusedError

REPLICATE = "replicate"
SHARD = "shard"


def ensure_process_group(device: torch.device) -> None:
    """A group of one rank, in memory: no port, no file. Leaves a group alone that a launcher has already made."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # the mesh and NCCL use the current device
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def close_process_group() -> None:
    """End the group of `ensure_process_group`; nothing to do when there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def build_mesh(device: torch.device, shard: int | None) -> DeviceMesh:
    """`shard`: ranks of a shard group (None: all). One axis when all ranks shard, two under hybrid sharding."""
    ranks = dist.get_world_size()
    shard = ranks if shard is None else shard
    if ranks % shard:
        raise RefusedError(f"parallel.shard={shard} does not divide the {ranks} ranks (cluster.ranks)")
    if shard == ranks:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device.type, (ranks // shard, shard), mesh_dim_names=(REPLICATE, SHARD))
