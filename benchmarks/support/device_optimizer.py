"""AdamW over fp32 parameters on the device, with its state in three places."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from plimsoll.config.train import TrainConfig
from plimsoll.update.adamw import AdamWSettings, DeviceAdamW
from plimsoll.update.streamed import StreamedAdamW
from plimsoll.weights.buffers import rebuild_buffers
from support.device import Settings, device_peak, host_growth, mib, start, synchronize, timed, torch_pinned_bytes
from support.memory import bits_by_name, local
from support.models import meta_model, shard

RATE = 1e-5
TOKENS = 16
PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Placed:
    """A sharded model with random weights and an AdamW whose state lies where `way` says."""

    def __init__(self, way: str, settings: Settings, layers: int, mesh: DeviceMesh) -> None:
        device = settings.torch_device
        options: dict[str, Any] = {"mp_policy": PRECISION}
        if way == "cpu_offload_policy":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        self.device, self.vocab = device, settings.vocab
        self.kept = way == "cpu_offload_policy"
        self.home = torch.device("cpu") if way == "cpu_offload_policy" else device
        self.model: Any = shard(meta_model(settings.config(layers), torch.float32), mesh, **options)
        self.model.to_empty(device=self.home)
        rebuild_buffers(self.model, device)
        self.generator = torch.Generator(self.home).manual_seed(0)
        for parameter in self.model.parameters():
            if way == "cpu_offload_policy":
                local(parameter).fill_(0.01)  # billions of random numbers take a CPU minutes
            else:
                local(parameter).normal_(0, 0.02, generator=self.generator)
        self.step, self.close = make_step(way, self.model)

    def synthetic_gradients(self) -> None:
        """Made once and kept: the same for every way."""
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter)
            local(parameter.grad).normal_(0, 1e-3, generator=self.generator)

    def forward_backward(self) -> None:
        """A few tokens, for real gradients and what moves with them."""
        tokens = torch.arange(TOKENS, device=self.device).remainder(self.vocab)[None]
        self.model(input_ids=tokens, use_cache=False).logits.float().square().mean().backward()

    def free(self) -> None:
        """Device memory goes now, whoever still holds the tensors. What is on the host stays: it is measured last."""
        if self.kept:
            return
        self.close()
        for parameter in self.model.parameters():
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    local(tensor).untyped_storage().resize_(0)
            parameter.grad = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def make_step(way: str, model: nn.Module) -> tuple[Callable[[], None], Callable[[], None]]:
    """One AdamW step over the gradients that are there, and what gives its memory back."""
    parameters, fixed = dict(model.named_parameters()), AdamWSettings.of(TrainConfig())
    if way == "streamed":
        streamed = StreamedAdamW(parameters, fixed)
        return lambda: streamed.step(RATE), streamed.close
    fused = DeviceAdamW(parameters, fixed)  # torch's, wherever the parameters are

    def close() -> None:
        for moment in fused.tensors():
            local(moment).untyped_storage().resize_(0)

    return lambda: fused.step(RATE), close


def synthetic(way: str, settings: Settings, layers: int, mesh: DeviceMesh) -> tuple[dict[str, Any], dict[str, int]]:
    """Steps over gradients made up once: figures, and the bits of the parameters afterwards."""
    figures: dict[str, Any] = {}
    with host_growth(figures):
        begin = time.perf_counter()
        placed = Placed(way, settings, layers, mesh)
        placed.synthetic_gradients()
        synchronize(placed.device)
        setup = time.perf_counter() - begin
        first = timed(placed.step, placed.device)
        with device_peak(placed.device, figures):
            seconds = [round(timed(placed.step, placed.device), 4) for _ in range(settings.repeats)]
    bits = bits_by_name(placed.model)
    parameters = sum(parameter.numel() for parameter in placed.model.parameters())
    placed.free()
    figures |= {"setup_seconds": round(setup, 2), "first_step_seconds": round(first, 3), "step_seconds": seconds}
    return {"num_parameters": parameters, **figures}, bits


def with_backward(way: str, settings: Settings, layers: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Forward and backward of a few tokens, then the step; gradients are freed in between, as a trainer does."""
    figures: dict[str, Any] = {}
    passes: list[float] = []
    steps: list[float] = []
    with host_growth(figures):
        placed = Placed(way, settings, layers, mesh)
        for repeat in range(settings.repeats + 1):
            if repeat == 1:  # what is made once is made
                passes.clear()
                steps.clear()
                if placed.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(placed.device)
            passes.append(round(timed(placed.forward_backward, placed.device), 4))
            steps.append(round(timed(placed.step, placed.device), 4))
            placed.model.zero_grad(set_to_none=True)
    if placed.device.type == "cuda":
        figures["device_peak_mib"] = mib(torch.cuda.max_memory_allocated(placed.device))
        figures["torch_pinned_mib"] = mib(torch_pinned_bytes(placed.device))
    placed.free()
    return {"forward_backward_seconds": passes, "step_seconds": steps, **figures}


def optimizer(settings: Settings) -> dict[str, Any]:
    """Two sizes: one that a device alone holds, and one whose 16 bytes a parameter fit into pinned host memory, which
    torch rounds up to powers of two."""
    mesh = start(settings)
    large: dict[str, Any] = {"layers": settings.optimizer_layers}
    bits: dict[str, dict[str, int]] = {}
    for way in ("device", "streamed"):
        large[way], bits[way] = synthetic(way, settings, settings.optimizer_layers, mesh)
    large["same_bits"] = bits["device"] == bits["streamed"]
    small: dict[str, Any] = {"layers": settings.policy_layers, "tokens": TOKENS}
    for way in ("device", "streamed", "cpu_offload_policy"):
        small[way] = with_backward(way, settings, settings.policy_layers, mesh)
    return {"synthetic_gradients": large, "with_backward": small}
