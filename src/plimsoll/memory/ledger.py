"""The ledger: what was really used, one row per (step, phase, rank, device, process) in RUN/memory.jsonl."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
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
    device_used: int | None  # by the driver: every process, contexts, communicators
    device_total: int | None
    device_non_torch: int | None  # device_used - device_reserved
    device_released: int | None  # fall of device_used over the phase; negative: it rose
    fragmentation: int | None  # device_reserved - device_allocated
    unattributed: int | None  # device_allocated - the residents on the device

    residents: Mapping[str, int]  # name → bytes at the border, by summing the storages they own
    on_host: Sequence[str]  # those residents of a device run that are in host memory
    predicted: Mapping[str, int | None]  # name → bytes as predicted from the config
    allocator: str  # mode as found: none, plain, expandable, mixed
    seconds: float  # wall time of the phase


class Ledger:
    """Appends rows to memory.jsonl and watches them for what ends in an out-of-memory later."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)
        self._trends = TrendWatch()
        self._fragmentation = FragmentationWatch()

    def write(self, row: LedgerRow) -> list[str]:
        """Append the row; return the warnings that it gives rise to, each of them once in a run."""
        self._writer.write(asdict(row))
        if row.failed:  # it ended half-way: its numbers are no part of a series
            return []
        return self._trends.add(row) + self._fragmentation.add(row)

    def truncate(self, step: int) -> None:
        """Keep the rows of steps up to `step` (resume)."""
        self._writer.truncate(step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


# Quantities that should be level from step to step at the same border, and what a person calls them.
_WATCHED = {
    "host_anonymous": "anonymous host memory",
    "device_allocated": "allocated device memory",
    "device_non_torch": "device memory outside torch",
    "fragmentation": "fragmentation (reserved - allocated)",
}


@dataclass(slots=True)
class TrendWatch:
    """Tells a leak from a plateau: `window` values in a row at the same border, each above the one before.

    The same is looked for in every `stride`-th value, so that a slow leak under the noise of single steps is found
    too. A rise of less than `least` bytes over the window is not spoken of. One warning a quantity.
    """

    window: int = 8
    least: int = 256 * MIB
    strides: tuple[int, ...] = (1, 8, 64)
    _series: dict[tuple[str, str, int], deque[tuple[int, int]]] = field(
        default_factory=dict[tuple[str, str, int], "deque[tuple[int, int]]"]
    )
    _counts: dict[str, int] = field(default_factory=dict[str, int])
    _said: set[str] = field(default_factory=set[str])

    def add(self, row: LedgerRow) -> list[str]:
        """The warnings that this row gives rise to."""
        values = {
            "host_anonymous": row.host_anonymous,
            "device_allocated": row.device_allocated,
            "device_non_torch": row.device_non_torch,
            "fragmentation": row.fragmentation,
        }
        count = self._counts.get(row.phase, 0)
        self._counts[row.phase] = count + 1
        warnings: list[str] = []
        for quantity, value in values.items():
            if value is None or quantity in self._said:
                continue
            for stride in self.strides:
                if count % stride:
                    continue
                series = self._series.setdefault((row.phase, quantity, stride), deque(maxlen=self.window))
                series.append((row.step, value))
                if self._rises(series):
                    self._said.add(quantity)
                    warnings.append(_trend_text(row, quantity, series))
                    break
        return warnings

    def _rises(self, series: deque[tuple[int, int]]) -> bool:
        if len(series) < self.window or series[-1][1] - series[0][1] < self.least:
            return False
        points = list(series)
        return all(later[1] > earlier[1] for earlier, later in pairwise(points))


def slope(points: list[tuple[int, int]]) -> float:
    """Least-squares slope of (step, bytes), in bytes a step; 0 when all steps are the same."""
    mean_step = sum(step for step, _ in points) / len(points)
    mean_value = sum(value for _, value in points) / len(points)
    spread = sum((step - mean_step) ** 2 for step, _ in points)
    if spread == 0:
        return 0.0
    return sum((step - mean_step) * (value - mean_value) for step, value in points) / spread


def _trend_text(row: LedgerRow, quantity: str, series: deque[tuple[int, int]]) -> str:
    points = list(series)
    gib_a_step = slope(points) / GIB
    rate = f"{gib_a_step:.1f} GiB" if gib_a_step >= 0.05 else f"{gib_a_step * 1024:.1f} MiB"
    return (
        f"{_WATCHED[quantity]} grows at the end of every {row.phase} phase on rank {row.rank}: "
        f"{points[0][1] / GIB:.2f} GiB at step {points[0][0]}, {points[-1][1] / GIB:.2f} GiB at step {points[-1][0]}, "
        f"{rate} a step. A run that goes on like this runs out of memory; memory.jsonl shows which phase "
        f"and whether a resident grows with it."
    )


@dataclass(slots=True)
class FragmentationWatch:
    """Warns once when torch has reserved far more than any phase so far has needed at one time.

    Reserved minus allocated at a border is no sign by itself: the cache of the biggest phase stays reserved by design.
    """

    ratio: float = 1.25  # reserved over the highest allocated peak so far
    least: int = GIB  # bytes above it that are worth speaking of
    _highest: int = 0
    _said: bool = False

    def add(self, row: LedgerRow) -> list[str]:
        """The warning that this row gives rise to."""
        if row.device_allocated_peak is None or row.device_reserved_peak is None or self._said:
            return []
        self._highest = max(self._highest, row.device_allocated_peak)
        excess = row.device_reserved_peak - self._highest
        if excess < self.least or row.device_reserved_peak <= self.ratio * self._highest:
            return []
        self._said = True
        return [
            f"fragmentation on rank {row.rank}, {row.phase} phase of step {row.step}: torch has reserved "
            f"{row.device_reserved_peak / GIB:.2f} GiB, {excess / GIB:.2f} GiB more than any phase so far has needed "
            f"at one time. The allocator mode found is {row.allocator}; with expandable segments "
            f"(PYTORCH_ALLOC_CONF=expandable_segments:True) and a smaller train.token_budget the difference shrinks."
        ]
