"""metrics.jsonl → curves and times. Long runs are thinned here: what is kept are rows as they are, nothing averaged."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from plimsoll.observe.report.data import Curve, Number, PhaseTotal, Times
from plimsoll.observe.report.lines import Row, count_lines, number, rows_of

MAX_POINTS = 2000
"""Points of a curve up to which every row is kept."""
POINTS_OF_STRETCH = 4
"""Lowest, highest, last, and the first null."""
MAX_TIMES = 500
"""Steps in the chart of times."""
_TIME = "time/"


@dataclass(slots=True)
class _Points:
    """One curve. Rows come in stretches of equal length; of each stay its lowest, highest and last value, so that no
    spike is lost, and its first null. The first value of the curve stays as well."""

    steps: list[int] = field(default_factory=list[int])
    values: list[Number | None] = field(default_factory=list["Number | None"])

    def add(self, steps: list[int], values: list[Number | None]) -> None:
        kept = range(len(steps)) if len(steps) <= POINTS_OF_STRETCH else self._choose(values)
        self.steps += [steps[at] for at in kept]
        self.values += [values[at] for at in kept]

    def _choose(self, values: list[Number | None]) -> list[int]:
        known = [value for value in values if value is not None]
        kept = {len(values) - 1}
        if known:
            kept |= {values.index(min(known)), values.index(max(known))}
        if len(known) < len(values):
            kept.add(values.index(None))
        if not self.steps:
            kept.add(0)
        return sorted(kept)


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
    size = 1 if num_lines <= MAX_POINTS else -(-num_lines * POINTS_OF_STRETCH // MAX_POINTS)
    every = -(-num_lines // MAX_TIMES) or 1
    points: dict[str, _Points] = {}
    totals: dict[str, _Total] = {}
    timed: dict[int, dict[str, Number]] = {}
    num_rows, last_step = 0, 0
    last: Row = {}
    for stretch in _stretches(rows_of(path, notes), size):
        _add_stretch(stretch, points)
        for index, row in enumerate(stretch, start=num_rows):
            seconds = _times_of(row)
            for name, value in seconds.items():
                totals.setdefault(name, _Total()).add(row["step"], value)
            if index % every == 0:
                timed[row["step"]] = seconds
        last = stretch[-1]
        num_rows, last_step = num_rows + len(stretch), last["step"]
    timed[last_step] = _times_of(last)
    if size > 1:
        notes.append(
            f"Curves are thinned: {num_rows:,} rows in {-(-num_rows // size)} stretches of {size}, of each its lowest, "
            f"highest and last value. The chart of times shows one step in {every}; its table is over all."
        )
    return Metrics(
        num_rows=num_rows,
        last_step=last_step,
        curves=[Curve(key=key, steps=found.steps, values=found.values) for key, found in points.items()],
        times=_times(timed, totals),
    )


def _stretches(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    while stretch := list(islice(rows, size)):
        yield stretch


def _add_stretch(stretch: list[Row], points: dict[str, _Points]) -> None:
    for key in sorted(set[str]().union(*stretch) - {"step"}):
        with_key = [row for row in stretch if key in row and (row[key] is None or number(row[key]) is not None)]
        if with_key:
            points.setdefault(key, _Points()).add([row["step"] for row in with_key], [row[key] for row in with_key])


def _times_of(row: Row) -> dict[str, Number]:
    found = {key.removeprefix(_TIME): number(value) for key, value in row.items() if key.startswith(_TIME)}
    return {name: value for name, value in found.items() if value is not None}


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
