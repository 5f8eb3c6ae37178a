"""Rows of a .jsonl file one at a time: a long run is never in memory as a whole, and damage is told, not fatal."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

Row = dict[str, Any]

_BLOCK = 1 << 20


def count_lines(path: Path) -> int:
    """Newlines in the file; 0 when it is absent."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK), b""))


def rows_of(path: Path, notes: list[str]) -> Iterator[Row]:
    """The rows that have a whole number as their `step`. What is left out goes into `notes` once the file is read."""
    if not path.is_file():
        return
    damaged: list[int] = []
    torn = False
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # being written just now, or torn by a kill
                torn = True
                break
            row = _row(line)
            if row is None:
                damaged.append(number)
            else:
                yield row
    if torn:
        notes.append(f"{path.name}: the last row is not complete (being written, or torn by a kill) and is left out.")
    if damaged:
        which = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first of them {damaged[0]},"
        notes.append(f"{path.name}: {which} cannot be read as a row and is left out.")


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    found = cast("Row", row)
    return found if isinstance(found.get("step"), int) else None


def number(value: object) -> int | float | None:
    """`value` when it is a number, else None; true and false are no numbers."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def whole(value: object) -> int | None:
    """`value` when it is a whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
