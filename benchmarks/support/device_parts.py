"""The parts of `device_weights.py`: each is run in a process of its own and returns its figures."""

import time
from collections.abc import Callable
from typing import Any

import torch

from plimsoll.weights.arena import HostArena
from plimsoll.weights.export import export_sharded
from plimsoll.weights.load import load_sharded
from plimsoll.weights.offload import Moved, Offloader, storage_sizes
from support.device import (
    GB,
    Settings,
    device_peak,
    empty_model,
    host_growth,
    make_checkpoint,
    mib,
    start,
    synchronize,
    timed,
    torch_pinned_bytes,
)
from support.device_optimizer import optimizer
from support.device_reference import reference
from support.memory import anonymous_bytes, io_bytes, module_bytes, status_bytes
from support.models import meta_model, shard, warm_page_cache

__all__ = ["PARTS", "Settings", "make_checkpoint"]


def load(settings: Settings) -> dict[str, Any]:
    """Meta, `fully_shard`, `load_sharded`; files in the page cache."""
    device, mesh = settings.torch_device, start(settings)
    found: dict[str, Any] = {"file_bytes": warm_page_cache(settings.checkpoint)}
    for dtype in (torch.float32, torch.bfloat16):
        runs: list[dict[str, Any]] = []
        for _ in range(settings.repeats):
            figures: dict[str, Any] = {}
            made: list[torch.nn.Module] = []

            def own_bytes(made: list[torch.nn.Module] = made) -> int:
                return module_bytes(made[0]) if device.type == "cpu" else 0

            with host_growth(figures, less=own_bytes), device_peak(device, figures):
                begin = time.perf_counter()
                made.append(shard(meta_model(settings.config(), dtype), mesh))
                built = time.perf_counter()
                load_sharded(made[0], settings.checkpoint, device=device)
                synchronize(device)
                end = time.perf_counter()
            figures |= {
                "build_seconds": round(built - begin, 3),
                "load_seconds": round(end - built, 3),
                "file_gb_per_s": round(found["file_bytes"] / GB / (end - built), 2),
                "device_gb_per_s": round(module_bytes(made[0]) / GB / (end - built), 2),
                "torch_pinned_mib": mib(torch_pinned_bytes(device)),
            }
            runs.append(figures)
            made.clear()
        found[str(dtype).removeprefix("torch.")] = runs
    return found


def offload(settings: Settings) -> dict[str, Any]:
    """fp32 parameters and two moments of the same size, there and back."""
    device, mesh = settings.torch_device, start(settings)
    model = empty_model(settings, torch.float32, mesh)
    parameters = [parameter.detach() for parameter in model.parameters()]
    tensors = [*parameters, *(torch.full_like(value, 0.5) for _ in range(2) for value in parameters)]
    before = anonymous_bytes()
    begin = time.perf_counter()
    arena = HostArena({"trainer": storage_sizes(tensors)}, device=device)
    offloader = Offloader(arena, "trainer", tensors)
    setup = time.perf_counter() - begin
    taken = anonymous_bytes() - before
    away: list[float] = []
    back: list[float] = []
    held: dict[str, Any] = {}
    for _ in range(settings.repeats):
        away.append(rate(offloader.offload()))
        if device.type == "cuda":
            held["device_mib_while_away"] = mib(torch.cuda.memory_allocated(device))
        back.append(rate(offloader.onload()))
    intact = all(bool((tensor == 0.5).all()) for tensor in tensors[len(parameters) :])
    begin = time.perf_counter()
    arena.close()
    return {
        "exact_bytes": arena.exact_bytes,
        "arena_bytes": arena.num_bytes,
        "arena_over_exact": round(arena.num_bytes / arena.exact_bytes, 5),
        "anonymous_over_exact": round(taken / arena.exact_bytes, 5),
        "setup_seconds": round(setup, 2),
        "close_seconds": round(time.perf_counter() - begin, 2),
        "to_host_gb_per_s": away,
        "to_device_gb_per_s": back,
        "moments_intact": intact,
        "torch_pinned_mib": mib(torch_pinned_bytes(device)),
        **held,
    }


def rate(moved: Moved) -> float:
    """GB/s."""
    return round(moved.num_bytes / GB / moved.seconds, 2)


def pinned(settings: Settings) -> dict[str, Any]:
    """The fp32 parameters alone in torch's pinned memory, a tensor each: what `pin_memory=True` and a non-blocking copy
    to the CPU take."""
    device, mesh = settings.torch_device, start(settings)
    if device.type != "cuda":
        return {"skipped": "torch pins memory only for a device"}
    model = empty_model(settings, torch.float32, mesh)
    sizes = storage_sizes(model.parameters())
    sources = [parameter.detach().to_local() for parameter in model.parameters()]
    before = {field: status_bytes(field) for field in ("RssAnon", "RssShmem")}
    begin = time.perf_counter()
    targets = [torch.empty_like(source, device="cpu", pin_memory=True) for source in sources]
    setup = time.perf_counter() - begin

    def copy(to_host: bool) -> None:
        for source, target in zip(sources, targets, strict=True):
            first, second = (target, source) if to_host else (source, target)
            first.copy_(second, non_blocking=True)

    exact = sum(sizes)
    away = [round(exact / GB / timed(lambda: copy(True), device), 2) for _ in range(settings.repeats)]
    back = [round(exact / GB / timed(lambda: copy(False), device), 2) for _ in range(settings.repeats)]
    taken = torch_pinned_bytes(device)
    growth = {f"{field}_growth_mib": mib(status_bytes(field) - value) for field, value in before.items()}
    targets.clear()
    return {
        "exact_bytes": exact,
        "taken_bytes": taken,
        "taken_over_exact": round(taken / exact, 5),
        "still_taken_when_freed_bytes": torch_pinned_bytes(device),
        "setup_seconds": round(setup, 2),
        "to_host_gb_per_s": away,
        "to_device_gb_per_s": back,
        **growth,
    }


def save(settings: Settings) -> dict[str, Any]:
    """The fp32 model as a bf16 folder, synced to disk; it is removed again."""
    import shutil

    device, mesh = settings.torch_device, start(settings)
    model = shard(meta_model(settings.config(), torch.float32), mesh)
    load_sharded(model, settings.checkpoint, device=device)
    out = settings.folder / "export"
    figures: dict[str, Any] = {}
    written = io_bytes("wchar")
    with host_growth(figures), device_peak(device, figures):
        begin = time.perf_counter()
        report = export_sharded(model, out, dtype=torch.bfloat16, source=settings.checkpoint)
        seconds = time.perf_counter() - begin
    shutil.rmtree(out)
    return {
        "file_bytes": report.num_bytes,
        "written_bytes": io_bytes("wchar") - written,
        "seconds": round(seconds, 2),
        "gb_per_s": round(report.num_bytes / GB / seconds, 2),
        "torch_pinned_mib": mib(torch_pinned_bytes(device)),
        **figures,
    }


PARTS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "load": load,
    "offload": offload,
    "pinned": pinned,
    "optimizer": optimizer,
    "reference": reference,
    "save": save,
}
