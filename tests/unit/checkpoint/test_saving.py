"""Saves that go on while training does: waiting, publishing, failing, being dropped."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from plimsoll.checkpoint.saving import TrainingSaver
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.errors import CheckpointError
from tests.unit.checkpoint.states import training_state

PATIENCE = 20.0  # seconds; nothing here takes as long unless it hangs


class Writer:
    """Reads when it may read, writes when it may write."""

    def __init__(self, folder: Path, *, held: bool = False, fails: bool = False) -> None:
        self.tensors_read = threading.Event()
        self.plan = "the same on every rank"
        self.may_read, self.may_write = threading.Event(), threading.Event()
        if not held:
            self.may_read.set()
            self.may_write.set()
        self.fails = fails
        self.stopped = False
        self.path = folder / "model" / "weights.bin"

    def run(self) -> None:
        assert self.may_read.wait(PATIENCE)
        self.tensors_read.set()
        assert self.may_write.wait(PATIENCE)
        if not self.stopped and not self.fails:
            self.path.write_text("weights")

    def stop(self) -> None:
        self.stopped = True
        self.may_read.set()
        self.may_write.set()

    def check(self) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")


class Saves:
    """A saver that keeps its writers."""

    def __init__(self, folder: Path) -> None:
        self.store = CheckpointStore(folder, keep=2)
        self.saver = TrainingSaver(self.store)
        self.writers: list[Writer] = []

    def save(self, step: int, *, background: bool = True, held: bool = False, fails: bool = False) -> Writer:
        def prepare(folder: Path) -> Writer:
            self.writers.append(Writer(folder, held=held, fails=fails))
            return self.writers[-1]

        self.saver.save(training_state(step=step), prepare, background=background)
        return self.writers[-1]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.store.folder.iterdir())


@pytest.fixture
def saves(tmp_path: Path) -> Saves:
    return Saves(tmp_path / "checkpoints")


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    result: list[object] = []
    thread = threading.Thread(target=lambda: result.append(work()), daemon=True)
    thread.start()
    return thread, result


def test_in_the_foreground_it_is_published_when_save_returns(saves: Saves) -> None:
    saves.save(4, background=False)

    assert saves.store.complete_steps() == [4]
    assert saves.saver.saving is None
    assert saves.saver.finish() is None


def test_in_the_background_it_counts_only_once_it_is_published(saves: Saves) -> None:
    saves.save(2, background=False)
    writer = saves.save(4, held=True)
    assert saves.saver.saving == 4
    assert saves.saver.publish_written() is None
    assert saves.store.newest().step == 2

    waits, _ = in_thread(saves.saver.wait_read)
    waits.join(0.1)
    assert waits.is_alive()
    writer.may_read.set()
    waits.join(PATIENCE)
    assert not waits.is_alive()

    assert saves.saver.publish_written() is None  # read, but not written
    writer.may_write.set()
    assert saves.saver.finish() == saves.store.path_of(4)
    assert saves.store.complete_steps() == [2, 4]
    saves.saver.wait_read()  # nothing to wait for


def test_a_border_publishes_what_is_written(saves: Saves) -> None:
    writer = saves.save(4)
    for thread in threading.enumerate():
        if thread.name == "plimsoll-save":
            thread.join(PATIENCE)

    assert writer.tensors_read.is_set()
    assert saves.saver.publish_written() == saves.store.path_of(4)
    assert saves.saver.saving is None


def test_the_next_save_publishes_the_one_before_it_first(saves: Saves) -> None:
    saves.save(2)
    saves.save(4)
    assert saves.store.complete_steps() == [2]
    saves.saver.finish()
    assert saves.store.complete_steps() == [2, 4]


@pytest.mark.parametrize("border", ["finish", "publish_written", "save"])
def test_a_save_that_failed_is_an_error_at_the_border_and_leaves_the_older_one(saves: Saves, border: str) -> None:
    saves.save(2, background=False)
    saves.save(4, fails=True)
    for thread in threading.enumerate():
        if thread.name == "plimsoll-save":
            thread.join(PATIENCE)

    with pytest.raises(CheckpointError) as failed:
        {
            "finish": saves.saver.finish,
            "publish_written": saves.saver.publish_written,
            "save": lambda: saves.save(6),
        }[border]()

    for fact in ("step 4", "No space left on device", "step 2 is kept", "checkpoint.keep"):
        assert fact in str(failed.value)
    assert saves.names() == ["step_2"]
    saves.save(6, background=False)
    assert saves.store.complete_steps() == [2, 6]


def test_preparing_may_fail_too(saves: Saves) -> None:
    def prepare(folder: Path) -> Writer:
        raise PermissionError(13, "Permission denied", str(folder))

    with pytest.raises(CheckpointError, match="Permission denied"):
        saves.saver.save(training_state(step=2), prepare, background=True)
    assert saves.names() == []
    saves.save(4, background=False)
    assert saves.names() == ["step_4"]


def test_a_dropped_save_stops_its_writer_and_leaves_nothing(saves: Saves) -> None:
    writer = saves.save(4, held=True)
    saves.saver.abort()

    assert writer.stopped
    assert saves.names() == []
    assert not writer.path.exists()
    saves.saver.abort()


def test_a_run_that_has_failed_still_publishes_what_it_was_writing(saves: Saves) -> None:
    assert saves.saver.salvage() is None
    saves.save(2, background=False)
    saves.save(4)

    assert "step 4" in str(saves.saver.salvage())
    assert saves.store.complete_steps() == [2, 4]
    assert saves.saver.saving is None


def test_a_save_that_fails_too_is_said_and_does_not_hide_why_the_run_has_failed(saves: Saves) -> None:
    saves.save(2, background=False)
    saves.save(4, fails=True)

    said = saves.saver.salvage()  # raises nothing

    for fact in ("step 4", "No space left on device", "step 2 is kept", "checkpoint.keep"):
        assert fact in str(said)
    assert saves.names() == ["step_2"]


def test_an_interrupt_while_it_waits_stops_the_writer_and_stays_an_interrupt(
    saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = saves.save(4, held=True)
    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saves.saver.finish()

    assert writer.stopped
    assert saves.names() == []
