"""The ledger's rows and its warnings."""

import json
from dataclasses import fields, replace
from pathlib import Path

from plimsoll.memory.ledger import GIB, MIB, FragmentationWatch, Ledger, LedgerRow, TrendWatch, slope
from tests.ledger_rows import ROW


def series(watch: TrendWatch, values: list[float], *, phase: str = "update") -> list[str]:
    said: list[str] = []
    for step, value in enumerate(values, start=1):
        said += watch.add(replace(ROW, step=step, phase=phase, fragmentation=round(value * GIB)))
    return said


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


def test_a_growing_series_is_said_once_with_its_slope() -> None:
    said = series(TrendWatch(), [float(n) for n in range(1, 9)] + [9.0, 10.0])
    assert len(said) == 1
    assert "1.0 GiB a step" in said[0]
    assert "fragmentation" in said[0]


def test_the_ledger_raises_the_warning(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "memory.jsonl")
    said = [ledger.write(replace(ROW, step=n, host_anonymous=n * GIB)) for n in range(1, 9)]
    ledger.close()
    assert [len(texts) for texts in said] == [0] * 7 + [1]
    assert "anonymous host memory" in said[-1][0]


def test_a_plateau_a_zigzag_and_a_small_rise_are_no_leak() -> None:
    assert series(TrendWatch(), [1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]) == []
    assert series(TrendWatch(), [1, 5] * 40) == []
    assert series(TrendWatch(), [1 + n / 1024 for n in range(8)]) == []  # 1 MiB a step: too little to speak of yet


def test_a_slow_leak_under_noise_is_found_over_more_steps() -> None:
    noise = [0.0, 0.01, -0.007, 0.015, -0.013, 0.003, 0.007]
    said = series(TrendWatch(), [4 + n * 8 / 1024 + noise[n % 7] for n in range(200)])  # 8 MiB a step
    assert len(said) == 1
    assert " MiB a step" in said[0]


def test_phases_are_watched_apart_but_a_quantity_is_said_once() -> None:
    watch = TrendWatch()
    rows = [(n, phase) for n in range(1, 9) for phase in ("rollout", "update")]
    said = [t for n, phase in rows for t in watch.add(replace(ROW, step=n, phase=phase, fragmentation=n * GIB))]
    assert len(said) == 1
    # The same values, alternating between two borders, are level at each border.
    watch = TrendWatch()
    rows = [(n, phase, size) for n in range(1, 9) for phase, size in (("rollout", 1), ("update", 5))]
    assert not [t for n, phase, s in rows for t in watch.add(replace(ROW, step=n, phase=phase, fragmentation=s * GIB))]


def test_rows_of_failed_phases_are_no_part_of_a_series(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "memory.jsonl")
    said = [ledger.write(replace(ROW, step=n, host_anonymous=n * GIB, failed=n == 8)) for n in range(1, 9)]
    ledger.close()
    assert said == [[]] * 8


def test_slope_is_least_squares() -> None:
    assert slope([(1, 10), (2, 20), (3, 30)]) == 10.0
    assert slope([(1, 0), (2, 30), (3, 30)]) == 15.0
    assert slope([(4, 1), (4, 9)]) == 0.0


def test_fragmentation_over_the_limit_is_said_once() -> None:
    watch = FragmentationWatch()
    fine = replace(ROW, device_allocated_peak=20 * GIB, device_reserved_peak=23 * GIB)
    # Reserved stays where the update left it while a small phase needs little: that is a cache, not fragmentation.
    cached = replace(ROW, phase="logprob", device_allocated_peak=4 * GIB, device_reserved_peak=23 * GIB)
    bad = replace(ROW, step=2, device_allocated_peak=50 * GIB, device_reserved_peak=135 * GIB)
    assert watch.add(fine) == []
    assert watch.add(cached) == []
    (text,) = watch.add(bad)
    assert "135.00 GiB" in text
    assert "85.00 GiB more" in text
    assert watch.add(bad) == []


def test_small_devices_are_not_spoken_of() -> None:
    small = replace(ROW, device_allocated_peak=10 * MIB, device_reserved_peak=30 * MIB)
    assert FragmentationWatch().add(small) == []


def test_every_field_of_a_row_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "run-folder.md").read_text(encoding="utf-8")
    section = text.partition("## memory.jsonl")[2].partition("\n## ")[0]
    assert [field.name for field in fields(LedgerRow) if f"`{field.name}`" not in section] == []
