"""Running a program that nobody has read, under limits, with nothing left afterwards.

What the kernel allows is used: with namespaces (root, or unprivileged user namespaces) the program sees no other
processes, no network, and files that it can only read, besides a folder in memory. `isolation` says what there is.
sandbox_child.py is the inner side; sandbox_tree.py looks at the processes and ends them.
"""

import fcntl
import json
import math
import os
import selectors
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal, cast

from plimsoll.reward import sandbox_child
from plimsoll.reward.sandbox_tree import adopt_orphans, children, end_tree, tree_usage

Status = Literal["ok", "error", "timeout", "memory", "output", "processes", "files"]

FEATURES = frozenset({sandbox_child.PROCESSES, sandbox_child.NETWORK, sandbox_child.IPC, sandbox_child.FILES})
"""processes: sees and signals only its own, which all end with it. network: none, not even 127.0.0.1. ipc: System V
memory and queues of its own. files: everything read-only, /run and temporary folders empty, one folder in memory."""

PYTHON = (sys.executable, "-s", "-P", "-B", "-X", "utf8")
"""The run's own interpreter with the packages of its environment. Not -I: that would ignore PYTHONHASHSEED, and a
program that prints a set would be right by chance; the environment is made from nothing, so there is nothing to ignore.
"""

_HIDDEN = ("/tmp", "/var/tmp", "/run", "/dev/shm")
"""Temporary files and sockets of others. The first of them that can be hidden holds the program's folder."""

_TICK_SECONDS = 0.02
_FOLDER_TICK_SECONDS = 0.2
_PROBE_SECONDS = 20.0
_PREFIX = "plimsoll-program-"
_STALE_SECONDS = 60.0
_CHUNK = 65536
_BLOCK = 4096


