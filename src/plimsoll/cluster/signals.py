"""Ctrl-C, SIGTERM, SIGUSR1: the step is finished and saved, or abandoned within a limit.

    first signal                 `requested` is set, one line on stderr; the loop finishes its step, saves, stops
    second Ctrl-C, or no time    `Interrupted` is raised in the main thread, wherever it is: the step is abandoned
    still not out 10 s later     the process ends without the main thread's help

What is on disk does not depend on any of it: checkpoints are complete or absent, so SIGKILL is survived too.

Python runs a signal's handler in the main thread, between two bytecodes: while that thread is inside one long call into
C++ (a matrix product, a collective that waits for a dead peer) no handler runs. The interpreter's C part however writes
the signal's number to the wake-up descriptor at once, so a thread that reads it keeps the time. No torch here.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

HARD_LIMIT = 10.0
"""Seconds that the main thread may take to get out once a step is abandoned, or after a save that took long."""

_ECHO = 0.05  # seconds: a launcher may pass on the Ctrl-C that the terminal has sent us too; that is not a second one
_POLL = 0.25  # seconds between two looks at a deadline that a save may have moved
_LEAVE = 0  # wake-up byte of __exit__; no signal has this number


class Interrupted(BaseException):
    """The run was asked to stop. Not an Exception, so that no `except Exception` on the way takes it for a failure.

    Attributes:
        signum: the first signal.
        abandoned: True when a step or a save was cut off; False when the loop stopped by itself.
        exit_code: 130 for Ctrl-C, 143 for SIGTERM and SIGUSR1.
    """

    def __init__(self, signum: signal.Signals, *, abandoned: bool, reason: str = "") -> None:
        self.signum = signum
        self.abandoned = abandoned
        self.exit_code = exit_code_of(signum)
        how = "the step in work was abandoned" if abandoned else "the step was finished"
        super().__init__(f"interrupted by {signum.name}: {how}" + (f" ({reason})" if reason else ""))


def exit_code_of(signum: signal.Signals) -> int:
    """130 for SIGINT, 143 for SIGTERM and for SIGUSR1, with which Slurm announces the SIGTERM to come."""
    return 130 if signum == signal.SIGINT else 143


class InterruptGuard:
    """Holds the handlers of SIGINT, SIGTERM and SIGUSR1 while the loop runs. Main thread only, one at a time.

        with InterruptGuard(recipe.checkpoint.grace) as guard:
            for step in steps:
                ...
                if due or guard.requested:
                    with guard.saving():
                        store.save(step, write)
                if guard.requested:
                    guard.stop()

    Forked children get the former handlers back at once, so they can be ended as usual.

    Args:
        grace_seconds: time from the first signal until the step is abandoned.
        hard_limit: seconds from then until the process is ended.
    """

    def __init__(self, grace_seconds: float, *, hard_limit: float = HARD_LIMIT) -> None:
        self._grace = grace_seconds
        self._hard_limit = hard_limit
        self._requested: signal.Signals | None = None
        self._not_before = 0.0  # monotonic seconds; the grace does not end earlier
        self._reason = ""  # why the watchdog abandons the step; empty: it does not
        self._raised = False
        self._closed = False
        self._old_handlers: dict[signal.Signals, Any] = {}  # Any: what signal.getsignal returns
        self._old_wakeup = -1
        self._reader = self._writer = -1
        self._watchdog = threading.Thread(target=self._watch, name="plimsoll-signals", daemon=True)

    @property
    def requested(self) -> signal.Signals | None:
        """The first signal that came; None: go on."""
        return self._requested

    def stop(self) -> NoReturn:
        """Leave the loop after a finished step: raises Interrupted with the right exit code."""
        assert self._requested is not None
        raise Interrupted(self._requested, abandoned=False)

    @contextmanager
    def saving(self) -> Generator[None, None, None]:
        """A save gets a grace period of its own from here on: what was computed in time is not thrown away."""
        self._not_before = time.monotonic() + self._grace
        try:
            yield
        finally:
            self._not_before = time.monotonic() + self._hard_limit

    def __enter__(self) -> "InterruptGuard":
        global _active
        assert threading.current_thread() is threading.main_thread(), "handlers can be set in the main thread only"
        assert _active is None, "one guard at a time"
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # required by set_wakeup_fd: the C handler must never wait
        self._watchdog.start()
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in SIGNALS:
            self._old_handlers[signum] = signal.signal(signum, self._handle)
        _active = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _active
        self._closed = True  # first: from here on `_handle` raises nothing, whatever the watchdog has decided
        os.write(self._writer, bytes([_LEAVE]))
        self._watchdog.join()
        self._restore()
        os.close(self._writer)
        os.close(self._reader)
        _active = None

    def _restore(self) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        for signum, old in self._old_handlers.items():
            # None: installed by C code, which Python can neither name nor put back.
            signal.signal(signum, signal.SIG_DFL if old is None else old)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """In the main thread. What to do is decided by the watchdog, which also sends the signal that abandons."""
        if self._closed:
            return
        if self._requested is None:
            self._requested = signal.Signals(signum)
        if self._reason and not self._raised:
            self._raised = True  # only once: what cleans up on the way out must not be torn as well
            raise Interrupted(self._requested, abandoned=True, reason=self._reason)

    def _watch(self) -> None:
        """In the watchdog's thread: from the first signal to the end."""
        first = self._next_signal(None)
        if first is None:
            return
        asked_at = time.monotonic()
        self._requested = self._requested or first
        again = "again" if first == signal.SIGINT else "Ctrl-C"
        limit = f"the step is abandoned after {self._grace:g} s"
        _tell(f"{first.name}: finishing the step, then saving; {again} to stop at once ({limit})")
        reason = self._wait_for_reason(asked_at)
        if reason is None:
            return
        _tell(f"abandoning the step: {reason}; the newest complete checkpoint is kept")
        self._reason = reason
        give_up = time.monotonic() + self._hard_limit
        main = threading.main_thread().ident
        assert main is not None
        # A real signal, not `_thread.interrupt_main`: it also ends a system call that waits.
        signal.pthread_kill(main, self._requested)
        while (left := give_up - time.monotonic()) > 0:
            if self._left(left):
                return
        _end_process(self._requested, self._hard_limit)

    def _wait_for_reason(self, asked_at: float) -> str | None:
        """Why the step must be abandoned; None: the guard was left before."""
        while True:
            now = time.monotonic()
            deadline = max(asked_at + self._grace, self._not_before)
            if now >= deadline:
                return f"checkpoint.grace ({self._grace:g} s) is over"
            if not self._readable(min(_POLL, deadline - now)):
                continue
            number = self._read()
            if number == _LEAVE:
                return None
            # A second SIGTERM or SIGUSR1 changes nothing: schedulers repeat themselves.
            if number == signal.SIGINT and time.monotonic() - asked_at > _ECHO:
                return "Ctrl-C"

    def _next_signal(self, timeout: float | None) -> signal.Signals | None:
        """The next of our signals; None: the guard was left."""
        while self._readable(timeout):
            number = self._read()
            if number == _LEAVE:
                return None
            if number in SIGNALS:  # others with a handler in Python wake us too
                return signal.Signals(number)
        return None

    def _left(self, timeout: float) -> bool:
        return self._readable(timeout) and self._read() == _LEAVE

    def _readable(self, timeout: float | None) -> bool:
        return bool(select.select([self._reader], [], [], timeout)[0])

    def _read(self) -> int:
        return os.read(self._reader, 1)[0]


def _tell(line: str) -> None:
    """One line on stderr, past Python's buffers: the main thread may be stopped in the middle of a write of its own."""
    try:
        os.write(2, f"\n{line}\n".encode())
    except OSError:
        return  # Ctrl-C also ended the `tee` that read our stderr; nobody is left to be told, and the save goes on


def _end_process(signum: signal.Signals, hard_limit: float) -> NoReturn:
    """End without the main thread, which is held in a call that does not return."""
    _tell(f"the process did not stop within {hard_limit:g} s; ending it. The newest complete checkpoint is kept")
    # In a thread: the main thread may hold the lock of a stream whose reader has stopped reading.
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(timeout=1.0)
    os._exit(exit_code_of(signum))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


_active: InterruptGuard | None = None


def _reset_in_child() -> None:
    """A forked child would swallow SIGTERM, and write its own signals into our pipe."""
    global _active
    if _active is not None:
        _active._restore()  # pyright: ignore[reportPrivateUsage]
        _active = None


os.register_at_fork(after_in_child=_reset_in_child)
