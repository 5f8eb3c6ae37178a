"""Run by test_signals.py: a loop under the guard, in a process of its own.

Usage: python -m tests.unit.cluster.looping MODE GRACE FOLDER. Says on stdout where it is; the test sends signals.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.cluster.signals import Interrupted, InterruptGuard

HARD_LIMIT = 0.7


def say(line: str) -> None:
    print(line, flush=True)


def work(seconds: float, guard: InterruptGuard | None = None) -> None:
    """Python that looks busy: short sleeps. With a guard, goes on until a signal was seen and `seconds` after it."""
    while guard is not None and guard.requested is None:
        time.sleep(0.005)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.005)


def save(folder: Path, seconds: float) -> None:
    def write(partial: Path) -> None:
        (partial / "a").write_text("a")
        say("saving")
        work(seconds)
        (partial / "b").write_text("b")

    CheckpointStore(folder, keep=1).save(1, write)
    say("saved")


def hold_the_main_thread() -> None:
    """Like one long call into C++: Python's handlers cannot run, the watchdog's thread can."""
    while True:
        with contextlib.suppress(Interrupted):
            say("holding")
            while True:
                time.sleep(0.01)


def child_sleeps() -> None:
    time.sleep(60)


def end_a_forked_child() -> None:
    child = multiprocessing.get_context("fork").Process(target=child_sleeps)
    child.start()
    time.sleep(0.1)
    child.terminate()
    child.join(timeout=5)
    say(f"child {child.exitcode}")


def run(mode: str, guard: InterruptGuard, folder: Path) -> None:
    say("ready")
    match mode:
        case "step":  # a step that takes 0.3 s after the signal
            work(0.3, guard)
        case "long":  # a step that does not end in time
            work(60, guard)
        case "blocked":  # in a system call that does not return by itself
            os.read(os.pipe()[0], 1)
        case "save":  # the signal comes in the middle of a save
            with guard.saving():
                save(folder, 0.8)
        case "step and save":  # each within the grace, both together not
            work(0.6, guard)
            with guard.saving():
                save(folder, 0.7)
        case "held":
            hold_the_main_thread()
        case "fork":
            end_a_forked_child()
            work(0.0, guard)
        case _:
            raise AssertionError(mode)
    say("finished")
    if guard.requested is not None:
        guard.stop()


def main() -> int:
    mode, grace, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    try:
        with InterruptGuard(grace, hard_limit=HARD_LIMIT) as guard:
            run(mode, guard, folder)
    except Interrupted as interrupted:
        say(str(interrupted))
        after = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
        assert after == before
        return interrupted.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
