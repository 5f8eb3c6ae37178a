"""Ending a worker with everything that it started, also when the driver is killed.

The guard is a small process beside the workers that waits for the end of its standard input. The kernel closes that
pipe however the driver ends (SIGKILL included), and then the guard kills what is left. A parent-death signal
(PR_SET_PDEATHSIG) would not do: it fires when the *thread* that started the worker ends, and rounds of scoring run in
threads that come and go; it also leaves the worker's own children alive.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

_ROUNDS = 50
"""How often a tree is looked through before its root is killed anyway: a fork bomb must not hold us up for ever."""


def kill_tree(pid: int) -> set[int]:
    """SIGKILL for a worker, its process group and all its descendants; returns the descendants' ids.

    The worker is stopped first, so that it starts nothing while we look. Its descendants go before it does: while it
    lives, orphans among them are its children (it is a subreaper, see worker.py), so a process that left the group
    by setsid, or whose parent has ended, is found too. Does not reap.
    """
    descendants: set[int] = set()
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        root.suspend()
        for _ in range(_ROUNDS):
            found = root.children(recursive=True)
            descendants |= {child.pid for child in found}
            if not _kill(found):
                break
            time.sleep(0.002)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return descendants


def _kill(processes: Iterable[psutil.Process]) -> bool:
    """True when one of them was still running."""
    running = False
    for process in processes:
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                running = True
                process.kill()
    return running


def main() -> None:
    """Read `+PID` and `-PID` lines until the input ends, then kill what was not taken back."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a scheduler may signal every process of a job, the guard included
    watched: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        if line.startswith("+"):
            watched.add(pid)
        else:
            watched.discard(pid)
    for pid in watched:
        kill_tree(pid)
