"""metrics.jsonl → curves and times. Long runs are thinned here: what is kept are rows as they are, nothing averaged."""

from dataclasses import dataclass, field
from pathlib import Path

from plimsoll.observe.report.data import Curve, Number, PhaseTotal, Times
from plimsoll.observe.report.lines import count_lines, number, rows_of

MAX_POINTS = 2000
"""Points of a curve up to which every row is kept."""
POINTS_OF_BUCKET = 4
"""Lowest, highest, last, and the first null."""
MAX_TIMES = 500
"""Steps in the chart of times."""
_TIME = "time/"


@dataclass(slots=True)
class _Thinner:
    """One curve. Rows are put in buckets of equal size; of a bucket stay its lowest, highest and last value, so that
    no spike is lost, and its first null. The first value of the curve stays as well."""

    steps: list[int] = field(default_factory=list[int])
    values: list[Number | None] = field(default_factory=list["Number | None"])
    _bucket: int = -1
    _kept: dict[str, tuple[int, Number | None]] = field(default_factory=dict[str, "tuple[int, Number | None]"])

    def add(self, bucket: int, step: int, value: Number | None) -> None:
        if bucket != self._bucket:
            first = self._bucket < 0
            self.flush()
            self._bucket = bucket
            if first:
                self._kept["first"] = (step, value)
        point = (step, value)
        self._kept["last"] = point
        if value is None:
            self._kept.setdefault("null", point)
            return
        lowest, highest = self._kept.get("lowest"), self._kept.get("highest")
        if lowest is None or lowest[1] is None or value < lowest[1]:
            self._kept["lowest"] = point
        if highest is None or highest[1] is None or value > highest[1]:
            self._kept["highest"] = point

    def flush(self) -> None:
        for step, value in sorted(dict(self._kept.values()).items()):
            self.steps.append(step)
            self.values.append(value)
        self._kept.clear()


@dataclass(slots=True)
class _Total:
    rows: int = 0
    seconds: float = 0.0
    highest: float = 0.0
    step: int = 0

    def add(self, step: int, seconds: Number) -> None:
        self.rows += 1
        self.seconds += seconds
        if self.rows == 1 or seconds > self.highest:
            self.highest, self.step = float(seconds), step


@dataclass(slots=True, kw_only=True, frozen=True)
class Metrics:
    """What metrics.jsonl holds."""

    num_rows: int
    last_step: int
    curves: list[Curve]
    times: Times


def read_metrics(path: Path, notes: list[str]) -> Metrics:
    """Read the file once in full and keep at most about MAX_POINTS a curve. What is left out goes into `notes`."""
    num_lines = count_lines(path)
    size = 1 if num_lines <= MAX_POINTS else -(-num_lines * POINTS_OF_BUCKET // MAX_POINTS)
    every = -(-num_lines // MAX_TIMES) or 1
    thinners: dict[str, _Thinner] = {}
    totals: dict[str, _Total] = {}
    timed: dict[int, dict[str, Number]] = {}
    num_rows, last_step, seconds = 0, 0, dict[str, Number]()
    for index, row in enumerate(rows_of(path, notes)):
        step = int(row["step"])
        num_rows, last_step, seconds = index + 1, step, {}
        for key, raw in row.items():
            value = number(raw)
            if key == "step" or (value is None and raw is not None):
                continue
            thinners.setdefault(key, _Thinner()).add(index // size, step, value)
            if key.startswith(_TIME) and value is not None:
                name = key.removeprefix(_TIME)
                totals.setdefault(name, _Total()).add(step, value)
                seconds[name] = value
        if index % every == 0:
            timed[step] = seconds
    if num_rows:
        timed[last_step] = seconds
    for thinner in thinners.values():
        thinner.flush()
    if size > 1:
        notes.append(
            f"Curves are thinned: {num_rows:,} rows in {-(-num_rows // size)} stretches of {size}, of each its lowest, "
            f"highest and last value. The chart of times shows every {every}th step; its table is over all."
        )
    return Metrics(
        num_rows=num_rows,
        last_step=last_step,
        curves=[Curve(key=key, steps=found.steps, values=found.values) for key, found in thinners.items()],
        times=_times(timed, totals),
    )


def _times(timed: dict[int, dict[str, Number]], totals: dict[str, _Total]) -> Times:
    steps = sorted(step for step, seconds in timed.items() if seconds)
    return Times(
        steps=steps,
        columns={name: [timed[step].get(name) for step in steps] for name in totals},
        totals=[
            PhaseTotal(name=name, rows=t.rows, seconds=t.seconds, highest=t.highest, highest_step=t.step)
            for name, t in totals.items()
        ],
    )
