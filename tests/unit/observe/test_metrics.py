"""JSON lines: what is written can be read by anybody, and a killed run can go on."""

import json
import math
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from plimsoll import jsonl
from plimsoll.errors import RunFolderError
from plimsoll.observe.metrics import JsonlWriter, read_jsonl, without_times


def test_rows_are_on_disk_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 1, "reward": 0.5})
    assert read_jsonl(path) == [{"step": 1, "reward": 0.5}]
    writer.write({"step": 2, "reward": 1})
    assert read_jsonl(path) == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 1}]
    writer.close()


def test_nan_and_infinities_become_null_with_the_key_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 1, "kl": math.nan, "nested": {"a": [math.inf, -math.inf, 1.5]}})
    writer.close()
    text = path.read_text()
    assert json.loads(text) == {"step": 1, "kl": None, "nested": {"a": [None, None, 1.5]}}
    assert "NaN" not in text
    assert "Infinity" not in text


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1e-308, 123456789.123456789, -0.0]
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write({"step": 0, "values": values})
    writer.close()
    (row,) = read_jsonl(tmp_path / "m.jsonl")
    assert [math.copysign(1, v) * v for v in row["values"]] == [math.copysign(1, v) * v for v in values]


@pytest.mark.parametrize("torn", ['{"step": 3, "rew', "{", '{"step": 3}', '{"step": 3, "text": "\u00e9'.encode()[:-1]])
def test_a_row_torn_by_a_kill_is_dropped_on_resume_and_rows_go_on_cleanly(tmp_path: Path, torn: str | bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(whole + (torn if isinstance(torn, bytes) else torn.encode()))
    writer = JsonlWriter(path)
    writer.truncate(5)
    writer.write({"step": 3, "again": True})
    writer.close()
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncate_drops_the_steps_that_will_be_done_again(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(6):
        writer.write({"step": step, "reward": step / 3})
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    writer.truncate(3)
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before[:4])


def test_damage_before_the_last_row_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 2"):
        read_jsonl(path)
    path.write_text('{"step": 1}\n[2]\n')
    with pytest.raises(RunFolderError, match="line 2"):
        read_jsonl(path)


def test_a_row_without_a_step_cannot_be_truncated(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"reward": 1.0})
    with pytest.raises(RunFolderError, match="step"):
        writer.truncate(1)
    writer.close()


def test_an_absent_file_has_no_rows(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_any_text_is_written_so_that_every_reader_takes_it() -> None:
    text = "a\ud83d\u2028\x00\x1b[31m\ufeff 😀 日本"
    line = jsonl.json_line({"text": text, "\udc00": 1})
    assert line.count(b"\n") == 1
    assert b"\x1b" not in line
    assert b"\x00" not in line
    assert json.loads(line.decode("utf-8")) == {"text": text.replace("\ud83d", "\ufffd"), "\ufffd": 1}
    assert "日本" in line.decode("utf-8")


def test_values_that_json_does_not_have_are_written_as_text() -> None:
    value = {"day": date(2024, 2, 29), "price": Decimal("1.50"), 3: (1, 2), "raw": b"\xff"}
    assert jsonl.plain(value) == {"day": "2024-02-29", "price": "1.50", "3": [1, 2], "raw": "b'\\xff'"}


def test_without_times_drops_what_depends_on_the_clock() -> None:
    row = {"step": 1, "time/rollout": 0.3, "speed/tokens": 12.0, "reward/mean": 0.5, "timeouts": 0}
    assert without_times(row) == {"step": 1, "reward/mean": 0.5, "timeouts": 0}


def test_write_json_replaces_a_file_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    jsonl.write_json(path, {"steps": 1})
    jsonl.write_json(path, {"steps": 2, "nan": math.nan})
    assert json.loads(path.read_text()) == {"steps": 2, "nan": None}
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
