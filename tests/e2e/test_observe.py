"""What a run sends to TensorBoard and wandb and what it profiles, against metrics.jsonl."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll.observe.metrics import without_times
from tests.e2e.small import Small, environment, metrics
from tests.extras import needs
from tests.processes import children_left


def events(folder: Path) -> dict[str, dict[int, float]]:
    """Scalars as TensorBoard shows them, each step once: key → step → value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    found: dict[str, dict[int, float]] = {}
    for tag in accumulator.Tags()["scalars"]:
        shown = accumulator.Scalars(tag)
        found[tag] = {event.step: event.value for event in shown}
        assert len(found[tag]) == len(shown), f"{tag}: a step twice"
    return found


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


def wandb_records(run: Path, kind: str) -> Iterator[Any]:
    """What wandb keeps of a kind in the files of offline runs."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == kind:
                yield getattr(record, kind)


def history(run: Path) -> list[dict[str, Any]]:
    """Rows that wandb keeps."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.item}
        for record in wandb_records(run, "history")
    ]


@needs("tensorboard")
def test_tensorboard_has_every_number_of_every_row(small: Small) -> None:
    run = small.train("observe.tensorboard=true", "train.steps=2")
    expected, found = rows_of(run), events(run / "tensorboard")
    assert set(found) == set(expected)
    for key, by_step in expected.items():
        assert found[key] == pytest.approx(by_step, rel=1e-6), key  # events hold float32


@needs("tensorboard")
def test_steps_that_a_resumed_run_does_again_replace_the_earlier_ones(small: Small) -> None:
    asked = ("observe.tensorboard=true", "train.steps=3", "checkpoint.every=1", "checkpoint.keep=null")
    run = small.train(*asked)
    for step in (2, 3):  # as if the run had been killed after step 1
        shutil.rmtree(run / "checkpoints" / f"step_{step}")
    assert (run / "checkpoints" / "step_1").is_dir()
    small.train(*asked, "--resume")
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
    assert children_left() == []  # wandb runs a process of its own
    assert [record.exit_code for record in wandb_records(run, "exit")] == [0, 0]
    small.train("observe.wandb=offline", "train.steps=1", "--overwrite")
    assert (run / "wandb_id").read_text(encoding="ascii") != first


@needs("wandb")
@needs("tensorboard")
def test_what_watches_a_run_does_not_change_it(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(small.folder))
    plain = small.train("name=plain")
    watched = small.train(
        "name=watched",
        "observe.wandb=offline",
        "observe.tensorboard=true",
        "observe.report=true",
        "observe.profile_steps=[1]",
    )
    assert [without_times(row) for row in metrics(plain)] == [without_times(row) for row in metrics(watched)]
    assert (watched / "report.html").stat().st_size > 100_000
    assert {path.name for path in plain.iterdir()} < {path.name for path in watched.iterdir()}


def test_a_profile_is_written_in_the_step_that_asks_for_it(small: Small) -> None:
    run = small.train("observe.profile_steps=[2]", "train.steps=2")
    names = {path.name for path in (run / "profile").iterdir()}
    assert names == {"step_000002_rollout.trace.json.gz", "step_000002_update.trace.json.gz"}


def test_steps_that_this_run_does_not_do_are_said(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    run = small.train("observe.profile_steps=[1, 7]", "observe.console=plain", "data.eval=null", "train.steps=1")
    assert "observe.profile_steps: [7] are not profiled; this run goes from step 0 to 1" in capfd.readouterr().err
    assert {path.name[:11] for path in (run / "profile").iterdir()} == {"step_000001"}


@needs("wandb")
@needs("tensorboard")
def test_ctrl_c_leaves_events_offline_run_and_report_complete(small: Small) -> None:
    """On a terminal Ctrl-C goes to every process of the group, to wandb's too."""
    asked = ("observe.wandb=offline", "observe.tensorboard=true", "observe.report=true", "train.steps=100000")
    command = [sys.executable, "-m", "plimsoll", "train", *small.arguments([*asked, "data.eval=null"])]
    run = small.runs / "rl"
    with subprocess.Popen(
        command,
        env={**environment(), "HOME": str(small.folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        deadline = time.monotonic() + 80
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), said
    assert "did not end well" not in said
    rows = metrics(run)
    assert [row["step"] for row in history(run)] == [row["step"] for row in rows]
    assert [record.exit_code for record in wandb_records(run, "exit")] == [1]
    assert events(run / "tensorboard")["loss"] == pytest.approx({row["step"]: row["loss"] for row in rows}, rel=1e-6)
    assert (run / "report.html").stat().st_mtime >= (run / "metrics.jsonl").stat().st_mtime
