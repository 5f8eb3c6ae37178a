"""Frozen bf16 weights that come in for a pass, in each placement."""

import gc
import time
from typing import Any

import torch

from plimsoll.update.reference import KeptInArena, KeptInFiles, KeptOnDevice, Placement, Store
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.load import load_sharded
from plimsoll.weights.names import checkpoint_tables
from support.device import GB, Settings, host_state, mib, start, synchronize, torch_pinned_bytes
from support.memory import anonymous_bytes, bits_by_name, settle, storage_bytes
from support.models import meta_model, shard, warm_page_cache

PLACEMENTS: tuple[Placement, ...] = ("device", "page_cache", "ring", "arena")


def reference(settings: Settings) -> dict[str, Any]:
    """For each placement: seconds and GB/s of every fill, what is held between passes, and whether the bits are right.

    The arena is last: it takes its values from the device. `anonymous_between_mib` counts from after the load.
    """
    device, mesh = settings.torch_device, start(settings)
    model: Any = shard(meta_model(settings.config(), torch.bfloat16), mesh)
    load_sharded(model, settings.checkpoint, device=device)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = bits_by_name(model)
    shard_bytes = storage_bytes(list(parameters.values()))
    warm_page_cache(settings.checkpoint)
    found: dict[str, Any] = {"shard_bytes": shard_bytes}
    with WeightFiles(settings.checkpoint) as files:
        tables = checkpoint_tables(model, files.tensors).tables
        settle()
        base = anonymous_bytes()
        if device.type == "cpu":
            base -= shard_bytes  # there the shard itself is host memory
        for placement in PLACEMENTS:
            begin = time.perf_counter()
            store: Store
            if placement == "device":
                store = KeptOnDevice()
            elif placement == "arena":
                store = KeptInArena(parameters, device)
            else:
                source = "map" if placement == "page_cache" else "ring"
                store = KeptInFiles(parameters, files, tables, source)
            setup = time.perf_counter() - begin
            found[placement] = {"setup_seconds": round(setup, 2), **passes(store, settings, shard_bytes, base)}
            found[placement]["same_bits"] = bits_by_name(model) == expected
            del store
            gc.collect()
    return found


def passes(store: Store, settings: Settings, shard_bytes: int, base: int) -> dict[str, Any]:
    """Fill and vacate; the weights are on the device at the end."""
    device = settings.torch_device
    seconds: list[float] = []
    figures: dict[str, Any] = {}
    for _ in range(settings.repeats):
        store.vacate()
        settle()
        figures = {
            "anonymous_between_mib": mib(anonymous_bytes() - base),
            "own_host_between_mib": mib(store.host_bytes),
            "torch_pinned_between_mib": mib(torch_pinned_bytes(device)),
            "process_between": host_state(device),
        }
        if device.type == "cuda":
            figures["device_between_mib"] = mib(torch.cuda.memory_allocated(device))
        begin = time.perf_counter()
        store.fill()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return {
        "fill_seconds": [round(value, 4) for value in seconds],
        "fill_gb_per_s": [round(shard_bytes / GB / value, 2) for value in seconds],
        **figures,
    }
