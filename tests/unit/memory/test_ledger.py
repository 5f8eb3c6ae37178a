"""The ledger's rows."""

import json
from dataclasses import fields, replace
from pathlib import Path

from plimsoll.memory.ledger import GIB, Ledger, LedgerRow, gib_text
from tests.ledger_rows import ROW


def test_a_row_is_one_line_and_absent_values_are_null(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "memory.jsonl")
    ledger.write(replace(ROW, residents={"actor_parameters": 12}, predicted={"actor_parameters": None}))
    ledger.close()
    (line,) = (tmp_path / "memory.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["device_allocated"] is None
    assert row["residents"] == {"actor_parameters": 12}
    assert (row["step"], row["phase"], row["seconds"]) == (1, "update", 0.5)


def test_truncate_keeps_the_rows_up_to_the_step_and_appending_goes_on(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "memory.jsonl")
    for step in (0, 1, 1, 2, 3):
        ledger.write(replace(ROW, step=step))
    ledger.truncate(1)
    ledger.write(replace(ROW, step=2))
    ledger.close()
    rows = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 1, 2]


def test_every_field_of_a_row_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "run-folder.md").read_text(encoding="utf-8")
    section = text.partition("## memory.jsonl")[2].partition("\n## ")[0]
    assert [field.name for field in fields(LedgerRow) if f"`{field.name}`" not in section] == []


def test_what_is_held_against_the_plan_is_the_peak_with_what_lies_outside_torch() -> None:
    row = replace(
        ROW, device_allocated=GIB, device_allocated_peak=30 * GIB, device_engine=4 * GIB, device_non_torch=GIB
    )
    assert row.measured_device() == 35 * GIB
    assert ROW.measured_device() is None


def test_sizes_in_texts() -> None:
    assert [gib_text(size) for size in (20 * GIB, -3 * GIB, 40 * 2**20, 0)] == [
        "20.0 GiB",
        "-3.0 GiB",
        "40.0 MiB",
        "0.0 MiB",
    ]
