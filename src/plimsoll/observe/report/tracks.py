"""memory.jsonl → the ledger of each process: a bounded number of steps as they are, and the highest over all."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from plimsoll.observe.report.data import Compared, Extreme, Number, PhaseSummary, Track
from plimsoll.observe.report.levels import LEVELS, levels_of
from plimsoll.observe.report.lines import Row, number, rows_of, whole

MAX_STEPS = 300
LAST_STEPS = 50
"""The newest steps, of which every row is kept."""
MAX_ROWS = 8000
"""Rows of all processes together; with many of them, fewer steps are kept."""

VALUES = (
    "device_allocated",
    "device_allocated_peak",
    "device_used",
    "device_total",
    "device_non_torch",
    "device_engine",
    "fragmentation",
    "unattributed",
    "planned_device",
    "host_anonymous",
    "host_anonymous_peak",
    "host_shared",
    "host_pinned",
    "host_limit",
    "planned_host",
    "evicted",
    "admitted",
    "non_torch_growth",
)
"""Keys of a row that the page draws. Rows of older versions lack some."""
_SUMMED = (
    *VALUES,
    "device_reserved",
    "device_reserved_peak",
    "host_growth",
    "host_growth_peak",
    "host_available",
    "seconds",
    "seconds_border",
)
_NUMBERS = {int, float, type(None)}


@dataclass(slots=True)
class _Keeper:
    """Rows of every `stride`-th step and of the last ones, in one pass over a file whose length is not known."""

    stride: int = 1
    num_steps: int = 0
    _old: deque[list[Row]] = field(default_factory=deque[list[Row]])
    _recent: deque[list[Row]] = field(default_factory=deque[list[Row]])
    _step: int | None = None

    def add(self, row: Row) -> None:
        if row["step"] == self._step:
            self._recent[-1].append(row)
            return
        self._step = row["step"]
        self.num_steps += 1
        self._recent.append([row])
        if len(self._recent) > LAST_STEPS:
            self._settle(self._recent.popleft())

    def _settle(self, rows: list[Row]) -> None:
        """A step that is no longer among the last: keep it if the stride meets it, doubling the stride when full."""
        if self._meets(rows):
            self._old.append(rows)
        num_rows = len(self._recent[-1] if len(self._recent) == 1 else self._recent[-2])
        room = max(1, min(MAX_STEPS, MAX_ROWS // num_rows) - LAST_STEPS)
        while len(self._old) > room:
            self.stride *= 2
            self._old = deque(kept for kept in self._old if self._meets(kept))
            if self.stride > 1 << 40:  # steps without end at the same multiple: not a file of ours
                break

    def _meets(self, rows: list[Row]) -> bool:
        return rows[0]["step"] % self.stride == 0

    def rows(self) -> list[Row]:
        return [row for rows in (*self._old, *self._recent) for row in rows]


@dataclass(slots=True)
class _Summary:
    rows: int = 0
    failed: int = 0
    seconds: float = 0.0
    highest: dict[str, Extreme] = field(default_factory=dict[str, Extreme])
    residents: dict[str, Extreme] = field(default_factory=dict[str, Extreme])
    predicted: dict[str, int] = field(default_factory=dict[str, int])
    device: Compared | None = None
    host: Compared | None = None
    host_left: Extreme | None = None

    def add(self, row: Row) -> None:
        step = int(row["step"])
        self.rows += 1
        self.failed += row.get("failed") is True
        self.seconds += number(row.get("seconds")) or 0.0
        for key in _SUMMED:
            value = row.get(key)
            if value is not None:
                _raise(self.highest, key, value, step)
        for key, value in levels_of(row).items():
            if value is not None:
                _raise(self.highest, key, value, step)
                if key == "device_peak":
                    self.device = _more(self.device, value, step, row.get("planned_device"))
        growth, left = row.get("host_growth_peak"), row.get("host_available")
        if growth is not None:
            self.host = _more(self.host, growth, step, row.get("planned_host"))
        if left is not None and (self.host_left is None or left < self.host_left.value):
            self.host_left = Extreme(value=left, step=step)
        for name, size in row.get("residents", {}).items():
            _raise(self.residents, name, size, step)
        for name, size in row.get("predicted", {}).items():
            if size is not None:
                self.predicted[name] = size


def _raise(highest: dict[str, Extreme], key: str, value: Number, step: int) -> None:
    found = highest.get(key)
    if found is None or value > found.value:
        highest[key] = Extreme(value=value, step=step)


def _more(found: Compared | None, value: int, step: int, planned: int | None) -> Compared:
    if found is not None and found.value >= value:
        return found
    return Compared(value=value, step=step, planned=planned)


def _is_row(row: Row) -> bool:
    """What the sums below rely on; once looked at here, so that a file of millions of rows is read in seconds."""
    named = [row.get("residents", {}), row.get("predicted", {})]
    return all(isinstance(found, dict) for found in named) and _NUMBERS.issuperset(map(type, map(row.get, _SUMMED)))


_Owner = tuple[int, str, str]


def read_ledger(path: Path, notes: list[str]) -> list[Track]:
    """A track for each (rank, device, process) in the file, sorted; what is left out goes into `notes`."""
    keeper = _Keeper()
    summaries: dict[_Owner, dict[str, _Summary]] = {}
    for row in rows_of(path, notes):
        if not _is_row(row):
            continue
        keeper.add(row)
        summaries.setdefault(_owner(row), {}).setdefault(str(row.get("phase")), _Summary()).add(row)
    if keeper.stride > 1:
        notes.append(
            f"The memory timeline shows one step in {keeper.stride} and all of the last {LAST_STEPS}; the table of "
            f"highest values is over all {keeper.num_steps:,} steps."
        )
    rows: dict[_Owner, list[Row]] = {owner: [] for owner in sorted(summaries)}
    for row in keeper.rows():
        rows[_owner(row)].append(row)
    return [_track(owner, found, summaries[owner]) for owner, found in rows.items()]


def _owner(row: Row) -> _Owner:
    return whole(row.get("rank")) or 0, str(row.get("device")), str(row.get("process"))


def _named(row: Row, key: str) -> dict[str, int | None]:
    return {name: whole(value) for name, value in row.get(key, {}).items()}


def _known(columns: dict[str, list[int | None]]) -> dict[str, list[int | None]]:
    """Without those that say nothing at all, which would be a third of a page of a CPU run."""
    return {key: values for key, values in columns.items() if any(value is not None for value in values)}


def _lists(row: Row, key: str, name: str) -> bool:
    found = row.get(key)
    return isinstance(found, list) and name in found


def _track(owner: _Owner, rows: list[Row], summaries: dict[str, _Summary]) -> Track:
    rank, device, process = owner
    residents, predicted = [_named(row, "residents") for row in rows], [_named(row, "predicted") for row in rows]
    names = list(dict.fromkeys(name for found in residents for name in found))
    levels = [levels_of(row) for row in rows]
    return Track(
        rank=rank,
        device=device,
        process=process,
        steps=[int(row["step"]) for row in rows],
        phases=[str(row.get("phase")) for row in rows],
        failed=[row.get("failed") is True for row in rows],
        seconds=[number(row.get("seconds")) for row in rows],
        values=_known({key: [whole(row.get(key)) for row in rows] for key in VALUES}),
        levels=_known({key: [whole(found[key]) for found in levels] for key in LEVELS}),
        seconds_border=[number(row.get("seconds_border")) for row in rows],
        residents={name: [found.get(name) for found in residents] for name in names},
        predicted={name: [found.get(name) for found in predicted] for name in names},
        on_host=[name for name in names if any(_lists(row, "on_host", name) for row in rows)],
        in_engine=[name for name in names if any(_lists(row, "in_engine", name) for row in rows)],
        summary=[
            PhaseSummary(
                phase=phase,
                rows=found.rows,
                failed=found.failed,
                seconds=found.seconds,
                highest=found.highest,
                residents=found.residents,
                predicted=found.predicted,
                device=found.device,
                host=found.host,
                host_left=found.host_left,
            )
            for phase, found in summaries.items()
        ],
    )
