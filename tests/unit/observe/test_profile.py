"""Profiles: of the phases asked for, with the operations that ran in them."""

import gzip
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from plimsoll.config.observe import ObserveConfig
from plimsoll.observe.profile import Profiler


def operations(trace: Path) -> set[str]:
    """Names of the events in a trace."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_only_the_named_phases_of_the_named_steps_are_profiled(tmp_path: Path) -> None:
    said: list[str] = []
    config = ObserveConfig(profile_steps=(2,), profile_phases=("update",))
    profiler = Profiler(config, tmp_path / "profile", None, said.append)
    for step in (1, 2):
        with profiler.phase(step, "rollout"):
            torch.ones(4).cumsum(0)
        with profiler.phase(step, "update"):
            torch.ones(4, 4) @ torch.ones(4, 4)
    traces = list((tmp_path / "profile").iterdir())
    assert [trace.name for trace in traces] == ["step_000002_update.trace.json.gz"]
    names = operations(traces[0])
    assert "aten::mm" in names
    assert "aten::cumsum" not in names
    assert len(said) == 1


def test_a_phase_that_comes_twice_in_a_step_has_two_traces(tmp_path: Path) -> None:
    profiler = Profiler(ObserveConfig(profile_steps=(1,), profile_phases=("sync",)), tmp_path, None, print)
    for _ in range(2):
        with profiler.phase(1, "sync"):
            torch.ones(2).sum()
    assert {path.name for path in tmp_path.iterdir()} == {
        "step_000001_sync.trace.json.gz",
        "step_000001_sync_2.trace.json.gz",
    }


def test_nothing_is_written_for_a_phase_that_fails_and_its_error_goes_on(tmp_path: Path) -> None:
    profiler = Profiler(ObserveConfig(profile_steps=(1,)), tmp_path, None, print)
    with pytest.raises(ValueError, match="inside"), profiler.phase(1, "update"):
        raise ValueError("inside")
    assert list(tmp_path.iterdir()) == []


def test_the_allocations_of_a_profiled_phase_are_recorded_where_there_is_a_recorder(tmp_path: Path) -> None:
    recorded: list[str] = []

    @contextmanager
    def record(path: Path) -> Generator[None]:
        yield
        recorded.append(path.name)

    config = ObserveConfig(profile_steps=(1,), profile_memory=True)
    profiler = Profiler(config, tmp_path, record, print)
    with profiler.phase(1, "update"):
        torch.ones(2).sum()
    assert recorded == ["step_000001_update.memory.pickle"]


def test_a_memory_snapshot_on_a_cpu_run_is_said_to_do_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    Profiler(ObserveConfig(profile_steps=(1,), profile_memory=True), tmp_path, None, said.append)
    assert "observe.profile_memory" in said[0]


def test_a_trace_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    profiler = Profiler(ObserveConfig(profile_steps=(1,)), tmp_path, None, said.append)
    (tmp_path / "step_000001_update.trace.json.gz").mkdir()  # taken, so the next name is used
    (tmp_path / "step_000001_update_2.trace.json.gz").symlink_to(tmp_path / "nowhere" / "file")
    with profiler.phase(1, "update"):
        torch.ones(2).sum()
    assert "could not be written" in said[0]


@pytest.mark.parametrize("fails", ["at the start", "at the end"])
def test_a_memory_snapshot_that_fails_is_said_and_the_phase_goes_on(tmp_path: Path, fails: str) -> None:
    said: list[str] = []

    @contextmanager
    def record(path: Path) -> Generator[None]:
        if fails == "at the start":
            raise RuntimeError("not with this allocator")
        yield
        path.write_bytes(b"half")
        raise OSError("no space left")

    config = ObserveConfig(profile_steps=(1,), profile_memory=True)
    done = False
    with Profiler(config, tmp_path, record, said.append).phase(1, "update"):
        done = True
    assert done
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001_update.trace.json.gz"]
    assert "step_000001_update.memory.pickle could not be written" in said[0]


def test_a_folder_that_cannot_be_made_costs_the_profile_and_not_the_phase(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "profile").write_text("in the way", encoding="ascii")
    done = False
    with Profiler(ObserveConfig(profile_steps=(1,)), tmp_path / "profile", None, said.append).phase(1, "update"):
        done = True
    assert done
    assert len(said) == 1


def test_an_error_of_a_phase_ends_the_recording_of_memory_and_goes_on(tmp_path: Path) -> None:
    ended: list[str] = []

    @contextmanager
    def record(path: Path) -> Generator[None]:
        try:
            yield
        finally:
            ended.append(path.name)

    config = ObserveConfig(profile_steps=(1,), profile_memory=True)
    with pytest.raises(RuntimeError, match="inside"), Profiler(config, tmp_path, record, print).phase(1, "update"):
        raise RuntimeError("inside")
    assert ended == ["step_000001_update.memory.pickle"]
