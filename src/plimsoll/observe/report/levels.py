"""Heights of the lines in the memory timeline: sums of several values of one row of memory.jsonl."""

from collections.abc import Mapping

LEVELS = ("device_peak", "device_highest", "host_planned")
"""`device_peak`: what the phase needed at its highest, that is tensors, engine and what is outside of torch; the
allocator's cache is not in it, for torch gives that back when it must. It is what a plan's figure is held against.
`device_highest`: with that cache, what the device really gave. `host_planned`: what the process had at its start, and
the plan's figure on top of it."""

Values = Mapping[str, int | None]


def levels_of(row: Values) -> dict[str, int | None]:
    """The levels of a row; None where the row lacks a part, as on a CPU run or with an older version."""
    beside = _sum(row.get("device_non_torch"), row.get("device_engine") or 0)
    given = (row.get("device_used"), _sum(row.get("device_reserved_peak"), beside))
    return {
        "device_peak": _sum(row.get("device_allocated_peak"), beside),
        "device_highest": max((value for value in given if value is not None), default=None),
        "host_planned": _sum(row.get("planned_host"), _start(row)),
    }


def _start(row: Values) -> int | None:
    """Anonymous memory of the process at its start."""
    held, growth = row.get("host_anonymous"), row.get("host_growth")
    return None if held is None or growth is None else held - growth


def _sum(value: int | None, more: int | None) -> int | None:
    return None if value is None or more is None else value + more
