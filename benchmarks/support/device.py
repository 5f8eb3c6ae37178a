"""What the parts of `device_weights.py` share: the shape, the random checkpoint, and memory of device and host."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Qwen2Config

from plimsoll.parallel.mesh import build_mesh, ensure_process_group
from support.memory import MIB, PeakSampler, anonymous_bytes, settle, status_bytes
from support.models import meta_model, shard

GB = 1e9


@dataclass(slots=True, kw_only=True, frozen=True)
class Settings:
    """Of all parts; see the options of `device_weights.py`."""

    device: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    optimizer_layers: int
    policy_layers: int
    repeats: int
    folder: Path

    @property
    def checkpoint(self) -> Path:
        """Folder of the random model."""
        return self.folder / "checkpoint"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    def config(self, layers: int | None = None) -> Qwen2Config:
        """The model, or the same with another number of layers."""
        return Qwen2Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            architectures=["Qwen2ForCausalLM"],
            dtype="bfloat16",
        )


def make_checkpoint(settings: Settings, file_bytes: int = 2 * 10**9) -> dict[str, Any]:
    """Random bf16 weights in files of about `file_bytes`, made on the device; nothing to do when they are there."""
    folder, device = settings.checkpoint, settings.torch_device
    if (folder / "config.json").exists():
        return {"found": True}
    begin = time.perf_counter()
    folder.mkdir(parents=True)
    shapes = {
        name: tuple(value.shape) for name, value in meta_model(settings.config(), torch.bfloat16).state_dict().items()
    }
    files: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in shapes.items():
        num_bytes = 2 * torch.Size(shape).numel()
        if used and used + num_bytes > file_bytes:
            files.append({})
            used = 0
        files[-1][name] = shape
        used += num_bytes
    torch.manual_seed(0)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files, start=1):
        file = f"model-{index:05}-of-{len(files):05}.safetensors"
        tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02).cpu()
            for name, shape in names.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    write_index(folder, weight_map, total)
    settings.config().save_pretrained(folder)  # last: a folder with a config is whole
    seconds = time.perf_counter() - begin
    return {
        "found": False,
        "num_parameters": total // 2,
        "file_bytes": total,
        "files": len(files),
        "seconds": round(seconds, 2),
        "gb_per_s": round(total / GB / seconds, 2),
    }


def write_index(folder: Path, weight_map: dict[str, str], total: int) -> None:
    """model.safetensors.index.json."""
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def start(settings: Settings) -> DeviceMesh:
    """Device, groups of one rank, and a mesh whose communicator exists, so that baselines contain them."""
    device = settings.torch_device
    ensure_process_group(device)
    mesh = build_mesh(device, None)
    value = torch.ones(1, device=device)
    torch.distributed.all_reduce(value)
    torch.distributed.all_reduce(value, group=mesh.get_group())
    synchronize(device)
    return mesh


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_model(settings: Settings, dtype: torch.dtype, mesh: DeviceMesh, layers: int | None = None) -> nn.Module:
    """Sharded, with memory on the device and nothing in it."""
    return shard(meta_model(settings.config(layers), dtype), mesh).to_empty(device=settings.torch_device)


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds until the device has done it."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


@contextmanager
def device_peak(device: torch.device, into: dict[str, Any]) -> Iterator[None]:
    """`device_before_mib`, `device_peak_mib` and `device_after_mib` as torch's allocator counts them."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    into["device_before_mib"] = mib(torch.cuda.memory_allocated(device))
    yield
    torch.cuda.synchronize(device)
    into["device_peak_mib"] = mib(torch.cuda.max_memory_allocated(device))
    into["device_after_mib"] = mib(torch.cuda.memory_allocated(device))


@contextmanager
def host_growth(into: dict[str, Any], less: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """`host_peak_mib` and `host_steady_mib`: growth of RssAnon inside and after, less bytes that belong there."""
    settle()
    base = anonymous_bytes()
    with PeakSampler() as sampler:
        yield
    settle()
    own = less()
    into["host_peak_mib"] = mib(sampler.peak - base - own)
    into["host_steady_mib"] = mib(anonymous_bytes() - base - own)


def host_state(device: torch.device) -> dict[str, Any]:
    """What this process holds on the host now."""
    held = {f"{field}_mib": mib(status_bytes(field)) for field in ("RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")}
    return {**held, "torch_pinned_mib": mib(torch_pinned_bytes(device))}


def torch_pinned_bytes(device: torch.device) -> int:
    """Host memory that torch's caching allocator has taken and keeps: the largest of its counters. Their names differ
    between versions (`reserved_bytes`, `allocated_bytes`), and the others count what is in use."""
    if device.type != "cuda":
        return 0
    counters = torch.cuda.host_memory_stats()
    return max((int(value) for name, value in counters.items() if name.endswith("bytes.current")), default=0)


def mib(num_bytes: float) -> float:
    return round(num_bytes / MIB, 2)
