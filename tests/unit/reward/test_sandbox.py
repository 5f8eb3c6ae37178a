"""Programs that do what nobody should: each ends in time, with its status, and with nothing left."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from plimsoll.reward.sandbox import PYTHON, Limits, Result, _hidden, isolation, remove_stale, run_program
from plimsoll.reward.sandbox_child import FILES, NETWORK, PROCESSES
from tests.processes import children_left

SECONDS = 1.0
BARE: frozenset[str] = frozenset()


@pytest.fixture(params=["isolated", "bare"])
def features(request: pytest.FixtureRequest) -> frozenset[str]:
    """What this machine allows, and nothing."""
    return isolation() if request.param == "isolated" else BARE


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    isolation()
    mark, folders, memory = time.time(), left_folders(), psutil.Process().memory_info().rss
    before = {process.pid for process in psutil.process_iter()}
    yield
    assert left_folders() == folders
    assert psutil.Process().memory_info().rss - memory < 64 * 2**20
    left = [p for p in psutil.process_iter() if p.pid not in before and p.create_time() >= mark - 1 and is_program(p)]
    assert [(p, p.ppid(), p.cmdline()) for p in left] == []
    assert children_left() == []


def left_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"plimsoll-program-{os.getpid()}-*"))


def is_program(process: psutil.Process) -> bool:
    """A zombie counts, too."""
    try:
        return "program.py" in process.cmdline() or any("sandbox_child" in word for word in process.cmdline())
    except psutil.Error:
        return False


def run(source: str, features: frozenset[str], *, stdin: str = "", **limits: float) -> Result:
    begin = time.monotonic()
    result = run_program(
        [*PYTHON, "program.py"],
        stdin=stdin,
        files={"program.py": textwrap.dedent(source)},
        limits=Limits(**({"seconds": SECONDS} | limits)),  # pyright: ignore[reportArgumentType]
        features=features,
    )
    assert time.monotonic() - begin < limits.get("seconds", SECONDS) + 2.0
    return result


def test_an_ordinary_program_reads_prints_and_ends(features: frozenset[str]) -> None:
    source = """
        import sys
        from pathlib import Path
        Path("note").write_text("kept")
        print(input()[::-1], Path("note").read_text())
        print("warning", file=sys.stderr)
        sys.exit(int(sys.stdin.read()))
    """
    result = run(source, features, stdin="añb\n3")
    assert (result.status, result.exit_code) == ("error", 3)
    assert (result.stdout.decode(), result.stderr) == ("bña kept\n", b"warning\n")
    assert run("pass", features).status == "ok"


@pytest.mark.parametrize("stream", [1, 2])
def test_output_without_end(features: frozenset[str], stream: int) -> None:
    result = run(f"import os\nwhile True: os.write({stream}, b'x' * 100000)", features, output=100_000, seconds=3.0)
    assert result.status == "output"
    assert len(result.stdout) + len(result.stderr) == 100_000


def test_fork_loop(features: frozenset[str]) -> None:
    assert run("import os\nwhile True: os.fork()", features).status == "processes"


def test_forks_that_leave_by_setsid_and_lose_their_parents(features: frozenset[str]) -> None:
    source = """
        import os
        while True:
            if os.fork():
                os._exit(0)
            os.setsid()
    """
    # In the bare case our first one ends, and with it the run: what is left is found as orphans of ours.
    result = run(source, features)
    assert (result.status, result.exit_code) == ("ok", 0)


def test_thread_loop(features: frozenset[str]) -> None:
    source = """
        import threading, time
        threading.stack_size(65536)
        while True:
            threading.Thread(target=time.sleep, args=(60,)).start()
    """
    assert run(source, features).status == "processes"


def test_10_gib_at_once(features: frozenset[str]) -> None:
    result = run("x = bytearray(10 << 30)", features, memory=200 * 2**20)
    assert (result.status, result.exit_code) == ("memory", 1)


def test_memory_of_all_processes_together(features: frozenset[str]) -> None:
    source = """
        import os, time
        for _ in range(3):
            os.fork()
        x = bytearray(os.urandom(1 << 20)) * 60
        time.sleep(60)
    """
    assert run(source, features, memory=200 * 2**20, seconds=3.0).status == "memory"


def test_network_connection_to_a_listener_here(features: frozenset[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 1)"
        result = run(source, features)
        if NETWORK in features:
            assert (result.status, result.exit_code) == ("error", 1)
            with pytest.raises(TimeoutError):
                listener.accept()
        else:
            assert result.status == "ok"
            listener.accept()[0].close()


def test_program_that_deletes_its_folder_and_one_without_rights(features: frozenset[str]) -> None:
    source = """
        import os, shutil
        {}
        print("done")
    """
    for body in ("shutil.rmtree(os.getcwd())", "os.makedirs('a/b'); os.chmod('a', 0); os.chmod('.', 0)"):
        result = run(source.format(body), features)
        assert (result.status, result.stdout) == ("ok", b"done\n")


def test_folders_nested_deeper_than_python_goes(features: frozenset[str]) -> None:
    source = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\nprint('done')"
    assert run(source, features, seconds=3.0).stdout == b"done\n"


def test_daemon_in_a_session_of_its_own_that_holds_the_pipes(features: frozenset[str]) -> None:
    source = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            time.sleep(600)
        os.wait()
        print("done")
    """
    result = run(source, features, seconds=5.0)
    assert (result.status, result.stdout) == ("ok", b"done\n")
    assert result.seconds < 2.0


