"""Signals to a loop in a process of its own: finished, abandoned, ended; with which exit code, and how soon."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGTERM, SIGUSR1, Signals

import pytest

from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.cluster.signals import Interrupted, InterruptGuard

LONG = 30.0  # a grace that no test waits for


@dataclass
class Loop:
    """The process under test."""

    process: subprocess.Popen[str]

    def wait_for(self, line: str) -> None:
        assert self.process.stdout is not None
        for got in self.process.stdout:
            if got.strip() == line:
                return
        pytest.fail(f"{line!r} never came: {self.process.stderr.read() if self.process.stderr else ''}")

    def send(self, *signals: Signals) -> float:
        """Send with a pause between two, as a person does; returns the time of the last."""
        for i, signum in enumerate(signals):
            if i:
                time.sleep(0.15)
            self.process.send_signal(signum)
        return time.monotonic()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=10)
        return self.process.returncode, out, err


@contextmanager
def loop(mode: str, grace: float, folder: Path = Path("/nowhere")) -> Iterator[Loop]:
    command = [sys.executable, "-m", "tests.unit.cluster.looping", mode, str(grace), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            started = Loop(process)
            started.wait_for("ready")
            yield started
        finally:
            process.kill()


@pytest.mark.parametrize(("signum", "code"), [(SIGINT, 130), (SIGTERM, 143), (SIGUSR1, 143)])
def test_the_first_signal_lets_the_step_finish(signum: Signals, code: int) -> None:
    with loop("step", LONG) as started:
        started.send(signum)
        returned, out, err = started.end()

    assert returned == code
    assert "finished" in out
    assert f"interrupted by {signum.name}: the step was finished" in out
    assert err.count("finishing the step, then saving") == 1


@pytest.mark.parametrize("first", [SIGINT, SIGTERM, SIGUSR1])
def test_ctrl_c_after_a_signal_abandons_the_step_at_once(first: Signals) -> None:
    with loop("long", LONG) as started:
        sent = started.send(first, SIGINT)
        returned, out, _ = started.end()
        took = time.monotonic() - sent

    assert returned == (130 if first == SIGINT else 143)
    assert took < 3
    assert "the step in work was abandoned (Ctrl-C)" in out
    assert "finished" not in out.split()


def test_a_repeated_sigterm_changes_nothing() -> None:
    with loop("step", LONG) as started:
        started.send(SIGTERM, SIGTERM, SIGUSR1)
        returned, out, _ = started.end()

    assert returned == 143
    assert "the step was finished" in out


@pytest.mark.parametrize("mode", ["long", "blocked"])
@pytest.mark.parametrize(("signum", "code"), [(SIGINT, 130), (SIGUSR1, 143)])
def test_a_step_that_outlasts_the_grace_is_abandoned(mode: str, signum: Signals, code: int) -> None:
    with loop(mode, 0.4) as started:
        sent = started.send(signum)
        returned, out, err = started.end()
        took = time.monotonic() - sent

    assert returned == code
    assert 0.4 <= took < 3
    assert "checkpoint.grace (0.4 s) is over" in out
    assert "abandoning the step" in err


@pytest.mark.parametrize("signals", [(SIGTERM,), (SIGINT, SIGINT)])
def test_a_process_that_does_not_react_is_ended(signals: tuple[Signals, ...]) -> None:
    with loop("held", 0.3) as started:
        sent = started.send(*signals)
        returned, out, err = started.end()
        took = time.monotonic() - sent

    assert returned == (143 if SIGTERM in signals else 130)
    assert took < 4
    assert "interrupted by" not in out
    assert "ending it" in err


def test_a_signal_during_a_save_lets_the_save_finish(tmp_path: Path) -> None:
    with loop("save", LONG, tmp_path) as started:
        started.wait_for("saving")
        started.send(SIGTERM)
        returned, out, _ = started.end()

    assert returned == 143
    assert "saved" in out
    assert "the step was finished" in out
    assert CheckpointStore(tmp_path, keep=1).newest().step == 1


def test_a_save_has_a_grace_of_its_own(tmp_path: Path) -> None:
    with loop("step and save", 1.0, tmp_path) as started:
        sent = started.send(SIGTERM)
        returned, out, _ = started.end()
        took = time.monotonic() - sent

    assert returned == 143
    assert took > 1.0
    assert "the step was finished" in out
    assert CheckpointStore(tmp_path, keep=1).newest().step == 1


@pytest.mark.parametrize(("grace", "signals"), [(0.3, (SIGTERM,)), (LONG, (SIGINT, SIGINT))])
def test_an_abandoned_save_leaves_nothing_partial(tmp_path: Path, grace: float, signals: tuple[Signals, ...]) -> None:
    with loop("save", grace, tmp_path) as started:
        started.wait_for("saving")
        started.send(*signals)
        returned, out, _ = started.end()

    assert returned in (130, 143)
    assert "abandoned" in out
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_can_be_ended_and_its_signals_are_not_ours() -> None:
    with loop("fork", LONG) as started:
        started.wait_for(f"child {-SIGTERM}")
        time.sleep(0.1)
        assert started.process.poll() is None
        started.send(SIGINT)
        returned, _, err = started.end()

    assert returned == 130
    assert "SIGTERM" not in err


def test_without_a_signal_everything_is_as_before() -> None:
    before = [signal.getsignal(signum) for signum in (SIGINT, SIGTERM, SIGUSR1)]
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        with InterruptGuard(1.0) as guard, guard.saving():
            assert guard.requested is None

    assert [signal.getsignal(signum) for signum in (SIGINT, SIGTERM, SIGUSR1)] == before
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)
    assert signal.set_wakeup_fd(-1) == -1


def test_the_request_is_seen_by_the_next_statement(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Interrupted) as stopped, InterruptGuard(LONG) as guard:  # noqa: PT012
        signal.raise_signal(SIGUSR1)
        assert guard.requested == SIGUSR1
        guard.stop()

    assert (stopped.value.exit_code, stopped.value.abandoned) == (143, False)


def test_a_failure_passes_through_and_the_handlers_go_back() -> None:
    before = signal.getsignal(SIGTERM)
    with pytest.raises(ValueError, match="of the loop"), InterruptGuard(LONG):
        raise ValueError("of the loop")
    assert signal.getsignal(SIGTERM) == before


def test_an_interruption_is_no_exception_that_a_broad_except_could_take_for_a_failure() -> None:
    assert not issubclass(Interrupted, Exception)
