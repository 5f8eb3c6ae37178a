"""What the host says: memory of this process, of the node, and the limit that applies. Linux; elsewhere absent.

Anonymous memory is what counts for a plan: file pages are shared with other processes and can be dropped. Memory of
child processes (reward workers) is not in any number here. The sum of a process is read from the kernel's counters,
which lag by some pages per CPU.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SYS_CGROUP = Path("/sys/fs/cgroup")
# cgroup v1 writes "no limit" as the largest multiple of the page size below 2^63; anything near is no limit either.
_NO_LIMIT = 1 << 60


@dataclass(slots=True, kw_only=True, frozen=True)
class HostReading:
    """One reading, bytes; None: the system does not say."""

    anonymous: int | None  # RssAnon
    file: int | None  # RssFile: mapped file pages, shared with others
    shared: int | None  # RssShmem: shared memory; torch's pinned memory is counted here by the kernel
    available: int | None  # what the node, and the cgroup where it has a limit, could still give


class HostReader:
    """Reads /proc and the cgroup of this process. Folders are arguments so that tests can use text of their own."""

    def __init__(self, proc: Path = PROC, cgroup_root: Path = SYS_CGROUP) -> None:
        self._proc = proc
        status = proc / "self" / "status"
        # Held open and read with pread: the text is made anew at every read, and opening costs more than reading.
        self._status = os.open(status, os.O_RDONLY | os.O_CLOEXEC) if status.is_file() else None
        self._cgroup = cgroup_memory(proc, cgroup_root)
        self._oom_files = _oom_files(proc, cgroup_root, self._cgroup)
        total = _kilobytes(_read_text(proc / "meminfo"), "MemTotal")
        self.limit = _smallest(self._cgroup.limit if self._cgroup else None, total)
        """Bytes that this process may use at most: the cgroup's limit or the machine's memory; None: unknown."""

    def anonymous(self) -> int | None:
        """RssAnon now, bytes."""
        return _kilobytes(self._status_text(), "RssAnon")

    def read(self) -> HostReading:
        """Everything now."""
        status = self._status_text()
        node = _kilobytes(_read_text(self._proc / "meminfo"), "MemAvailable")
        return HostReading(
            anonymous=_kilobytes(status, "RssAnon"),
            file=_kilobytes(status, "RssFile"),
            shared=_kilobytes(status, "RssShmem"),
            available=_smallest(node, self._cgroup.available() if self._cgroup else None),
        )

    def processes(self) -> dict[int, int]:
        """VmRSS now, bytes, of this process and of all below it, by process id. Pages that they share count in each."""
        found: dict[int, int] = {}
        waiting = [os.getpid()]
        while waiting:
            pid = waiting.pop()
            size = _kilobytes(_read_text(self._proc / str(pid) / "status"), "VmRSS")
            if size is None or pid in found:
                continue
            found[pid] = size
            for children in (self._proc / str(pid) / "task").glob("*/children"):
                waiting += [int(word) for word in _read_text(children).split()]
        return found

    def oom_kills(self) -> int | None:
        """Processes that the kernel has killed for memory in the cgroup of this process, so far; None: it does not say.

        The count tells a worker that vanished for want of memory from one that crashed.
        """
        for file in self._oom_files:
            for line in _read_text(file).splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.strip().isdigit():
                    return int(value)
        return None

    @property
    def cgroup(self) -> "CgroupMemory | None":
        """The limit that binds; None: there is none."""
        return self._cgroup

    def close(self) -> None:
        """Close the file that is held open; afterwards the process's numbers are absent."""
        if self._status is not None:
            os.close(self._status)
            self._status = None

    def _status_text(self) -> str:
        return "" if self._status is None else os.pread(self._status, 8192, 0).decode("ascii", "replace")


@dataclass(slots=True, kw_only=True, frozen=True)
class CgroupMemory:
    """The memory controller that binds tightest on this process."""

    folder: Path
    limit: int  # bytes
    usage_file: str
    inactive_key: str  # file pages in memory.stat that the kernel would drop first

    def available(self) -> int | None:
        """Limit minus what is used, without file pages that can be dropped; None: not readable."""
        used = _read_text(self.folder / self.usage_file).strip()
        if not used.isdigit():
            return None
        inactive = 0
        for line in _read_text(self.folder / "memory.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == self.inactive_key:
                inactive = int(value)
        return max(0, self.limit - max(0, int(used) - inactive))


def cgroup_memory(proc: Path = PROC, cgroup_root: Path = SYS_CGROUP) -> CgroupMemory | None:
    """The smallest memory limit among the cgroup of this process and those above it, v1 or v2; None: no limit.

    In a container the path in /proc/self/cgroup may be the one outside, which does not exist inside; then only the
    folders that do exist count, up to the root of the mount, which is the container's own group.
    """
    tightest: CgroupMemory | None = None
    for line in _read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases, names = (cgroup_root, cgroup_root / "unified"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            bases, names = (
                (cgroup_root / "memory",),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        for base in bases:
            leaf = base / path.lstrip("/")
            for folder in (leaf, *leaf.parents):
                if not folder.is_relative_to(base):
                    break
                text = _read_text(folder / names[0]).strip()  # "max" is no limit in v2
                limit = int(text) if text.isdigit() else _NO_LIMIT
                if limit < _NO_LIMIT and (tightest is None or limit < tightest.limit):
                    tightest = CgroupMemory(folder=folder, limit=limit, usage_file=names[1], inactive_key=names[2])
    return tightest


def _oom_files(proc: Path, cgroup_root: Path, limited: CgroupMemory | None) -> list[Path]:
    """Files that may hold the count of kills: of the group with the limit first, else of the process's own or of the
    mount's root, which inside a container is the container's group. v2 counts the groups below with each group."""
    folders = [limited.folder] if limited else []
    for line in _read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base = cgroup_root if controllers == "" else cgroup_root / "memory"
        folders += [base / path.lstrip("/"), base]
    return [folder / name for folder in folders for name in ("memory.events", "memory.oom_control")]


class PeakSampler:
    """Keeps the highest reading between `begin` and `end`, taken by one daemon thread that sleeps in between.

    What comes and goes within one interval, or while C code holds the interpreter lock, is not seen.
    """

    def __init__(self, read: Callable[[], int | None], interval: float) -> None:
        self._read = read
        self._interval = interval  # seconds
        self._changed = threading.Condition()
        self._active = self._closed = False
        self._peak: int | None = None
        self._thread = threading.Thread(target=self._run, name="plimsoll-memory-sampler", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Forget the last peak and start sampling."""
        with self._changed:
            self._peak = self._read()
            self._active = True
            self._changed.notify()

    def end(self) -> int | None:
        """Take a last reading, stop sampling, return the peak; None: the system does not say."""
        with self._changed:
            self._sample()
            self._active = False
            return self._peak

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _sample(self) -> None:
        value = self._read()
        if value is not None and (self._peak is None or value > self._peak):
            self._peak = value

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._active:
                    self._changed.wait()
                    continue
                self._sample()
                self._changed.wait(self._interval)


def _read_text(path: Path) -> str:
    """The text of a kernel file; empty where it is absent or may not be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _kilobytes(text: str, key: str) -> int | None:
    """Bytes of the line `KEY:   123 kB`; None: there is no such line."""
    start = text.find(f"\n{key}:") + 1 if not text.startswith(f"{key}:") else 0
    if not text.startswith(f"{key}:", start):
        return None
    return int(text[start + len(key) + 1 :].split(None, 1)[0]) * 1024


def _smallest(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None
