"""The pipeline on a GPU: bitwise torch's fused AdamW, while loading, work and storing overlap."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from plimsoll.parallel.mesh import ensure_process_group
from plimsoll.parallel.tensors import local
from plimsoll.update.adamw import AdamWSettings, DeviceAdamW
from plimsoll.update.streamed import StreamedAdamW
from plimsoll.weights.limits import STREAM_SLOTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
SHAPES = {"small": (33, 5), "norm": (7,), "large": (1731, 1041), "idle": (4, 4), "other": (1001, 999), "last": (65,)}


def make_parameters(dtype: torch.dtype, *, sharded: bool) -> dict[str, nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(7)
    values: dict[str, Any] = {
        name: torch.randn(shape, generator=generator, device="cuda").to(dtype) for name, shape in SHAPES.items()
    }
    if sharded:
        ensure_process_group(torch.device("cuda"))
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        values = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in values.items()}
    return {name: nn.Parameter(value) for name, value in values.items()}


def set_gradients(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator("cuda").manual_seed(100 + step)
    for name, parameter in parameters.items():
        gradient = torch.randn(SHAPES[name], generator=generator, device="cuda").to(parameter.dtype)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = None if name == "idle" else gradient


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_bytes", [2**16, 2**20, 2**28])
def test_streamed_steps_are_bitwise_those_on_the_device(group_bytes: int, dtype: torch.dtype, sharded: bool) -> None:
    mine, theirs = make_parameters(dtype, sharded=sharded), make_parameters(dtype, sharded=sharded)
    ours = StreamedAdamW(mine, SETTINGS, group_bytes=group_bytes)
    expected = DeviceAdamW(theirs, SETTINGS)
    for step in range(6):
        for parameters, adamw in ((mine, ours), (theirs, expected)):
            # Gradients are still being computed when the step is queued.
            torch.cuda._sleep(20_000_000)  # pyright: ignore[reportPrivateUsage]
            set_gradients(parameters, step)
            adamw.step(1e-2 / (step + 1))
            for parameter in parameters.values():
                parameter.grad = None
    assert ours.steps_by_name() == expected.steps_by_name()
    found = ours.moments()
    for name, moments in expected.moments().items():
        assert torch.equal(local(mine[name]), local(theirs[name])), name
        for moment, value in moments.items():
            own = found[name][moment]
            assert local(own).device.type == "cpu"
            assert type(own) is type(value)
            assert torch.equal(local(own), local(value).cpu()), f"{moment} of {name}"
            if isinstance(value, DTensor):
                assert isinstance(own, DTensor)
                assert (own.placements, own.device_mesh) == (value.placements, value.device_mesh)
    assert "idle" not in found
    ours.close()


def test_between_steps_nothing_is_on_the_device_and_within_one_three_slots() -> None:
    parameters = make_parameters(torch.float32, sharded=False)
    adamw = StreamedAdamW(parameters, SETTINGS, group_bytes=2**20)
    set_gradients(parameters, 0)
    adamw.step(1e-2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    adamw.step(1e-2)
    assert torch.cuda.memory_allocated() == before
    counts = 512 * 16  # the allocator's smallest piece for each step count
    assert torch.cuda.max_memory_allocated() - before <= adamw.slots_bytes + STREAM_SLOTS * 512 + counts
    adamw.moments()