def test_ignored_sigterm_closed_output_and_sleep(features: frozenset[str]) -> None:
    source = """
        import os, signal, time
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
            signal.signal(number, signal.SIG_IGN)
        os.close(1); os.close(2)
        time.sleep(600)
    """
    result = run(source, features, seconds=0.5)
    assert (result.status, result.exit_code) == ("timeout", None)


def test_busy_program_ends_by_its_processor_time(features: frozenset[str]) -> None:
    result = run("while True: pass", features, seconds=4.0, cpu_seconds=1.0)
    assert result.status == "timeout"
    assert result.seconds < 4.0


def test_standard_input_ends(features: frozenset[str]) -> None:
    source = "import sys\nwhile True:\n    if not sys.stdin.read(1): break\nprint('end')"
    assert run(source, features, stdin="abc").stdout == b"end\n"
    assert run("import sys\nwhile True: sys.stdin.read()", features, seconds=0.5).status == "timeout"


def test_one_file_without_end_and_many(features: frozenset[str]) -> None:
    one = "f = open('f', 'wb', buffering=0)\nwhile True: f.write(b'x' * 100000)"
    assert run(one, features, file_bytes=2**20).status == "error"
    many = """
        i = 0
        while True:
            i += 1
            with open(str(i), "wb") as f:
                f.write(b"x" * 100000)
    """
    result = run(many, features, file_bytes=2**20, seconds=3.0)
    assert result.status == ("error" if FILES in features else "files")


def test_program_that_kills_its_parent(features: frozenset[str]) -> None:
    source = """
        import os, time
        os.kill(os.getppid(), 9)
        time.sleep(0.3)
        print("alive")
    """
    result = run(source, features)
    if PROCESSES in features:  # the parent is the namespace's init, which its own processes cannot kill
        assert (result.status, result.stdout) == ("ok", b"alive\n")
    else:
        assert (result.status, result.exit_code) == ("error", None)


def test_program_that_kills_all_that_it_may(features: frozenset[str]) -> None:
    if PROCESSES not in features:
        pytest.skip("it would reach the processes outside")
    source = """
        import os
        for pid in (-1, 1):
            try:
                os.kill(pid, 9)
            except OSError:
                pass
        print("alive")
    """
    assert run(source, features).stdout == b"alive\n"


