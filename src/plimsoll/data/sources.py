"""Files → raw rows, one record at a time. What a row means is decided in `rows.py`.

A record is numbered from 0 in the order of the file; blank lines of a .jsonl file are no records. Bytes of such a file
that are not UTF-8 become lone surrogates, so that one rule (data.bad_text) covers both kinds of invalid text.
"""

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq

from plimsoll.errors import DataError

PARQUET_BATCH = 1024
"""Rows turned into Python objects at a time."""


@dataclass(slots=True, kw_only=True, frozen=True)
class RawRow:
    """One record as the file has it."""

    row: int
    where: str  # for messages: "row 3 (line 4)"
    columns: Mapping[str, Any]
    problem: str = ""  # why the record could not be read; then `columns` is empty
    detail: str = ""  # the parser's words


def read_rows(path: Path, *, key: str) -> Iterator[RawRow]:
    """Records of a .jsonl or .parquet file.

    Raises DataError naming `key` (data.train or data.eval) when the file is missing or of another kind.
    """
    if not path.is_file():
        raise DataError(f"{key}={path}: no such file (it is a .jsonl or .parquet file, task:NAME or gym:NAME)")
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path, key)
    raise DataError(f"{key}={path}: rows are read from .jsonl and .parquet files, not from {path.suffix or 'this'}")


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    row = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                yield _jsonl_row(row, f"row {row} (line {number})", content)
                row += 1


def _jsonl_row(row: int, where: str, content: bytes) -> RawRow:
    try:
        record: Any = json.loads(content.decode("utf-8", errors="surrogateescape"))
    except (ValueError, RecursionError) as error:
        return RawRow(row=row, where=where, columns={}, problem="not JSON", detail=str(error))
    if not isinstance(record, dict):
        kind = type(cast(object, record)).__name__
        return RawRow(row=row, where=where, columns={}, problem="not a JSON object", detail=f"a {kind}")
    return RawRow(row=row, where=where, columns=cast(dict[str, Any], record))


def _read_parquet(path: Path, key: str) -> Iterator[RawRow]:
    try:
        with pq.ParquetFile(path) as file:
            row = 0
            for batch in cast(Iterator[Any], file.iter_batches(batch_size=PARQUET_BATCH)):
                for index in range(batch.num_rows):
                    yield _parquet_row(row, batch, index)
                    row += 1
    except (ValueError, OSError) as error:  # pyarrow.ArrowInvalid is a ValueError
        raise DataError(f"{key}={path}: cannot be read as parquet ({error})") from error


def _parquet_row(row: int, batch: Any, index: int) -> RawRow:
    # `batch` is a pyarrow.RecordBatch; pyarrow publishes no types.
    try:
        columns = {name: column[index].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    except UnicodeDecodeError as error:  # Arrow does not check its strings until they are read
        return RawRow(row=row, where=f"row {row}", columns={}, problem="text is not UTF-8", detail=str(error))
    return RawRow(row=row, where=f"row {row}", columns=columns)
