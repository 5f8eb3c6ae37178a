"""Four ways of writing a sharded model (as a Hugging Face folder) and a training state (weights and Adam's moments)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.config.train import TrainConfig
from plimsoll.update.optimizer import Optimizer
from plimsoll.update.state import StateFolders, state_writer
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.export import export_sharded
from plimsoll.weights.file_layout import lay_out, whole
from plimsoll.weights.write import BUDGET_BYTES, ShardWriter, write_laid_out
from support.memory import local
from support.models import fill_randomly, meta_model, shard

EXPORTED = torch.bfloat16


@dataclass(slots=True, kw_only=True, frozen=True)
class Trained:
    """What is written."""

    model: nn.Module
    """fp32, sharded."""
    own: Optimizer
    """plimsoll's, with two moments for every parameter where they are wanted."""
    optimizer: torch.optim.AdamW
    """torch's, over the same moments."""
    config: PreTrainedConfig
    source: Path
    """Folder that the model was made from: config, and names on disk."""
    control: ControlGroup


Way = Callable[[Trained, Path], None]


def build(config: PreTrainedConfig, source: Path, mesh: DeviceMesh, control: ControlGroup, moments: bool) -> Trained:
    """Random weights, no file read. Each rank fills its own part."""
    model: Any = shard(meta_model(config, torch.float32), mesh)
    model.to_empty(device="cpu")
    fill_randomly([local(parameter) for parameter in model.parameters()], seed=dist.get_rank())
    for buffer in model.buffers():
        buffer.zero_()  # the rotary table: no way writes it
    named = dict(model.named_parameters())
    own, optimizer = Optimizer(named, TrainConfig(), total_steps=1), torch.optim.AdamW(model.parameters())
    if moments:
        for name, held in own.empty_moments().items():
            local(held["exp_avg"]).fill_(1e-4)
            local(held["exp_avg_sq"]).fill_(1e-8)
            optimizer.state[named[name]] = {"step": torch.tensor(1.0), **held}
        own.finish_load(dict.fromkeys(named, 1.0))
    return Trained(model=model, own=own, optimizer=optimizer, config=config, source=source, control=control)


def _hf_folder(trained: Trained, state: dict[str, Any], folder: Path) -> None:
    """What a trainer does with a gathered state: transformers writes it. A tied head is left out, as it would do for
    tensors that share memory."""
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(trained.config, dtype=EXPORTED)
    tied = {"lm_head.weight"} if trained.config.tie_word_embeddings else set[str]()
    cast = {name: tensor.to(EXPORTED) for name, tensor in state.items() if name not in tied}
    skeleton.save_pretrained(folder, state_dict=cast)


def rank0_export(trained: Trained, folder: Path) -> None:
    """The whole state on rank 0, which writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(trained.model, options=options)
    if dist.get_rank() == 0:
        _hf_folder(trained, state, folder)
    dist.barrier()


def full_export(trained: Trained, folder: Path) -> None:
    """The whole state on every rank; rank 0 writes."""
    state = {name: _full(tensor) for name, tensor in trained.model.state_dict().items()}
    if dist.get_rank() == 0:
        _hf_folder(trained, state, folder)
    dist.barrier()


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def dcp_export(trained: Trained, folder: Path) -> None:
    """torch.distributed.checkpoint's writer of safetensors, each rank its shards, joined to whole tensors at the end.
    It writes the names of the module and the dtype that it is given."""
    state = {
        name: tensor.to(EXPORTED)
        for name, tensor in get_model_state_dict(trained.model).items()
        if not (trained.config.tie_word_embeddings and name == "lm_head.weight")
    }
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer)


def rank0_save(trained: Trained, folder: Path) -> None:
    """Weights and moments whole on rank 0, which writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(trained.model, options=options)
    moments = get_optimizer_state_dict(trained.model, trained.optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save({"model": state, "optimizer": moments}, folder / "state.pt")
    dist.barrier()


def full_save(trained: Trained, folder: Path) -> None:
    """Weights and moments whole on every rank; rank 0 writes."""
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(trained.model, options=options)
    moments = get_optimizer_state_dict(trained.model, trained.optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save({"model": state, "optimizer": moments}, folder / "state.pt")
    dist.barrier()


def dcp_save(trained: Trained, folder: Path) -> None:
    """torch.distributed.checkpoint: every rank its shards, in its own format."""
    state = {
        "model": get_model_state_dict(trained.model),
        "optimizer": get_optimizer_state_dict(trained.model, trained.optimizer),
    }
    dcp.save(state, checkpoint_id=folder)


def our_export(trained: Trained, folder: Path) -> None:
    """Every rank its own bytes."""
    export_sharded(trained.model, folder / "model", dtype=EXPORTED, source=trained.source, control=trained.control)


def our_save(trained: Trained, folder: Path) -> None:
    """A checkpoint as the trainer publishes it: synced, hashed, renamed."""
    model: Any = trained.model
    store = CheckpointStore(folder, keep=1, control=trained.control)

    def prepare() -> ShardWriter:
        folders = StateFolders(model=partial / "model", optimizer=partial / "optimizer", tokenizer=trained.source)
        if store.first:
            folders.model.mkdir()
            folders.optimizer.mkdir()
        return state_writer(model, trained.own, folders, control=trained.control, budget_bytes=BUDGET_BYTES)

    def write() -> None:
        writer.run()
        writer.check()

    partial = store.begin(1)
    writer = store.attempt(1, partial, prepare)
    store.finish(1, partial, write)


def write_state(state: dict[str, Tensor], dtype: torch.dtype, folder: Path, budget_bytes: int) -> None:
    """Plain tensors as `dtype`, through staging buffers of `budget_bytes`."""
    layouts = lay_out([whole(name, tensor, dtype) for name, tensor in state.items()])
    write_laid_out(folder, layouts, control=ControlGroup(), budget_bytes=budget_bytes)
