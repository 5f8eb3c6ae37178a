"""metrics.jsonl: one row a step, and the rule about times."""

from collections.abc import Mapping
from typing import Any

from plimsoll.jsonl import JsonlWriter, read_jsonl

__all__ = ["TIME_PREFIXES", "JsonlWriter", "read_jsonl", "without_times"]

# A run that was killed and resumed must give the rows of the run that was not. So whatever depends on the clock has a
# key that starts with one of these, and whatever depends on the machine's memory is in memory.jsonl.
TIME_PREFIXES = ("time/", "speed/")


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a row that two runs of the same recipe have in common."""
    return {key: value for key, value in row.items() if not key.startswith(TIME_PREFIXES)}