class SandboxError(RuntimeError):
    """A program could not be started at all; nothing is known about it."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Limits:
    """Of one program with all its processes, where nothing else is said."""

    seconds: float = 5.0  # by the clock
    cpu_seconds: float | None = None  # of each process; None: as `seconds`. Rounded up to whole seconds
    memory: int = 512 * 2**20  # bytes; of each process's address space too
    output: int = 65536  # bytes of stdout and stderr together
    processes: int = 16  # and threads
    file_bytes: int = 16 * 2**20  # of all files where "files" is isolated, also of each file


@dataclass(slots=True, kw_only=True, frozen=True)
class Result:
    """How a program ended. `status` other than "ok" and "error" is the limit that ended it; "ok" is exit code 0."""

    status: Status
    exit_code: int | None  # negative: the signal; None: it was ended before, or what started it was killed
    stdout: bytes
    stderr: bytes
    seconds: float


@lru_cache(maxsize=1)
def isolation() -> frozenset[str]:
    """Which of FEATURES this machine allows; tried once a process, by starting a program.

    Raises SandboxError when a program cannot be started at all.
    """
    remove_stale()
    command = [*PYTHON, "-c", ""]
    features = FEATURES if sys.platform == "linux" else frozenset[str]()
    if not _hidden():
        features -= {sandbox_child.FILES}  # nowhere to put the program's folder
    had = _probe(command, features)
    ended = _run(command, b"", Limits(seconds=_PROBE_SECONDS), {}, had)
    if ended.status != "ok":
        raise SandboxError(f"an empty program ended with {ended.status} in the sandbox: {ended.stderr.decode()}")
    return had


def run_program(
    command: Sequence[str],
    *,
    stdin: str = "",
    limits: Limits | None = None,
    files: Mapping[str, str] | None = None,
    features: frozenset[str] | None = None,
) -> Result:
    """Run `command` (an absolute path and its arguments) in a folder of its own, in which `files` are (name → text).

    Returns within `limits.seconds` and the time that ending everything takes, well below 2 s. `features` narrows what
    is isolated, by default `isolation()`. Raises SandboxError when it cannot be started.
    Call it on the main thread: what it runs is killed when the calling thread ends.
    """
    features = isolation() if features is None else features
    assert features <= FEATURES
    return _run(command, stdin.encode("utf-8", "surrogatepass"), limits or Limits(), files or {}, features)


def _probe(command: Sequence[str], features: frozenset[str]) -> frozenset[str]:
    _, report = _execute(command, b"", Limits(seconds=_PROBE_SECONDS), {}, features, probe=True)
    return frozenset(next((entry["features"] for entry in report if "features" in entry), ()))


def _run(
    command: Sequence[str], stdin: bytes, limits: Limits, files: Mapping[str, str], features: frozenset[str]
) -> Result:
    run, report = _execute(command, stdin, limits, files, features)
    ended: int | None = None
    for entry in report:
        if "failed" in entry:
            raise SandboxError(f"the sandbox cannot start the program: {entry['failed']}")
        if "ended" in entry:
            ended = os.waitstatus_to_exitcode(int(entry["ended"]))
    return run.result(ended)


@dataclass(slots=True, kw_only=True)
class _Run:
    """A program that is running: reads what it prints and watches its limits."""

    process: subprocess.Popen[bytes]
    limits: Limits
    folder: Path | None  # on disk; None where it is in memory, which has its own limit
    contained: bool  # in a process namespace
    begin: float = field(default_factory=time.monotonic)
    broken: Status | None = None  # limit that was
    output: dict[int, bytearray] = field(default_factory=dict[int, bytearray])
    seconds: float = 0.0

    def follow(self) -> None:
        """Until it has ended or breaks a limit."""
        streams = (self.process.stdout, self.process.stderr)
        next_look = next_folder = self.begin
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                self.output[stream.fileno()] = bytearray()
                selector.register(stream, selectors.EVENT_READ)
            while self.broken is None:
                ended = self.process.poll() is not None  # before the last reading, not after
                self._wait(selector)
                now = time.monotonic()
                if self.broken is not None or ended:
                    break
                if now >= self.begin + self.limits.seconds:
                    self.broken = "timeout"
                elif now >= next_look:
                    self._look()
                    next_look = time.monotonic() + _TICK_SECONDS
                if self.folder is not None and now >= next_folder:
                    if _folder_bytes(self.folder) > self.limits.file_bytes:
                        self.broken = "files"
                    next_folder = time.monotonic() + _FOLDER_TICK_SECONDS
        self.seconds = time.monotonic() - self.begin

    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Read what is there, or wait for it until the next look at the processes."""
        if not selector.get_map():
            # It closed both and goes on; its end is seen by poll.
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_TICK_SECONDS / 2)
            return
        timeout = 0.0 if self.process.returncode is not None else _TICK_SECONDS / 2
        while ready := selector.select(timeout):
            for key, _ in ready:
                room = self.limits.output - sum(map(len, self.output.values()))
                data = os.read(key.fd, min(_CHUNK, room + 1))
                if not data:
                    selector.unregister(key.fileobj)
                self.output[key.fd] += data[:room]
                if len(data) > room:
                    self.broken = "output"
                    return
            if self.process.returncode is None or not selector.get_map():
                return

    def _look(self) -> None:
        usage = tree_usage(self.process.pid, contained=self.contained, max_threads=self.limits.processes)
        if usage.threads > self.limits.processes:
            self.broken = "processes"
        elif usage.memory > self.limits.memory:
            self.broken = "memory"

    def close(self) -> None:
        """Our ends of its pipes."""
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def result(self, ended: int | None) -> Result:
        """With the exit code of the program."""
        stdout, stderr = (bytes(data) for data in self.output.values())
        return Result(
            status=self.broken or _status(ended, stderr),
            exit_code=None if self.broken else ended,
            stdout=stdout,
            stderr=stderr,
            seconds=self.seconds,
        )


def _status(ended: int | None, stderr: bytes) -> Status:
    if ended == 0:
        return "ok"
    if ended == -signal.SIGXCPU:
        return "timeout"
    if ended == -signal.SIGXFSZ:
        return "files"
    lines = stderr.rstrip().rsplit(b"\n", 1)
    # The address space ended it before the watcher did. A program can say so without reason; it has failed anyway.
    return "memory" if lines[-1].startswith(b"MemoryError") else "error"


