"""The inner side of the sandbox: `python -I -S sandbox_child.py SPEC_FD REPORT_FD`, with the standard library only.

    launcher    takes namespaces of its own and waits                                      (this file, host's pids)
    └─ init     makes the view of the files, reaps, and says how the program ended         (this file, pid 1 inside)
       └─ program, without capabilities and under its limits                               (exec)

Where there is no process namespace, launcher and init are one process. A program of its own and not a function between
fork and exec of the caller: that must not take locks, and here ctypes is loaded and files are mounted.

SPEC_FD: JSON of a Spec. REPORT_FD: lines of JSON: {"features": […]}, then {"ended": wait status} or {"failed": text}.
"""

import ctypes
import json
import os
import re
import resource
import signal
import sys
from typing import Any, NoReturn, TypedDict

PROCESSES, NETWORK, IPC, FILES = "processes", "network", "ipc", "files"

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_NAMESPACES = {PROCESSES: _CLONE_NEWPID, NETWORK: _CLONE_NEWNET, IPC: _CLONE_NEWIPC, FILES: _CLONE_NEWNS}

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
_NICE = 10
_MAX_OPEN_FILES = 256


class Spec(TypedDict):
    """What to run, and how."""

    command: list[str]
    environment: dict[str, str]
    files: dict[str, str]  # name → text, written into the folder of the program
    features: list[str]  # to be isolated
    probe: bool  # a feature that cannot be had is left out instead of being an error
    folder: str  # of the program; made here where FILES is isolated
    root: str  # where FILES is isolated: the folder above it, which becomes a file system in memory
    hidden: list[str]  # where FILES is isolated: folders that become empty
    memory: int  # bytes
    cpu_seconds: int
    file_bytes: int
    processes: int  # at one time, threads included


