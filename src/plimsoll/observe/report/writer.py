"""Writes the page while a run goes on: in a process of its own, of which the run never waits and never fails."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from plimsoll.observe.report.page import temporary_of

PAGE = "report.html"
_MAX_SHARE = 0.1
"""Of the time, in which a page may be being written: that of a very long run takes many seconds."""


class ReportWriter:
    """RUN/report.html, at most every `interval` seconds, for at most a tenth of the time, by one process at once.

    `say` gets a sentence for the user when the page could not be written, once a run.
    """

    def __init__(
        self,
        run: Path,
        interval: float,
        say: Callable[[str], None],
        *,
        wait_running: float = 30.0,
        wait_last: float = 60.0,
    ) -> None:
        self._run = run
        self._interval = interval
        self._say = say
        self._wait_running, self._wait_last = wait_running, wait_last
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._started_at: float | None = None
        self._started_on_clock = 0.0
        self._took = 0.0  # seconds of the last writing
        self._failed = False
        self._poked = False
        self._closed = False

    def poke(self) -> None:
        """Called after each step: start a writing if it is time for one. Returns at once and raises nothing."""
        self._poked = True
        if self._closed or not self._reap():
            return
        pause = max(self._interval, self._took / _MAX_SHARE)
        if self._started_at is None or time.monotonic() - self._started_at >= pause:
            self._start(ended=False)

    def close(self) -> None:
        """Write the page of the whole run; waits for it, but not without end. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._wait(self._wait_running)
            self._start(ended=True)
            self._wait(self._wait_last)
        finally:  # an interrupt while waiting: no process stays behind
            self._kill()

    def _start(self, *, ended: bool) -> None:
        # In a session of its own: Ctrl-C on the terminal is for the run. -P: a json.py in the working folder is not
        # taken for a library. Errors go to a file, since nobody empties a pipe while the run goes on.
        command = [
            sys.executable,
            "-P",
            "-m",
            "plimsoll.observe.report",
            str(self._run),
            *(["--ended"] if ended else []),
        ]
        self._started_at, self._started_on_clock = time.monotonic(), time.time()
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._fail(f"no process for it could be started ({error})")
            self._forget()

    def _reap(self) -> bool:
        """True when no writing is going on; the one that has ended is taken off the process table."""
        if self._process is None:
            return True
        code = self._process.poll()
        if code is None:
            return False
        if code == 0:
            # By the file, not by now: the next step may be long after the end of the writing.
            with suppress(OSError):  # somebody has moved the page away
                self._took = max(0.0, (self._run / PAGE).stat().st_mtime - self._started_on_clock)
        else:
            self._fail(self._reason(code))
        self._forget()
        return True

    def _wait(self, seconds: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._fail(f"its writing took longer than {seconds:.0f} seconds and was ended")
            self._kill()
        self._reap()

    def _kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            temporary_of(self._run / PAGE, self._process.pid).unlink()
        self._forget()

    def _forget(self) -> None:
        if self._errors is not None:
            self._errors.close()
        self._process = self._errors = None

    def _reason(self, code: int) -> str:
        text = ""
        if self._errors is not None:
            self._errors.seek(0)
            text = self._errors.read().decode("utf-8", "replace").strip()
        return text.splitlines()[-1] if text else f"exit code {code}"

    def _fail(self, reason: str) -> None:
        if not self._failed and self._poked:  # a run without a step may have nothing to show
            self._failed = True
            self._say(
                f"the report page was not written: {reason}. The run goes on; `plimsoll report {self._run}` writes it "
                f"at any time, observe.report=false leaves it out."
            )
