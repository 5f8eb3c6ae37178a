"""Long runs: what is kept is exact, spikes stay, the newest stays whole, and the page says what it left out."""

import random
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from plimsoll.observe.report.curves import MAX_POINTS, MAX_TIMES, read_metrics
from plimsoll.observe.report.samples import MAX_SAMPLES, MAX_TEXT, read_rollouts
from plimsoll.observe.report.tracks import LAST_STEPS, MAX_ROWS, MAX_STEPS, read_ledger
from tests.unit.observe.report_runs import ledger_row, sample_row, write_lines


def test_every_point_of_a_thinned_curve_is_a_row_and_extremes_and_ends_stay(tmp_path: Path) -> None:
    source = random.Random(0)
    values = {step: source.random() for step in range(1, 9_876)}
    values[4_321], values[5_005] = 50.0, -50.0
    rows = [{"step": step, "loss": value, "time/update": value} for step, value in values.items()]
    rows[100]["eval/accuracy"] = rows[7_000]["eval/accuracy"] = 0.5
    notes: list[str] = []
    found = read_metrics(write_lines(tmp_path / "metrics.jsonl", rows), notes)
    curves = {curve.key: curve for curve in found.curves}
    loss = dict(zip(curves["loss"].steps, curves["loss"].values, strict=True))
    assert 1_000 < len(loss) <= MAX_POINTS
    assert all(values[step] == value for step, value in loss.items())
    assert curves["loss"].steps == sorted(loss)
    assert {1, 4_321, 5_005, 9_875} <= loss.keys()
    assert curves["eval/accuracy"].steps == [101, 7_001]  # what is rare stays whole
    assert len(found.times.steps) <= MAX_TIMES + 1
    assert found.times.columns["update"] == [values[step] for step in found.times.steps]
    assert found.times.steps[-1] == 9_875
    (total,) = found.times.totals
    assert (total.rows, total.highest, total.highest_step) == (9_875, 50.0, 4_321)
    assert abs(total.seconds - sum(values.values())) < 1e-6
    assert found.num_rows == 9_875
    assert len(notes) == 1
    assert "9,875 rows" in notes[0]


def test_each_stretch_keeps_its_lowest_highest_last_and_a_null(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": float(step % 40)} for step in range(4_000)]
    rows[2_005] = {"step": 2_005, "loss": float("nan")}
    curves = read_metrics(write_lines(tmp_path / "metrics.jsonl", rows), []).curves
    loss = dict(zip(curves[0].steps, curves[0].values, strict=True))
    assert loss[2_005] is None
    size = 8  # 4,000 rows, 2,000 points, 4 of them a stretch
    for start in range(0, 4_000, size):
        stretch = [row["loss"] for row in rows[start : start + size] if row["step"] != 2_005]
        kept = [value for step, value in loss.items() if start <= step < start + size and value is not None]
        assert (min(kept), max(kept)) == (min(stretch), max(stretch))
        assert start + size - 1 in loss


def test_a_run_within_the_bound_keeps_every_row_and_says_nothing(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 1.0} for step in range(MAX_POINTS)]
    notes: list[str] = []
    (loss,) = read_metrics(write_lines(tmp_path / "metrics.jsonl", rows), notes).curves
    assert loss.steps == list(range(MAX_POINTS))
    assert notes == []


def test_the_ledger_keeps_the_last_steps_whole_and_the_highest_of_all(tmp_path: Path) -> None:
    template = asdict(ledger_row(0, "update", 0, device=True))
    phases = ("rollout", "update")
    rows = [
        template | {"step": step, "phase": phase, "device_allocated_peak": 10**9 if step == 1_234 else step}
        for step in range(1, 3_001)
        for phase in phases
    ]
    notes: list[str] = []
    (track,) = read_ledger(write_lines(tmp_path / "memory.jsonl", rows), notes)
    steps = sorted(set(track.steps))
    assert 100 <= len(steps) <= MAX_STEPS
    assert steps[-LAST_STEPS:] == list(range(2_951, 3_001))
    gaps = {later - earlier for earlier, later in pairwise(steps[:50])}
    assert len(gaps) == 1  # evenly spread
    assert all(track.steps.count(step) == 2 for step in steps)
    for summary in track.summary:
        assert summary.rows == 3_000
        assert (summary.highest["device_allocated_peak"].value, summary.highest["device_allocated_peak"].step) == (
            10**9,
            1_234,
        )
    assert len(notes) == 1
    assert f"one step in {gaps.pop()} " in notes[0]


def test_the_ledger_of_many_ranks_is_bounded_in_rows(tmp_path: Path) -> None:
    template = asdict(ledger_row(0, "update", 0, device=True))
    rows = [template | {"step": step, "rank": rank} for step in range(1, 201) for rank in range(80)]
    tracks = read_ledger(write_lines(tmp_path / "memory.jsonl", rows), [])
    assert [track.rank for track in tracks] == list(range(80))
    assert sum(len(track.steps) for track in tracks) <= MAX_ROWS


def test_rollouts_keep_the_newest_and_steps_spread_over_the_run(tmp_path: Path) -> None:
    for step in range(1, 1_001):
        write_lines(tmp_path / "rollouts" / f"step_{step:06d}.jsonl", [sample_row(step, sample) for sample in range(4)])
    notes: list[str] = []
    found = read_rollouts(tmp_path / "rollouts", notes)
    steps = [sample.step for sample in found]
    assert MAX_SAMPLES - 200 <= len(found) <= MAX_SAMPLES
    assert steps == sorted(steps)
    assert set(range(751, 1_001)) <= set(steps)
    assert min(steps) == 1
    assert len([step for step in set(steps) if step <= 375]) > 90
    assert [note for note in notes if f"{len(found):,} samples" in note]


def test_rollouts_within_the_bound_are_all_kept_and_nothing_is_said(tmp_path: Path) -> None:
    for step in range(1, 501):
        write_lines(tmp_path / "rollouts" / f"step_{step:06d}.jsonl", [sample_row(step, sample) for sample in range(4)])
    notes: list[str] = []
    assert len(read_rollouts(tmp_path / "rollouts", notes)) == MAX_SAMPLES
    assert notes == []


def test_a_long_text_is_shown_without_its_middle(tmp_path: Path) -> None:
    text = "".join(chr(97 + at % 26) for at in range(50_000))
    write_lines(tmp_path / "step_000001.jsonl", [sample_row(1, 0, response=text)])
    (sample,) = read_rollouts(tmp_path, [])
    assert len(sample.response) < MAX_TEXT + 100
    assert sample.response.startswith(text[: MAX_TEXT // 2])
    assert sample.response.endswith(text[-MAX_TEXT // 5 :])
    assert f"{50_000 - MAX_TEXT:,} characters left out" in sample.response