def _execute(
    command: Sequence[str],
    stdin: bytes,
    limits: Limits,
    files: Mapping[str, str],
    features: frozenset[str],
    *,
    probe: bool = False,
) -> tuple[_Run, list[dict[str, Any]]]:
    """Run it to its end, or end it with all that it started; returns what the inner side reported, too."""
    with _folder(features) as folder, _file(stdin) as given, _file(b"") as reporting:
        spec = _spec(command, limits, files, features, folder, probe)
        with _file(json.dumps(spec).encode()) as described:
            descriptors = (described.fileno(), reporting.fileno())
            contained = sandbox_child.PROCESSES in features
            if not contained:
                adopt_orphans()
            others = children(os.getpid())
            run = _Run(
                process=subprocess.Popen(
                    [sys.executable, "-I", "-S", sandbox_child.__file__, *map(str, descriptors)],
                    pass_fds=descriptors,
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=_environment("/"),
                    start_new_session=True,
                ),
                limits=limits,
                folder=folder,
                contained=contained,
            )
            try:
                run.follow()
            finally:
                end_tree(run.process, others=others, contained=contained)
                run.close()
        reporting.seek(0)
        return run, [cast("dict[str, Any]", json.loads(line)) for line in reporting.read().splitlines()]


def _spec(
    command: Sequence[str],
    limits: Limits,
    files: Mapping[str, str],
    features: frozenset[str],
    folder: Path | None,
    probe: bool,
) -> sandbox_child.Spec:
    hidden = _hidden() if folder is None else []
    root = hidden[0] if hidden else ""
    work = str(folder) if folder is not None else f"{root}/program"
    return sandbox_child.Spec(
        command=list(command),
        environment=_environment(work),
        files=dict(files),
        features=sorted(features),
        probe=probe,
        folder=work,
        root=root,
        hidden=hidden,
        memory=limits.memory,
        cpu_seconds=math.ceil(limits.seconds if limits.cpu_seconds is None else limits.cpu_seconds),
        file_bytes=limits.file_bytes,
        processes=limits.processes,
    )


def _environment(folder: str) -> dict[str, str]:
    """Made from nothing: no keys and tokens, no proxies, no PYTHONPATH."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the order of a set is the same every time
        **{
            name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ
        },  # the interpreter may need it
        **one_thread,  # numpy's libraries start a thread a core, and take address space for each
    }


@lru_cache(maxsize=1)
def _hidden() -> list[str]:
    """Those of _HIDDEN that exist and in which the interpreter and its packages are not."""
    needed = [os.path.realpath(path) for path in (sys.executable, sys.prefix, sys.base_prefix, *site.getsitepackages())]
    needed += [os.path.abspath(path) for path in (sys.executable, sys.prefix)]
    folders = dict.fromkeys(os.path.realpath(path) for path in _HIDDEN if os.path.isdir(path))
    return [folder for folder in folders if not any(path.startswith(f"{folder}/") for path in needed)]


@contextmanager
def _folder(features: frozenset[str]) -> Generator[Path | None]:
    """The program's folder on disk; None where it is in memory."""
    if sandbox_child.FILES in features:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # until we end, in whatever way: see remove_stale
        (folder / "program").mkdir(0o700)
        yield folder / "program"
    finally:
        os.close(descriptor)
        _remove(folder)


def _remove(folder: Path) -> None:
    """Whatever is in it: without rights, or nested deeper than Python goes."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False)


def remove_stale() -> None:
    """Folders of those that were killed before they could remove them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _STALE_SECONDS:
                continue  # perhaps being made: it is locked a moment later
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            finally:
                os.close(descriptor)
            _remove(folder)


@contextmanager
def _file(content: bytes) -> Generator[IO[bytes]]:
    """A file without a name: nothing to remove, and unlike a pipe it takes everything without a reader."""
    with tempfile.TemporaryFile() as stream:
        stream.write(content)
        stream.seek(0)
        yield stream


def _folder_bytes(folder: Path) -> int:
    """Of the files below it, as far as can be seen, and a block for each entry."""
    total = 0
    pending = [str(folder)]  # not os.walk, which recurses
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                total += _BLOCK
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        total += 512 * entry.stat(follow_symlinks=False).st_blocks
    return total
