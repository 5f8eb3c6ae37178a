"""The ledger: what was really used, one row per (step, phase, rank, device, process) in RUN/memory.jsonl."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from plimsoll.jsonl import JsonlWriter

MIB = 1024**2
GIB = 1024**3


@dataclass(slots=True, kw_only=True, frozen=True)
class LedgerRow:
    """One phase of one step in one process; the border is its end. Bytes unless said otherwise.

    None: the system does not say (device counters on a CPU run, host counters where there is no /proc).
    """

    step: int
    phase: str  # value of Phase
    rank: int
    device: str  # "cuda:0", "cpu"
    process: str  # role of the process, for example "trainer"
    pid: int
    failed: bool  # the phase ended with an exception

    host_anonymous: int | None  # RssAnon at the border
    host_anonymous_peak: int | None  # highest sample within the phase
    host_growth: int | None  # host_anonymous over its value when the worker started; may be negative
    host_growth_peak: int | None
    host_file: int | None  # RssFile: mapped file pages
    host_shared: int | None  # RssShmem
    host_pinned: int | None  # held by torch's pinned allocator, in use or not, and what weights/ has registered
    host_available: int | None  # what node and cgroup could still give
    host_limit: int | None  # the cgroup's limit, or the machine's memory

    device_allocated: int | None  # in tensors, at the border
    device_reserved: int | None  # by torch's allocator, at the border
    device_allocated_peak: int | None  # within the phase
    device_reserved_peak: int | None
    device_used: int | None  # by the driver: every process, contexts, communicators, engine pools
    device_total: int | None
    device_engine: int | None  # in the engine's own pools, mapped now; torch's figures above do not include it
    device_non_torch: int | None  # device_used - device_reserved - device_engine
    non_torch_growth: int | None  # device_non_torch over its value at the end of the load; None: not taken yet
    device_released: int | None  # fall of device_used over the phase; negative: it rose
    fragmentation: int | None  # device_reserved - device_allocated
    unattributed: int | None  # device_allocated - the residents on the device

    planned_device: int | None  # the plan's highest use of the device in this phase; None: no plan for it
    planned_host: int | None  # the plan's highest host memory, comparable with host_growth_peak

    evicted: int  # copied off the device before the phase
    admitted: int  # copied onto the device before the phase
    seconds_border: float  # wall time of that

    residents: Mapping[str, int]  # name → bytes at the border, by summing the storages they own
    on_host: Sequence[str]  # those residents of a device run that are in host memory
    in_engine: Sequence[str]  # those that lie in the engine's own pools: parts of device_engine
    predicted: Mapping[str, int | None]  # name → bytes as predicted from the config
    allocator: str  # mode as found: none, plain, expandable, mixed
    seconds: float  # wall time of the phase

    def measured_device(self) -> int | None:
        """What to hold against `planned_device`: own tensors at their highest, engine and non-torch at the border."""
        if self.device_allocated_peak is None or self.device_non_torch is None:
            return None
        return self.device_allocated_peak + (self.device_engine or 0) + self.device_non_torch


class Ledger:
    """Appends rows to memory.jsonl."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)

    def write(self, row: LedgerRow) -> None:
        """Append the row."""
        self._writer.write(asdict(row))

    def truncate(self, step: int) -> None:
        """Keep the rows of steps up to `step` (resume)."""
        self._writer.truncate(step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def gib_text(num_bytes: float) -> str:
    """`1.5 GiB`; below a twentieth of a GiB `40.0 MiB`."""
    if abs(num_bytes) >= 0.05 * GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / MIB:.1f} MiB"
