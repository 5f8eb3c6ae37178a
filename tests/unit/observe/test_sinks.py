"""Sinks: a fault of theirs never ends a run."""

import resource
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from plimsoll.config.observe import ObserveConfig
from plimsoll.errors import RecipeError
from plimsoll.observe.sinks import Sinks, open_sinks
from tests.extras import needs


class Recorder:
    """A sink that keeps what it gets and can be told to fail."""

    def __init__(self, name: str, *, fails_at: int | None = None, fails_to_close: bool = False) -> None:
        self.name = name
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed: list[bool] = []
        self._fails_at = fails_at
        self._fails_to_close = fails_to_close

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the row."""
        if step == self._fails_at:
            raise OSError("no space left")
        self.rows.append((step, dict(values)))

    def close(self, *, failed: bool) -> None:
        """Keep how it ended."""
        self.closed.append(failed)
        if self._fails_to_close:
            raise ConnectionError("gone")


def test_a_sink_that_fails_is_named_once_and_the_others_go_on() -> None:
    said: list[str] = []
    broken, healthy = Recorder("wandb", fails_at=2), Recorder("tensorboard")
    sinks = Sinks([broken, healthy], said.append)
    for step in (1, 2, 3):
        sinks.write(step, {"loss": float(step)})
    sinks.close(failed=False)
    assert [step for step, _ in broken.rows] == [1]
    assert broken.closed == [False]
    assert healthy.rows == [(1, {"loss": 1.0}), (2, {"loss": 2.0}), (3, {"loss": 3.0})]
    assert healthy.closed == [False]
    assert len(said) == 1
    assert "observe.wandb" in said[0]
    assert "no space left" in said[0]


def test_a_sink_that_cannot_be_closed_does_not_keep_the_others_open() -> None:
    said: list[str] = []
    broken, healthy = Recorder("wandb", fails_to_close=True), Recorder("tensorboard")
    sinks = Sinks([broken, healthy], said.append)
    sinks.close(failed=True)
    sinks.close(failed=True)  # again: nothing
    assert (broken.closed, healthy.closed) == ([True], [True])
    assert len(said) == 1


@contextmanager
def largest_file(size: int) -> Generator[None]:
    """Writing beyond so many bytes fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writing thread
def test_events_that_find_no_space_are_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    before = set(threading.enumerate())
    sinks = Sinks(
        open_sinks(ObserveConfig(tensorboard=True), tmp_path, {"name": "a"}, start_step=0, resumed=False), said.append
    )
    sinks.write(1, {"loss": 1.0})
    (events,) = (tmp_path / "tensorboard").iterdir()
    with largest_file(events.stat().st_size + 20):
        for step in range(2, 6):
            sinks.write(step, {"loss": 1.0})
        sinks.close(failed=False)
    for thread in set(threading.enumerate()) - before:  # its traceback comes at its end, which is to be in this test
        thread.join()
    assert len(said) == 1
    assert said[0].startswith("observe.tensorboard failed at step ")
    assert "File too large" in said[0]


@needs("tensorboard")
def test_a_sink_that_cannot_start_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way", encoding="ascii")
    with pytest.raises(RecipeError, match=r"`observe\.tensorboard=true` could not start \(FileExistsError"):
        open_sinks(ObserveConfig(tensorboard=True), tmp_path, {"name": "a"}, start_step=0, resumed=False)


@needs("wandb")
def test_wandb_online_without_a_login_is_refused_and_offline_is_the_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(RecipeError, match=r"API key.*set `observe\.wandb=offline`"):
        open_sinks(ObserveConfig(wandb="online"), tmp_path, {"name": "a"}, start_step=0, resumed=False)
    first = (tmp_path / "wandb_id").read_text(encoding="ascii")
    sinks = open_sinks(ObserveConfig(wandb="offline"), tmp_path, {"name": "a"}, start_step=0, resumed=False)
    sinks[0].close(failed=False)
    assert (tmp_path / "wandb_id").read_text(encoding="ascii") == first
