"""Four ways of bringing a checkpoint into a model that `fully_shard` has cut. Each builds, shards and loads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll.weights.control import ControlGroup
from plimsoll.weights.load import load_sharded
from support.models import meta_model, shard

Way = Callable[[Path, torch.dtype, DeviceMesh, ControlGroup], nn.Module]


def ours(folder: Path, dtype: torch.dtype, mesh: DeviceMesh, control: ControlGroup) -> nn.Module:
    """Shapes, sharding, then every rank reads its own bytes."""
    model = shard(meta_model(AutoConfig.from_pretrained(folder), dtype), mesh)
    load_sharded(model, folder, control=control)
    return model


def rank0(
    folder: Path, dtype: torch.dtype, mesh: DeviceMesh, control: ControlGroup, *, cpu_offload: bool = False
) -> nn.Module:
    """The whole state on rank 0, which sends it, as torch's tutorial on FSDP2 and verl do it. The other ranks build on
    the meta device. With tied embeddings every rank builds on the CPU, as in verl."""
    config = AutoConfig.from_pretrained(folder)
    if dist.get_rank() == 0 or config.tie_word_embeddings:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    else:
        model = meta_model(config, dtype)
    full = model.state_dict()
    shard(model, mesh)
    if dist.get_rank() != 0:
        model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    for _, buffer in sorted(model.named_buffers()):
        dist.broadcast(buffer, 0)
    return model


def rank0_offload(folder: Path, dtype: torch.dtype, mesh: DeviceMesh, control: ControlGroup) -> nn.Module:
    """The same with `cpu_offload`."""
    return rank0(folder, dtype, mesh, control, cpu_offload=True)


def from_pretrained(folder: Path, dtype: torch.dtype, mesh: DeviceMesh, control: ControlGroup) -> nn.Module:
    """The whole model on every rank, of which each keeps its part."""
    return shard(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), mesh)


WAYS: dict[str, Way] = {
    "ours": ours,
    "rank0": rank0,
    "rank0_offload": rank0_offload,
    "from_pretrained": from_pretrained,
}
