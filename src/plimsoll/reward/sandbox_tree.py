"""The processes of a program: what they use together, and their end.

The kernel's own limits do not serve here: RLIMIT_NPROC counts all processes of a user and none of root's, RLIMIT_AS is
for one process, and a cgroup of one's own is rarely to be had. So they are looked at, many times a second.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_END_SECONDS = 10.0
"""Longest that the end of everything is waited for: on a busy machine a few hundred processes take their time."""

_STEP_SECONDS = 0.005
_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
"""A kernel may be built without; then all processes of the machine are gone through."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Usage:
    """Of a tree of processes."""

    threads: int  # at least one a process
    memory: int  # bytes: anonymous and shared memory. Pages that a fork has not written yet count for both


def tree_usage(launcher: int, *, contained: bool, max_threads: int) -> Usage:
    """Of the program that `launcher` started, now; `contained`: there is an init between them.

    Stops counting when there are more than `max_threads`: a fork loop may grow faster than one counts.
    Processes are counted everywhere, threads and memory where there is /proc.
    """
    threads = memory = 0
    pending = list(children(launcher))
    if contained:
        pending = [pid for init in pending for pid in children(init)]
    while pending and threads <= max_threads:
        pid = pending.pop()
        fields = _status(pid)
        threads += int(fields.get("Threads", "1"))
        memory += 1024 * sum(int(fields.get(name, "0").split()[0]) for name in ("RssAnon", "RssShmem"))
        pending += children(pid)
    return Usage(threads=threads, memory=memory)


def children(pid: int) -> frozenset[int]:
    """Process ids; none when it has gone."""
    found: set[int] = set()
    if not _LISTS_CHILDREN:
        with suppress(psutil.NoSuchProcess):
            found.update(child.pid for child in psutil.Process(pid).children())
        return frozenset(found)
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                found.update(map(int, (thread / "children").read_text().split()))
    return frozenset(found)


def end_tree(process: "subprocess.Popen[bytes]", *, others: frozenset[int], contained: bool) -> None:
    """End the launcher `process` and everything below it, and reap it.

    `contained`: everything else is in a namespace, which goes with its init. Otherwise `others` are the children that
    this process has besides; what is not among them was left to us by the program, where orphans come to us.
    """
    if contained:
        _end_namespace(process)
        return
    # The group at once: no fork escapes that, while one looking through a fork loop never comes to its end. What has
    # left the group is handed on to us when its parents have gone.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + _END_SECONDS
    while (left := children(os.getpid()) - others) and time.monotonic() < deadline:
        for child in left:
            _kill_and_reap(child)
        time.sleep(_STEP_SECONDS / 10)


def adopt_orphans() -> None:
    """From now on a process below this one whose parent ends becomes its child. Workers of the pool are so anyway."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_and_reap(child: int) -> None:
    with suppress(ProcessLookupError):
        if (group := os.getpgid(child)) != os.getpgid(0):
            os.killpg(group, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)  # it has its SIGKILL


def _end_namespace(process: "subprocess.Popen[bytes]") -> None:
    """Init first: the launcher is gone only when everything in the namespace is, and nobody is left for us to reap."""
    deadline = time.monotonic() + _END_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        for init in children(process.pid):
            with suppress(ProcessLookupError):
                os.kill(init, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STEP_SECONDS)
        if process.returncode is None and not children(process.pid):
            process.kill()  # it has not come so far as to have an init
    if process.returncode is None:
        process.kill()
        process.wait()


def _status(pid: int) -> dict[str, str]:
    """The lines of /proc/PID/status; empty when it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)
