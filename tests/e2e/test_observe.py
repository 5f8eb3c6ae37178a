"""What a run sends to TensorBoard and wandb and what it profiles, against metrics.jsonl."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.small import Small, metrics
from tests.extras import needs


def events(folder: Path) -> dict[str, dict[int, float]]:
    """Scalars as TensorBoard shows them: key → step → value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: {event.step: event.value for event in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]
    }


def rows_of(run: Path) -> dict[str, dict[int, float]]:
    """metrics.jsonl in the same form."""
    found: dict[str, dict[int, float]] = {}
    for row in metrics(run):
        for key, value in row.items():
            if key != "step" and value is not None:
                found.setdefault(key, {})[row["step"]] = value
    return found


def records(path: Path) -> Iterator[bytes]:
    """Records of a .wandb file: LevelDB's log format (blocks of 32 KiB; checksum, length, kind) after 7 bytes.

    The kinds 2, 3 and 4 are the first, middle and last part of a record that is spread over blocks.
    """
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a header: the rest of the block is padding
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def history(run: Path) -> list[dict[str, Any]]:
    """Rows that wandb keeps in the files of offline runs."""
    from wandb.proto import wandb_internal_pb2

    rows: list[dict[str, Any]] = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


@needs("tensorboard")
def test_tensorboard_has_every_number_of_every_row(small: Small) -> None:
    run = small.train("observe.tensorboard=true", "train.steps=2")
    expected, found = rows_of(run), events(run / "tensorboard")
    assert set(found) == set(expected)
    for key, by_step in expected.items():
        assert found[key] == pytest.approx(by_step, rel=1e-6), key  # events hold float32


@needs("tensorboard")
def test_steps_that_a_resumed_run_does_again_replace_the_earlier_ones(small: Small) -> None:
    run = small.train("observe.tensorboard=true", "train.steps=3", "checkpoint.every=1")
    for step in (2, 3):  # as if the run had been killed after step 1
        for path in sorted((run / "checkpoints" / f"step_{step}").rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        (run / "checkpoints" / f"step_{step}").rmdir()
    small.train("observe.tensorboard=true", "train.steps=3", "checkpoint.every=1", "--resume")
    expected, found = rows_of(run), events(run / "tensorboard")
    assert found["reward/mean"] == pytest.approx(expected["reward/mean"], rel=1e-6)
    assert found["time/update"] == pytest.approx(expected["time/update"], rel=1e-6)


@needs("wandb")
def test_wandb_keeps_every_row_offline_and_a_resumed_run_is_the_same_run(
    small: Small, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(small.folder))  # nothing of the user's own settings, and nothing written there
    run = small.train("observe.wandb=offline", "train.steps=1", "checkpoint.every=1", "--json")
    first = (run / "wandb_id").read_text(encoding="ascii")
    small.train("observe.wandb=offline", "train.steps=2", "checkpoint.every=1", "--json", "--resume")
    assert (run / "wandb_id").read_text(encoding="ascii") == first
    out = capfd.readouterr().out.splitlines()
    assert [sorted(json.loads(line)) for line in out] == [["eval_after", "eval_before", "run", "steps"]] * 2
    by_step = {row["step"]: row for row in history(run)}
    for row in metrics(run):
        kept = by_step[row["step"]]
        assert {key: kept[key] for key in row} == row
    assert all(first.strip() in path.name for path in run.glob("wandb/offline-run-*"))


def test_a_profile_is_written_in_the_step_that_asks_for_it(small: Small) -> None:
    run = small.train("observe.profile_steps=[2]", "train.steps=2")
    names = {path.name for path in (run / "profile").iterdir()}
    assert names == {"step_000002_rollout.trace.json.gz", "step_000002_update.trace.json.gz"}
