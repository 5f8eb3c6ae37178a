"""The driver's ends of the worker processes and of their guard.

Plain subprocesses, not multiprocessing's: spawn and forkserver import the driver's main module again in every worker
(a script without a main guard then starts itself anew, one that imports torch makes every worker import it) and leave
a resource tracker or a server running behind the pool.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from plimsoll.reward.compose import RewardSpec
from plimsoll.reward.guard import kill_tree

_START_SECONDS = 30.0
_REAP_SECONDS = 5.0
_STDERR = 2

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from plimsoll.reward.{0} import main; main()"
"""With -P: otherwise the current folder comes first, and a user's `types.py` there takes the place of the library's."""


def start_limit(timeout: float) -> float:
    """Seconds that the import of a reward function may take."""
    return max(_START_SECONDS, timeout)


def _command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", _BOOT.format(module), *arguments, json.dumps(sys.path)]


class Guard:
    """Kills the processes it watches when this process ends in whatever way (see guard.py)."""

    def __init__(self) -> None:
        self._watched: set[int] = set()
        self._process = self._start()

    def watch(self, pid: int) -> None:
        """From now on."""
        self._watched.add(pid)
        self._tell(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """The process has been reaped; its id may soon be another's."""
        self._watched.discard(pid)
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Ends the guard, and with it what it still watches."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_REAP_SECONDS)

    def _start(self) -> subprocess.Popen[bytes]:
        command = _command("guard")
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=_STDERR, start_new_session=True)

    def _tell(self, line: str) -> None:
        try:
            self._write(line)
        except OSError:  # somebody killed it: a new one takes over
            self.close()
            self._process = self._start()
            self._write("".join(f"+{pid}\n" for pid in sorted(self._watched)))

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()


class WorkerProcess:
    """One worker, leader of a session of its own: Ctrl-C in the terminal reaches the driver only.

    What it prints goes to stderr; the driver's stdout belongs to the driver.
    """

    def __init__(self, spec: RewardSpec, guard: Guard | None) -> None:
        connection, remote = Pipe()
        self.connection: Connection[Any, Any] = connection
        self._process = subprocess.Popen(
            _command("worker", str(remote.fileno())),
            pass_fds=[remote.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            start_new_session=True,
        )
        remote.close()
        self._guard = guard
        if guard is not None:
            guard.watch(self.pid)
        with suppress(OSError):  # it has died already: whoever waits for it sees that
            self.connection.send(spec)

    @property
    def pid(self) -> int:
        """Process id, and id of its group and session."""
        return self._process.pid

    @property
    def dead(self) -> bool:
        """It has ended by itself. Does not reap: until then its id cannot be reused, and its group can be killed."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._process.returncode is not None or os.waitid(os.P_PID, self.pid, flags) is not None

    def end(self) -> str:
        """Kill it with all its descendants, reap it, and say how it ended ("exit code 3", "signal SIGSEGV")."""
        if self._process.returncode is None:
            descendants = kill_tree(self.pid)
            self._process.wait(_REAP_SECONDS)  # before its children: those that it leaves come to us, if at all, now
            for pid in descendants:
                # Orphans come to us where the driver is the init process of a container.
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if self._guard is not None:
                self._guard.forget(self.pid)
        self.connection.close()
        code = self._process.wait(_REAP_SECONDS)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
