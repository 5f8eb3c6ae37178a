"""What in the ledger's rows ends in an out-of-memory later: said once a run, or refused at once."""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from plimsoll.errors import RunError
from plimsoll.memory.ledger import GIB, MIB, LedgerRow, gib_text


class RowWatch:
    """Looks at every row of one process."""

    def __init__(self) -> None:
        self._trends = TrendWatch()
        self._fragmentation = FragmentationWatch()
        self._plan = PlanWatch()

    def add(self, row: LedgerRow) -> list[str]:
        """The warnings that this row gives rise to, each of them once in a run."""
        if row.failed:  # it ended half-way: its numbers are no part of a series
            return []
        return self._trends.add(row) + self._fragmentation.add(row) + self._plan.add(row)


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
    return (
        f"{_WATCHED[quantity]} grows at the end of every {row.phase} phase on rank {row.rank}: "
        f"{points[0][1] / GIB:.2f} GiB at step {points[0][0]}, {points[-1][1] / GIB:.2f} GiB at step {points[-1][0]}, "
        f"{gib_text(slope(points))} a step. A run that goes on like this runs out of memory; memory.jsonl shows which "
        f"phase and whether a resident grows with it."
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


@dataclass(slots=True)
class PlanWatch:
    """Says once a phase that more was used than planned: on the device, and on the host."""

    share: float = 0.15  # over the plan
    least: int = 512 * MIB  # bytes over the plan
    _said: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def add(self, row: LedgerRow) -> list[str]:
        """The warnings that this row gives rise to."""
        figures = (
            ("device", row.measured_device(), row.planned_device, "memory.jsonl says which resident is larger"),
            ("host", row.host_growth_peak, row.planned_host, "memory.jsonl says which phase took it"),
        )
        warnings: list[str] = []
        for place, measured, planned, hint in figures:
            if measured is None or planned is None or (row.phase, place) in self._said:
                continue
            excess = measured - planned
            if excess > self.least and excess > self.share * planned:
                self._said.add((row.phase, place))
                warnings.append(
                    f"the {row.phase} phase of step {row.step} used {gib_text(measured)} of {place} memory on rank "
                    f"{row.rank}, {gib_text(excess)} more than the {gib_text(planned)} that were planned; {hint}, "
                    f"`plimsoll plan` what was expected."
                )
        return warnings


@dataclass(slots=True)
class ResidualGate:
    """Refuses to go on when an engine that sleeps leaves more and more on the device.

    What is left grows a little at every sleep and ends in an out-of-memory of the trainer, far from its cause.
    """

    tolerance: int = 2 * GIB  # bytes over the first sleep's
    _first: tuple[int, int] | None = None

    def check(self, step: int, residual_bytes: int) -> None:
        """What was left on the device after the sleep of `step`. The first call sets the baseline; RunError when a
        later one is more than `tolerance` above it."""
        if self._first is None:
            self._first = (step, residual_bytes)
            return
        first_step, baseline = self._first
        if residual_bytes - baseline > self.tolerance:
            raise RunError(
                f"step {step}: the sleeping engine left {residual_bytes / GIB:.1f} GiB on the device; after its first "
                f"sleep, in step {first_step}, it was {baseline / GIB:.1f} GiB. What is left is missing in the update, "
                f"and it grows. Resume from the last checkpoint, with another version of the engine if it comes again; "
                f"memory.residual_tolerance ({self.tolerance / GIB:.1f} GiB) says how much more is let through."
            )
