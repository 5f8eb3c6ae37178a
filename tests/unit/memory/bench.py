"""A recorder with its file, and what tests put under it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plimsoll.config.planned import Choices, MemoryPlan, PlannedHost, PlannedPhase
from plimsoll.memory.device import FakeDevice
from plimsoll.memory.host import HostReader
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.resident import Place, Resident, Survival

GIB = 1024**3
MIB = 1024**2


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def resident(name: str, size: int, place: Place = Place.DEVICE) -> Resident:
    return Resident(name=name, survival=Survival.KEEP, predicted_bytes=size, measured=lambda: size, place=place)


class Bench:
    """A Recorder with its file, and a device that tests turn."""

    def __init__(self, folder: Path, *, device: FakeDevice | None = None, host: HostReader | None = None) -> None:
        self.path = folder / "memory.jsonl"
        self.device = device
        self.residents: list[Resident] = []
        self.registered = 0
        self.recorder = Recorder(
            self.path,
            rank=0,
            device=device,
            residents=self._listed,
            interval=0.001,
            host=host or HostReader(),
            registered=lambda: self.registered,
        )

    def _listed(self) -> Sequence[Resident]:
        return self.residents

    def rows(self) -> list[dict[str, Any]]:
        return rows(self.path)


def plan(phase: str, device_bytes: int, *, host_bytes: int = 0) -> MemoryPlan:
    row = PlannedPhase(
        slot="all",
        phase=phase,
        device_bytes=device_bytes,
        capacity_bytes=140 * GIB,
        headroom_bytes=140 * GIB - device_bytes,
        residents={"actor_parameters": 4 * GIB, "cuda_context": GIB},
        workspace_bytes=device_bytes - 5 * GIB,
        host_bytes=host_bytes,
    )
    return MemoryPlan(
        fits=True,
        phases=(row,),
        host=PlannedHost(node_peak_bytes=(0,), rank_peak_bytes=(0,), file_cache_bytes=(0,)),
        moved_bytes_per_step=0,
        wire_bytes_per_step=0,
        choices=Choices(
            device="cuda",
            compute_dtype="bfloat16",
            activation_checkpointing="none",
            token_budget=1,
            optimizer_state="device",
            reference_placement="device",
            kv_bytes=0,
        ),
    )
