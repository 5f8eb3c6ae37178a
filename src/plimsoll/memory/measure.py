"""What is read at the end of a phase, and the ledger's row that it makes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.config.planned import PlannedPhase
from plimsoll.memory.device import DeviceReading, EngineMemory
from plimsoll.memory.host import HostReading
from plimsoll.memory.ledger import LedgerRow
from plimsoll.memory.resident import Place, Resident


@dataclass(slots=True, kw_only=True)
class Moved:
    """What one border moved. Whoever moves fills in the bytes; the recorder does the rest."""

    evicted: int = 0  # bytes copied off the device
    admitted: int = 0  # bytes copied onto it
    seconds: float = 0.0
    released: int | None = None  # fall of the driver's count; None: a CPU run


@dataclass(slots=True, kw_only=True, frozen=True)
class OwnMemory:
    """One reading of the device, without what the engine's pools put into torch's counters. Bytes."""

    reading: DeviceReading
    engine: EngineMemory

    @property
    def allocated(self) -> int:
        """In tensors."""
        return self.reading.allocated - self.engine.counted

    @property
    def reserved(self) -> int:
        """Taken from the driver by torch's allocator."""
        return self.reading.reserved - self.engine.counted

    @property
    def allocated_peak(self) -> int:
        """Highest since the peaks were reset."""
        # A lower bound in the phase in which the pool comes into being (the load): the highest may be of before.
        return self.reading.allocated_peak - self.engine.counted

    @property
    def reserved_peak(self) -> int:
        """Highest since the peaks were reset."""
        return self.reading.reserved_peak - self.engine.counted

    @property
    def non_torch(self) -> int:
        """By the driver: contexts, communicators, other processes."""
        return self.reading.used - self.reserved - self.engine.mapped


@dataclass(slots=True, kw_only=True, frozen=True)
class Measured:
    """One phase of one process. Bytes and seconds; None: the system does not say."""

    step: int
    phase: str
    rank: int
    process: str
    failed: bool
    seconds: float
    host: HostReading
    host_peak: int | None
    host_start: int | None  # anonymous memory when the worker started
    host_limit: int | None
    registered: int  # pinned beside torch's allocator
    device_name: str
    device: OwnMemory | None
    used_before: int | None  # the driver's count when the phase began
    non_torch_start: int | None
    residents: Sequence[Resident]
    planned: PlannedPhase | None
    moved: Moved
    allocator: str

    def row(self) -> LedgerRow:
        """The row; residents are measured now."""
        sizes = {resident.name: resident.measured() for resident in self.residents}
        assert len(sizes) == len(self.residents), "two residents have the same name"
        owned = sum(sizes[resident.name] for resident in self.residents if resident.place is Place.DEVICE)
        device, host, planned = self.device, self.host, self.planned
        reading = device.reading if device else None
        return LedgerRow(
            step=self.step,
            phase=self.phase,
            rank=self.rank,
            device=self.device_name,
            process=self.process,
            pid=os.getpid(),
            failed=self.failed,
            host_anonymous=host.anonymous,
            host_anonymous_peak=self.host_peak,
            host_growth=_minus(host.anonymous, self.host_start),
            host_growth_peak=_minus(self.host_peak, self.host_start),
            host_file=host.file,
            host_shared=host.shared,
            host_pinned=_plus(reading.pinned, self.registered) if reading else None,
            host_available=host.available,
            host_limit=self.host_limit,
            device_allocated=device.allocated if device else None,
            device_reserved=device.reserved if device else None,
            device_allocated_peak=device.allocated_peak if device else None,
            device_reserved_peak=device.reserved_peak if device else None,
            device_used=reading.used if reading else None,
            device_total=reading.total if reading else None,
            device_engine=device.engine.mapped if device else None,
            device_non_torch=device.non_torch if device else None,
            non_torch_growth=_minus(device.non_torch, self.non_torch_start) if device else None,
            device_released=_minus(self.used_before, reading.used) if reading else None,
            fragmentation=device.reserved - device.allocated if device else None,
            unattributed=device.allocated - owned if device else None,
            planned_device=planned.device_bytes if planned else None,
            planned_host=planned.host_bytes if planned and planned.host_bytes else None,
            evicted=self.moved.evicted,
            admitted=self.moved.admitted,
            seconds_border=self.moved.seconds,
            residents=sizes,
            on_host=[resident.name for resident in self.residents if resident.place is Place.HOST],
            in_engine=[resident.name for resident in self.residents if resident.place is Place.ENGINE],
            predicted={resident.name: resident.predicted_bytes for resident in self.residents},
            allocator=self.allocator,
            seconds=self.seconds,
        )


def _plus(value: int | None, more: int) -> int | None:
    return None if value is None else value + more


def _minus(value: int | None, base: int | None) -> int | None:
    return None if value is None or base is None else value - base