class _Libc:
    """System calls that Python 3.11 does not have; each raises OSError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)

    def unshare(self, flags: int) -> None:
        self._check(self._library.unshare(flags), "unshare")

    def prctl(self, option: int, value: int) -> None:
        self._check(self._library.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")

    def mount(self, source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        result = self._library.mount(
            source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
        )
        self._check(result, f"mount {target}")

    def mount_attributes(self, path: str, *, add: int = 0, clear: int = 0, below: bool = False) -> None:
        attributes = (ctypes.c_uint64 * 4)(add, clear, 0, 0)
        result = self._library.syscall(
            ctypes.c_long(_SYS_MOUNT_SETATTR),
            ctypes.c_int(_AT_FDCWD),
            ctypes.c_char_p(path.encode()),
            ctypes.c_uint(_AT_RECURSIVE if below else 0),
            attributes,
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        )
        self._check(result, f"mount_setattr {path}")

    def drop_capabilities(self) -> None:
        for number in range(64):
            if self._library.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) != 0:
                break  # past the last one; or we have none, and then there is nothing to drop
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        self._check(self._library.capset(header, (ctypes.c_uint32 * 6)()), "capset")

    def _check(self, result: int, name: str) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")


def main() -> None:
    """Entry of the launcher."""
    spec_fd, report_fd = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(report_fd, False)
    with open(spec_fd, encoding="utf-8") as stream:
        spec: Spec = json.load(stream)
    linux = sys.platform == "linux"
    try:
        libc = _Libc() if linux else None
        parent_lives = os.pipe()
        features = _unshare(libc, spec) if libc is not None else []
        if libc is not None:
            _die_with_parent(libc)
        if PROCESSES in features:
            init = os.fork()
            if init:
                os.close(report_fd)
                os.close(parent_lives[0])
                os.waitpid(init, 0)  # returns when everything in the namespace has gone
                return
            os.close(parent_lives[1])
        _init(libc, spec, features, report_fd, parent_lives)
    except OSError as error:
        _report(report_fd, failed=str(error))


def _init(
    libc: _Libc | None, spec: Spec, features: list[str], report_fd: int, parent_lives: tuple[int, int]
) -> NoReturn:
    if libc is not None:
        if PROCESSES in features:
            _die_with_parent(libc)
            os.set_blocking(parent_lives[0], False)
            if _at_end(parent_lives[0]):
                os._exit(1)  # it ended before we asked to be told
            _bound_pids(spec["processes"])
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # The program must not reach into us: we have capabilities, and the descriptor of the report.
        libc.prctl(_PR_SET_DUMPABLE, 0)
    if libc is not None and FILES in features:
        try:
            _own_files(libc, spec)
        except OSError:
            if not spec["probe"]:
                raise
            features.remove(FILES)
    _report(report_fd, features=features)
    if spec["probe"] and FILES in spec["features"] and FILES not in features:
        os._exit(0)  # half a view of the files was made: the caller asks again without
    program = os.fork()
    if program == 0:
        _become_program(libc, spec, report_fd)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            _report(report_fd, ended=status)
            os._exit(0)


def _bound_pids(processes: int) -> None:
    """Let the kernel stop a fork loop, where it can: the caller counts only so many times a second, and a loop of
    thousands takes the machine from everybody. Its own pid_max belongs to a process namespace since Linux 6.14; before,
    the file is the machine's. Ids start again at 300, so more than 300 + n can never live.
    """
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release and (int(release[1]), int(release[2])) >= (6, 14):
        with open("/proc/sys/kernel/pid_max", "w", encoding="ascii") as stream:
            stream.write(str(300 + 4 * processes))


def _unshare(libc: _Libc, spec: Spec) -> list[str]:
    """Take the namespaces; returns the features that were had."""
    wanted = [name for name in _NAMESPACES if name in spec["features"]]
    if wanted and os.geteuid() != 0:
        try:
            _own_users(libc)
        except OSError:
            if spec["probe"]:
                return []
            raise
    had: list[str] = []
    for name in wanted:
        if name == FILES and PROCESSES not in had:
            continue  # its /proc would show the processes outside
        try:
            libc.unshare(_NAMESPACES[name])
        except OSError:
            if spec["probe"]:
                continue
            raise
        had.append(name)
    return had


def _own_users(libc: _Libc) -> None:
    """A user namespace, which makes the others possible without privileges; the ids stay what they are."""
    user, group = os.geteuid(), os.getegid()
    libc.unshare(_CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as stream:
            stream.write(text)


def _own_files(libc: _Libc, spec: Spec) -> None:
    """Everything read-only, without devices and without the sockets of /run and /tmp; a folder in memory to write in.

    Nothing of it exists outside: it goes with the last process, however that ends.
    """
    os.chdir("/")
    libc.mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    devices = [path for path in _DEVICES if os.path.exists(path)]
    for path in devices:
        libc.mount(path, path, "", _MS_BIND)
    for path in spec["hidden"]:
        size = spec["file_bytes"] if path == spec["root"] else 4096
        libc.mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},nr_inodes=4096,mode=755")
    # The program is root's equal in file rights where the run is root's: a writable /proc/sys would be the host's.
    libc.mount("proc", "/proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    # No devices: to their owner a disk is writable through its node, read-only mount or not.
    libc.mount_attributes("/", add=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, below=True)
    for path in devices:
        libc.mount_attributes(path, clear=_MOUNT_ATTR_NODEV | _MOUNT_ATTR_RDONLY)
    libc.mount_attributes(spec["root"], clear=_MOUNT_ATTR_RDONLY)
    os.mkdir(spec["folder"], 0o700)


def _become_program(libc: _Libc | None, spec: Spec, report_fd: int) -> NoReturn:
    try:
        if libc is not None:
            _die_with_parent(libc)
        os.chdir(spec["folder"])
        for name, text in spec["files"].items():
            with open(name, "w", encoding="utf-8", errors="surrogatepass") as stream:
                stream.write(text)
        os.nice(_NICE)  # the watcher has to get its turn beside any number of busy processes
        _set_limits(spec)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them, and what is ignored stays so over exec
        if libc is not None:
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1)
            libc.drop_capabilities()
        os.execve(spec["command"][0], spec["command"], spec["environment"])
    except (OSError, ValueError) as error:
        _report(report_fd, failed=f"{spec['command'][0]} cannot be started: {error}")
    os._exit(127)


def _set_limits(spec: Spec) -> None:
    cpu = spec["cpu_seconds"]
    for limit, soft, hard in (
        (resource.RLIMIT_AS, spec["memory"], spec["memory"]),
        (resource.RLIMIT_FSIZE, spec["file_bytes"], spec["file_bytes"]),
        (resource.RLIMIT_CPU, cpu, cpu + 1),  # SIGXCPU, which tells why; then SIGKILL
        (resource.RLIMIT_CORE, 1, 1),  # 0 would not keep a core_pattern that is a pipe from being fed
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES, _MAX_OPEN_FILES),
    ):
        _, ceiling = resource.getrlimit(limit)
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(limit, (soft, hard))


def _die_with_parent(libc: _Libc) -> None:
    # Cleared by a new user namespace, so it comes after.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _at_end(descriptor: int) -> bool:
    try:
        return os.read(descriptor, 1) == b""
    except BlockingIOError:
        return False


def _report(descriptor: int, **entry: Any) -> None:
    os.write(descriptor, (json.dumps(entry) + "\n").encode())


if __name__ == "__main__":
    main()