def test_environment_descriptors_and_rights_are_few(
    features: frozenset[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("API_KEY", "HTTPS_PROXY", "PYTHONPATH", "PYTHONSTARTUP"):
        monkeypatch.setenv(name, "secret")
    (tmp_path / "open").touch()
    source = """
        import os, sys
        print(sorted(os.environ))
        print(sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1])
        status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
        print(status["CapEff"], status["CapPrm"], status["NoNewPrivs"])
        print(os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"])
        import numpy
    """
    with open(tmp_path / "open") as stream:
        os.set_inheritable(stream.fileno(), True)
        result = run(source, features, seconds=5.0)
    assert result.status == "ok", result.stderr
    names, descriptors, rights, folders = result.stdout.decode().splitlines()
    assert not any(word in names for word in ("KEY", "PROXY", "PYTHONPATH", "PYTHONSTARTUP"))
    assert descriptors == "[0, 1, 2]"
    assert rights == "0000000000000000 0000000000000000 1"
    assert folders == "True"


def test_files_of_the_machine_cannot_be_written_and_sockets_not_reached(tmp_path: Path) -> None:
    if FILES not in isolation():
        pytest.skip("this kernel allows no view of the files of its own")
    target = Path.cwd() / "written-by-a-program"
    source = f"""
        import glob, os, socket, stat
        def refused(action):
            try:
                action()
            except OSError:
                return True
        harmless = ["/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero"]
        kinds = (stat.S_IFCHR, stat.S_IFBLK)
        nodes = [d for d in sorted(glob.glob("/dev/*")) if stat.S_IFMT(os.stat(d).st_mode) in kinds]
        usable = [d for d in nodes if not refused(lambda: os.open(d, os.O_NONBLOCK))]
        print(refused(lambda: open({str(target)!r}, "w")))
        print(refused(lambda: open("/proc/sys/kernel/core_pattern", "w")))
        print(usable == harmless)
        print(refused(lambda: open("/proc/1/mem", "rb")), refused(lambda: open("/proc/1/environ").read()))
        print(refused(lambda: socket.socket(socket.AF_UNIX).connect({str(tmp_path / "s")!r})))
        print(os.listdir("/tmp"), os.listdir("/run"))
        open("/dev/null", "w").write("x"); open("/dev/urandom", "rb").read(1)
    """
    if "/tmp" not in _hidden():  # the interpreter is there
        pytest.skip("the virtual environment lies in /tmp, which can then not be hidden")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        result = run(source, isolation())
    assert result.status == "ok", result.stderr
    assert result.stdout.decode().split() == ["True"] * 6 + ["['program']", "[]"]
    assert not target.exists()


@pytest.mark.parametrize("isolated", [True, False])
def test_nothing_is_left_when_the_caller_is_killed(isolated: bool) -> None:
    caller = f"""
        from plimsoll.reward.sandbox import *
        features = isolation() if {isolated} else frozenset()
        print("ready", flush=True)
        run_program([*PYTHON, "-c", "import os, time; os.fork(); time.sleep(600)", "program.py"],
                    limits=Limits(seconds=60.0), features=features)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(caller)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        wait_for(lambda: len(programs()) == 2)
        process.kill()
    if not isolated:
        # The first process goes by its parent-death signal. The others go with the worker in the pool (guard.py).
        wait_for(lambda: len(programs()) == 1)
        programs()[0].kill()
        (folder,) = Path(tempfile.gettempdir()).glob(f"plimsoll-program-{process.pid}-*")
        remove_stale()
        assert folder.exists()  # too young: it might be somebody's who has not locked it yet
        os.utime(folder, (0, 0))
        remove_stale()
        assert not folder.exists()
    wait_for(lambda: not programs())
    for child in children_left():  # orphans that came to us
        child.wait(5)


def programs() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.cmdline()[-1:] == ["program.py"] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
