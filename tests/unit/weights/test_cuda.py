"""Weights on a GPU: what goes through streams, registered memory and the page cache arrives bit for bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from plimsoll.config.train import TrainConfig
from plimsoll.model.build import build_meta
from plimsoll.model.spec import decoder_layers
from plimsoll.parallel.mesh import build_mesh, close_process_group, ensure_process_group
from plimsoll.parallel.tensors import full, local
from plimsoll.update.adamw import AdamWPlace, AdamWSettings, DeviceAdamW
from plimsoll.update.streamed import StreamedAdamW
from plimsoll.weights import HostArena, Offloader, StagingRing, WeightFiles, export_sharded, load_sharded
from plimsoll.weights.box import Box
from plimsoll.weights.names import checkpoint_tables
from plimsoll.weights.offload import storage_sizes
from plimsoll.weights.pieces import ParameterTable, Piece
from plimsoll.weights.read import read_parameters
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    ensure_process_group(DEVICE)
    yield
    close_process_group()


def saved(family: str, folder: Path) -> Path:
    tiny.CHECKPOINT_FAMILIES[family](seed=4, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def sharded(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model = build_meta(folder, dtype)
    mesh = build_mesh(DEVICE, None)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def differing(model: nn.Module, folder: Path, dtype: torch.dtype) -> list[str]:
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    theirs = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert set(own) == set(theirs)
    assert {tensor.device for tensor in own.values()} == {DEVICE}
    return [name for name in own if not torch.equal(full(own[name]).cpu(), theirs[name].detach())]


def pinned_by_torch() -> int:
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


@pytest.mark.parametrize("family", tiny.CHECKPOINT_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_loaded_onto_the_device_is_what_from_pretrained_gives(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    model = sharded(folder, dtype)
    # Buffers far smaller than a matrix, and fewer than threads: every one is used again while others are copied.
    with_ring = StagingRing(buffer_bytes=1024, num_buffers=3, device=DEVICE)
    before = pinned_by_torch()
    load_sharded(model, folder, device=DEVICE, ring=with_ring)
    assert differing(model, folder, dtype) == []
    with_ring.close()
    assert pinned_by_torch() == before


@pytest.mark.parametrize("source", ["ring", "map"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_parameters_are_read_again_from_the_page_cache_and_through_the_ring(
    source: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = saved("qwen3_moe", tmp_path)
    model = sharded(folder, dtype)
    load_sharded(model, folder, device=DEVICE)
    with WeightFiles(folder) as files:
        tables = checkpoint_tables(model, files.tensors).tables
        targets: dict[str, Tensor] = {name: model.get_parameter(name) for name in tables}
        for tensor in targets.values():
            storage = local(tensor).untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            storage.resize_(size)
            local(tensor).fill_(7)
        with torch.no_grad():
            read_parameters(files, tables, targets, source=source)
    assert differing(model, folder, dtype) == []


@pytest.mark.parametrize("columns", [2048, 4096])
def test_columns_of_a_large_matrix_come_from_the_page_cache(columns: int, tmp_path: Path) -> None:
    """More of them than a buffer holds, in short runs, into memory of their own: read with the rest of the rows."""
    stored = torch.randn(3000, 4096).to(torch.bfloat16)
    save_file({"wide": stored}, tmp_path / "model.safetensors")
    box = Box(start=(0, 4096 - columns), shape=(3000, columns))
    piece = Piece(stored="wide", stored_box=box, target_box=Box.whole(box.shape), dims=(0, 1))
    table = ParameterTable(name="wide", aliases=(), shape=box.shape, pieces=(piece,))
    target = torch.zeros(box.shape, dtype=torch.bfloat16, device=DEVICE)
    with WeightFiles(tmp_path) as files:
        read_parameters(files, {"wide": table}, {"wide": target}, source="map")
    assert torch.equal(target.cpu(), stored[:, 4096 - columns :])


def test_offloading_frees_the_device_and_brings_back_every_bit(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    model = sharded(folder, torch.float32)
    load_sharded(model, folder, device=DEVICE)
    tokens = torch.arange(3, 14, device=DEVICE)[None]
    expected = model(input_ids=tokens, use_cache=False).logits.detach()
    model.reshard()
    parameters = list(model.parameters())
    arena = HostArena({"parameters": storage_sizes(parameters)}, device=DEVICE)
    offloader = Offloader(arena, "parameters", parameters)
    pinned = pinned_by_torch()
    for _ in range(3):
        held = torch.cuda.memory_allocated()
        offloader.offload()
        assert torch.cuda.memory_allocated() <= held - offloader.num_bytes
        noise = torch.full((offloader.num_bytes,), 255, dtype=torch.uint8, device=DEVICE)  # takes what was freed
        del noise
        offloader.onload()
        assert torch.equal(model(input_ids=tokens, use_cache=False).logits, expected)
        model.reshard()
    assert pinned_by_torch() == pinned
    arena.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_streamed_moments_give_the_bits_of_moments_on_the_device(dtype: torch.dtype) -> None:
    shapes = [(300, 70), (70,), (1,), (513, 129), (4, 4)]
    settings = AdamWSettings.of(TrainConfig())

    def trained(make: Callable[[dict[str, nn.Parameter]], AdamWPlace]) -> tuple[list[Tensor], dict[str, Any]]:
        generator = torch.Generator(DEVICE).manual_seed(0)
        parameters = {
            f"p{i}": nn.Parameter(torch.randn(shape, generator=generator, device=DEVICE).to(dtype))
            for i, shape in enumerate(shapes)
        }
        optimizer = make(parameters)
        for step in range(6):
            for index, parameter in enumerate(parameters.values()):
                gradient = torch.randn(parameter.shape, generator=generator, device=DEVICE).to(dtype)
                parameter.grad = None if (step, index) == (0, 1) else gradient
            optimizer.step(1e-2 / (step + 1))
        return [parameter.detach().cpu() for parameter in parameters.values()], optimizer.moments()

    device = trained(lambda parameters: DeviceAdamW(parameters, settings))
    streamed = trained(lambda parameters: StreamedAdamW(parameters, settings, group_bytes=64 * 1024))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(streamed[0], device[0], strict=True))
    for name, moments in device[1].items():
        for moment, tensor in moments.items():
            assert torch.equal(streamed[1][name][moment].cpu(), tensor.cpu()), (name, moment)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_model_on_the_device_is_exported_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path / "source")
    model = sharded(folder, torch.float32)
    load_sharded(model, folder, device=DEVICE)
    export_sharded(model, tmp_path / "out", dtype=dtype, source=folder, budget_bytes=64 * 1024)
    assert differing(model, tmp_path / "out", torch.float32) == []
