"""Trainer and engine on one fake device, with a log of what both did and what the device then held."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plimsoll.memory import names
from plimsoll.memory.device import FakeDevice
from plimsoll.memory.enter import Memory
from plimsoll.memory.phases import Phase
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.resident import Place, Resident, Survival
from plimsoll.memory.schedule import Schedule
from plimsoll.rollout.fake import FakeEngine
from plimsoll.rollout.movers import kv_resident, weights_resident

GIB = 1024**3
ACTOR, MOMENTS, WEIGHTS, KV = 10 * GIB, 20 * GIB, 5 * GIB, 40 * GIB
GRADIENTS, ACTIVATIONS, BUCKET, CONTEXT = 10 * GIB, 5 * GIB, 2 * GIB, 2 * GIB

AWAY = {
    Phase.ROLLOUT: frozenset({names.ACTOR_PARAMETERS, names.OPTIMIZER_STATE}),
    Phase.LOGPROB: frozenset({names.KV_CACHE, names.ROLLOUT_PARAMETERS}),
    Phase.UPDATE: frozenset({names.KV_CACHE, names.ROLLOUT_PARAMETERS}),
    Phase.SYNC: frozenset({names.KV_CACHE, names.OPTIMIZER_STATE}),
}
PLANNED = {
    Phase.ROLLOUT: WEIGHTS + KV + CONTEXT,
    Phase.LOGPROB: ACTOR + ACTIVATIONS + CONTEXT,
    Phase.UPDATE: ACTOR + MOMENTS + GRADIENTS + ACTIVATIONS + CONTEXT,
    Phase.SYNC: ACTOR + WEIGHTS + BUCKET + CONTEXT,
}


@dataclass
class FakeMover:
    """Bytes of the trainer on a fake device."""

    name: str
    size: int
    device: FakeDevice
    events: list[str]
    present: bool = True
    fails: BaseException | None = None

    def evict(self) -> int:
        self.device.free(self.size)
        self.present = False
        self.events.append(f"trainer.evict({self.name})")
        return self.size

    def admit(self) -> int:
        if self.fails is not None:
            raise self.fails
        self.device.allocate(self.size)
        self.present = True
        self.events.append(f"trainer.admit({self.name})")
        return self.size


@dataclass
class Colocated:
    """Trainer and engine on one device, both fakes; `events` has what both did, `used` the device after each of it."""

    folder: Path
    total: int = 140 * GIB
    events: list[str] = field(default_factory=list[str])
    used: list[int] = field(default_factory=list[int])
    version: int = 0
    recorder: Recorder = field(init=False)
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        self.device = FakeDevice(total=self.total, outside=CONTEXT)
        self.engine = FakeEngine(
            script=lambda *_: (), weights_size=WEIGHTS, kv_size=KV, events=self.events, watch=self.engine_moved
        )
        self.engine.sleep(("weights", "kv_cache"))
        self.actor = FakeMover(names.ACTOR_PARAMETERS, ACTOR, self.device, self.events)
        self.moments = FakeMover(names.OPTIMIZER_STATE, MOMENTS, self.device, self.events)
        for mover in (self.actor, self.moments):
            self.device.allocate(mover.size)
        self.residents = [
            *(self.keeps(mover) for mover in (self.actor, self.moments)),
            weights_resident(self.engine, WEIGHTS),
            kv_resident(self.engine, KV, Place.ENGINE),
        ]
        self.recorder = Recorder(
            self.folder / "memory.jsonl", rank=0, device=self.device, residents=lambda: self.residents, interval=1.0
        )
        self.memory = Memory(
            self.recorder,
            residents=lambda: self.residents,
            schedule=Schedule(evicted=AWAY),
            policy_version=lambda: self.version,
            quiesce=lambda phase, leaving: self.events.append(f"quiesce({phase.value}: {' '.join(sorted(leaving))})"),
            release=self.release,
            barrier=lambda: self.events.append("barrier"),
        )
        self.events.clear()
        self.used.clear()

    def keeps(self, mover: FakeMover) -> Resident:
        measured = lambda: mover.size if mover.present else 0  # noqa: E731
        return Resident(name=mover.name, survival=Survival.KEEP, measured=measured, mover=mover)

    def engine_moved(self) -> None:
        """The engine's pool is beside torch's allocator."""
        self.device.outside = CONTEXT + self.engine.weights_bytes + self.engine.kv_bytes
        self.used.append(self.device.read().used)
        assert self.used[-1] <= self.total, "the engine found no room"

    def release(self) -> None:
        self.device.empty_cache()
        self.events.append("trainer.empty_cache")

    def compute(self, *sizes: int) -> None:
        for size in sizes:
            self.device.allocate(size)
        self.used.append(self.device.read().used)
        for size in reversed(sizes):
            self.device.free(size)

    def sync(self) -> None:
        with self.memory.enter(Phase.SYNC):
            self.engine.begin(self.version)
            for _ in range(3):
                self.compute(BUCKET)
                self.engine.bucket([])
            self.engine.commit(self.version)

    def step(self) -> None:
        self.sync()
        with self.memory.enter(Phase.ROLLOUT):
            self.events.append("generate")
        with self.memory.enter(Phase.LOGPROB):
            self.compute(ACTIVATIONS)
        with self.memory.enter(Phase.UPDATE):
            self.compute(GRADIENTS, ACTIVATIONS)
            self.version += 1

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "memory.jsonl").read_text().splitlines()]
