"""Files of JSON: one object a line, appended as a run goes on; or one object, replaced as a whole. No torch."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from plimsoll.errors import RunFolderError


class JsonlWriter:
    """Appends one JSON object a line, each in one write: a killed process tears at most its last row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append `row`. NaN and infinities become null, with the key kept. Raises OSError when the disk is full."""
        line = json_line(row)
        while line:
            line = line[os.write(self._file, line) :]

    def truncate(self, last_step: int) -> None:
        """Keep the rows with `step` <= `last_step` (resume); a row torn by a kill goes, whatever its step was.

        Raises RunFolderError when a row is damaged that is not the last, or has no `step`.
        """
        self._rewrite([row for row in read_jsonl(self.path) if _step_of(row, self.path) <= last_step])

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        os.close(self._file)
        write_atomic(self.path, b"".join(json_line(row) for row in rows))
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def replace_last(self, row: Mapping[str, Any]) -> None:
        """Put `row` in the place of all rows from its `step` on, at once: a kill leaves the old row or the new one."""
        kept = [old for old in read_jsonl(self.path) if _step_of(old, self.path) < _step_of(row, self.path)]
        self._rewrite([*kept, row])

    def flush(self) -> None:
        """What was written survives a power cut once this returns."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, without a torn last one; an absent file has none. Raises RunFolderError for other damage."""
    if not path.exists():
        return []
    # Only a newline ends a row: U+2028 and its like may stand inside one.
    *lines, torn = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            # After a power cut the last blocks may be there in length and not in content.
            if number == len(lines) and not torn:
                break
            raise _damaged(path, number, str(error)) from error
        if not isinstance(row, dict):
            raise _damaged(path, number, "it is not an object")
        rows.append(cast("dict[str, Any]", row))
    return rows


def json_line(row: Mapping[str, Any]) -> bytes:
    """One line with its newline, UTF-8, that every JSON reader takes: no NaN, no lone surrogate."""
    text = json.dumps(plain(row), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return text.encode("utf-8") + b"\n"


def plain(value: Any) -> Any:
    """`value` in JSON's own types: NaN and infinities null, lone surrogates U+FFFD, anything else as its text.

    Rows of data may hold what parquet holds: dates, bytes, decimals.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {valid_text(str(key)): plain(item) for key, item in items}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    return valid_text(str(cast("object", value)))


def valid_text(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate, which UTF-8 cannot hold."""
    if text.isascii():
        return text
    return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by `value`, indented, in one step: a reader sees the old file or the new one."""
    text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, indent=2)
    write_atomic(path, text.encode("utf-8") + b"\n")


def write_atomic(path: Path, content: bytes) -> None:
    """Replace `path` in one step, on disk before this returns: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _step_of(row: Mapping[str, Any], path: Path) -> int:
    step = row.get("step")
    if not isinstance(step, int):
        raise RunFolderError(f"{path}: a row has no whole number as its `step`. Remove the row, or start a new run.")
    return step


def _damaged(path: Path, number: int, reason: str) -> RunFolderError:
    return RunFolderError(
        f"{path}, line {number}: not a row of this file ({reason}). Move the file away and resume, or start a new run "
        f"(--overwrite, or another name=)."
    )
