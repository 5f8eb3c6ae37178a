"""What the device and torch's allocator say. On a CPU run there is no reader: the values are absent, not zero.

torch's counters and the driver's are read side by side: memory of an engine's pool, of NCCL and of other processes
lies outside torch's counters, and a pool that was given back below torch still stands in them.
"""

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from plimsoll.memory.allocator import AllocatorMode, allocator_mode


@dataclass(slots=True, kw_only=True, frozen=True)
class DeviceReading:
    """One reading, bytes. Peaks are since the last `reset_peaks`."""

    allocated: int  # in tensors, by torch's allocator
    reserved: int  # taken from the driver by torch's allocator
    allocated_peak: int
    reserved_peak: int
    used: int  # by every process on the device, by the driver
    total: int
    pinned: int | None  # pinned host memory held by torch's host allocator; None: not known


class DeviceReader(Protocol):
    """Reads the counters of one device."""

    @property
    def name(self) -> str:
        """As torch writes it, for example "cuda:0"."""
        ...

    def read(self) -> DeviceReading:
        """The counters now."""
        ...

    def reset_peaks(self) -> None:
        """Peaks start again from the current values."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished what was queued."""
        ...

    def empty_host_cache(self) -> None:
        """Give pinned host memory that was freed, and that torch keeps, back to the system."""
        ...

    def allocator_mode(self) -> AllocatorMode:
        """The allocator's mode as found."""
        ...


class CudaDevice:
    """A CUDA device of this process."""

    def __init__(self, device: torch.device) -> None:
        # torch types the index as int, but that of torch.device("cuda") is None.
        missing = device.index is None  # pyright: ignore[reportUnnecessaryComparison]
        self._index = torch.cuda.current_device() if missing else device.index

    @property
    def name(self) -> str:
        """cuda:INDEX."""
        return f"cuda:{self._index}"

    def read(self) -> DeviceReading:
        """The counters now; nothing is waited for."""
        stats = torch.cuda.memory_stats(self._index)
        free, total = torch.cuda.mem_get_info(self._index)
        return DeviceReading(
            # A device that has allocated nothing yet has no entries at all.
            allocated=int(stats.get("allocated_bytes.all.current", 0)),
            reserved=int(stats.get("reserved_bytes.all.current", 0)),
            allocated_peak=int(stats.get("allocated_bytes.all.peak", 0)),
            reserved_peak=int(stats.get("reserved_bytes.all.peak", 0)),
            used=total - free,
            total=total,
            pinned=int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)),
        )

    def reset_peaks(self) -> None:
        """Peaks start again from the current values."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        torch.cuda.synchronize(self._index)

    def empty_host_cache(self) -> None:
        """Give pinned memory that no tensor uses back to the system."""
        cast("Any", torch._C)._host_emptyCache()  # pyright: ignore[reportPrivateUsage]  # torch has no other name for it

    def allocator_mode(self) -> AllocatorMode:
        """The allocator's mode as found."""
        return allocator_mode(self._index)


@dataclass(slots=True, kw_only=True, frozen=True)
class EngineMemory:
    """Device memory of an engine in this process, bytes.

    A pool like vLLM's lies below torch's counters: they go on counting it while the engine sleeps and nothing is
    mapped. So what they count and what is there are two figures.
    """

    counted: int  # in torch's allocated and reserved, awake or asleep
    mapped: int  # on the device now


class FakeDevice:
    """A device for tests: allocators with a cache, for it and for the host, and memory that only the driver sees."""

    def __init__(self, *, total: int, outside: int = 0, name: str = "fake:0") -> None:
        self._name = name
        self._pool = 0  # bytes of an engine's pool, which torch counts awake or asleep
        self._asleep = False
        self.total = total
        self.outside = outside  # bytes of contexts, engine pools, other processes
        self.mode: AllocatorMode = "plain"
        self._allocated = self._reserved = 0
        self._allocated_peak = self._reserved_peak = 0
        self.pinned_used = self.pinned_cached = 0

    @property
    def name(self) -> str:
        """As given."""
        return self._name

    def pin(self, num_bytes: int) -> None:
        """Pinned host memory: rounded up to a power of two, out of the cache where it fits."""
        rounded = 1 << (num_bytes - 1).bit_length()
        self.pinned_cached -= min(rounded, self.pinned_cached)
        self.pinned_used += rounded

    def unpin(self) -> None:
        """All pinned memory is freed; its bytes stay with the allocator."""
        self.pinned_cached += self.pinned_used
        self.pinned_used = 0

    def empty_host_cache(self) -> None:
        """What is cached for the host goes back to the system."""
        self.pinned_cached = 0

    def add_pool(self, num_bytes: int) -> None:
        """An engine takes memory for its pool; it is awake."""
        self._pool += num_bytes
        self.allocate(num_bytes)

    def sleep(self) -> None:
        """The pool's memory goes back to the driver. torch's counters do not notice."""
        self._asleep = True

    def wake(self) -> None:
        """The pool's memory is there again."""
        self._asleep = False

    def engine(self) -> EngineMemory:
        """What the engine says of itself."""
        return EngineMemory(counted=self._pool, mapped=0 if self._asleep else self._pool)

    def allocate(self, num_bytes: int) -> None:
        """A tensor: out of the cache where it fits, else from the driver. torch.OutOfMemoryError when it is full."""
        reserved = max(self._reserved, self._allocated + num_bytes)
        if self._used(reserved) > self.total:
            raise torch.OutOfMemoryError(f"the fake device is full: tried to allocate {num_bytes} bytes")
        self._allocated += num_bytes
        self._reserved = reserved
        self._allocated_peak = max(self._allocated_peak, self._allocated)
        self._reserved_peak = max(self._reserved_peak, self._reserved)

    def free(self, num_bytes: int) -> None:
        """A tensor goes; its bytes stay reserved."""
        assert num_bytes <= self._allocated, "more is freed than was allocated"
        self._allocated -= num_bytes

    def fragment(self, num_bytes: int) -> None:
        """Reserve bytes that no tensor can use."""
        self._reserved += num_bytes
        self._reserved_peak = max(self._reserved_peak, self._reserved)

    def empty_cache(self) -> None:
        """What is reserved but not allocated goes back to the driver."""
        self._reserved = self._allocated

    def read(self) -> DeviceReading:
        """The counters now."""
        return DeviceReading(
            allocated=self._allocated,
            reserved=self._reserved,
            allocated_peak=self._allocated_peak,
            reserved_peak=self._reserved_peak,
            used=self._used(self._reserved),
            total=self.total,
            pinned=self.pinned_used + self.pinned_cached,
        )

    def _used(self, reserved: int) -> int:
        return reserved + self.outside - (self._pool if self._asleep else 0)

    def reset_peaks(self) -> None:
        """Peaks start again from the current values."""
        self._allocated_peak, self._reserved_peak = self._allocated, self._reserved

    def synchronize(self) -> None:
        """Nothing is queued."""

    def allocator_mode(self) -> AllocatorMode:
        """As set."""
        return self.mode


def device_reader(device: torch.device) -> DeviceReader | None:
    """The reader for a device; None for a CPU, which has no memory of its own."""
    return CudaDevice(device) if device.type == "cuda" else None
