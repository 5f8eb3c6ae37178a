"""Host memory: kernel texts of v1 and v2, absent values, and the peak inside a phase."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from plimsoll.memory.host import HostReader, PeakSampler, cgroup_memory

STATUS = """Name:\tpython
VmHWM:\t  999999 kB
VmRSS:\t  300000 kB
RssAnon:\t  200000 kB
RssFile:\t   90000 kB
RssShmem:\t   10000 kB
Threads:\t5
"""
MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "proc" / "self" / "status").write_text(STATUS)
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    return tmp_path


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def reader(machine: Path) -> HostReader:
    return HostReader(machine / "proc", machine / "cgroup")


def test_status_and_meminfo_are_read_in_bytes(machine: Path) -> None:
    host = reader(machine)
    reading = host.read()
    host.close()
    assert (reading.anonymous, reading.file, reading.shared) == (200000 * 1024, 90000 * 1024, 10000 * 1024)
    assert reading.available == 8000000 * 1024
    assert host.limit == 16000000 * 1024


def test_v2_takes_the_tightest_limit_on_the_way_up(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/slurm/job7/step0\n")
    put(machine / "cgroup/slurm/job7/step0", memory__max="max\n", memory__current="100\n")
    put(
        machine / "cgroup/slurm/job7",
        memory__max="4000000000\n",
        memory__current="1500000000\n",
        memory__stat="anon 900000000\ninactive_file 500000000\nactive_file 3\n",
    )
    put(machine / "cgroup/slurm", memory__max="9000000000\n")
    host = reader(machine)
    assert host.limit == 4000000000
    assert host.read().available == 3000000000  # limit - (used - file pages that can go)
    host.close()


def test_v1_limit_and_its_value_for_no_limit(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    put(machine / "cgroup/memory/docker/abc", memory__limit_in_bytes="9223372036854771712\n")
    put(machine / "cgroup/memory", memory__limit_in_bytes="9223372036854771712\n")
    assert cgroup_memory(machine / "proc", machine / "cgroup") is None
    put(
        machine / "cgroup/memory/docker/abc",
        memory__limit_in_bytes="2000000000\n",
        memory__usage_in_bytes="700000000\n",
        memory__stat="inactive_file 1\ntotal_inactive_file 200000000\n",
    )
    host = reader(machine)
    assert host.limit == 2000000000
    assert host.read().available == 1500000000
    host.close()


def test_a_container_that_does_not_see_its_path_reads_the_root_of_the_mount(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/kubepods/pod1/container2\n")
    put(machine / "cgroup", memory__max="3000000000\n", memory__current="1000000000\n")
    found = cgroup_memory(machine / "proc", machine / "cgroup")
    assert found is not None
    assert found.limit == 3000000000
    assert found.available() == 2000000000


def test_where_there_is_no_proc_the_values_are_absent(tmp_path: Path) -> None:
    host = HostReader(tmp_path / "proc", tmp_path / "cgroup")
    reading = host.read()
    assert (reading.anonymous, reading.file, reading.shared, reading.available) == (None, None, None, None)
    assert host.limit is None
    assert host.anonymous() is None
    sampler = PeakSampler(host.anonymous, 0.001)
    sampler.begin()
    assert sampler.end() is None
    sampler.close()


def test_this_machine_says_something_sensible() -> None:
    host = HostReader()
    before = host.anonymous()
    assert before is not None
    block = np.ones(64 * 1024**2, dtype=np.uint8)
    during = host.anonymous()
    assert during is not None
    assert during - before >= 60 * 1024**2
    assert block[-1] == 1
    reading = host.read()
    assert reading.available is not None
    assert host.limit is not None
    assert 0 < reading.available <= host.limit
    host.close()


def test_the_sampler_sees_a_peak_that_is_gone_at_the_end() -> None:
    value = 10
    sampler = PeakSampler(lambda: value, 0.001)
    sampler.begin()
    value = 50
    deadline = time.monotonic() + 10
    while sampler._peak != 50 and time.monotonic() < deadline:
        time.sleep(0.001)
    value = 20
    assert sampler.end() == 50
    sampler.begin()  # a new phase forgets it
    assert sampler.end() == 20
    sampler.close()


def test_the_sampler_rests_between_phases_and_one_thread_serves_them_all() -> None:
    calls = 0

    def read() -> int:
        nonlocal calls
        calls += 1
        return calls

    threads = threading.active_count()
    sampler = PeakSampler(read, 0.001)
    for _ in range(20):
        sampler.begin()
        sampler.end()
    assert threading.active_count() == threads + 1
    seen = calls
    time.sleep(0.03)
    assert calls == seen
    sampler.close()
    assert threading.active_count() == threads


def test_kills_by_the_kernel_are_counted_under_both_versions(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (root / "memory" / "job").mkdir(parents=True)
    (root / "pod").mkdir()
    (proc / "self" / "cgroup").write_text("5:memory:/job\n")
    assert HostReader(proc, root).oom_kills() is None
    (root / "memory" / "job" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert HostReader(proc, root).oom_kills() == 4
    (proc / "self" / "cgroup").write_text("0::/pod\n")
    (root / "pod" / "memory.events").write_text("max 2\noom 9\noom_kill 1\n")
    assert HostReader(proc, root).oom_kills() == 1
    # Inside a container the path is often the one outside; the mount's root is the container's group.
    (proc / "self" / "cgroup").write_text("0::/outside/pod\n")
    (root / "memory.events").write_text("oom_kill 7\n")
    assert HostReader(proc, root).oom_kills() == 7
