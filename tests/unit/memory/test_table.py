"""An out-of-memory, on the device or on the host, ends with a table of who holds what."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from plimsoll.errors import RunError
from plimsoll.memory.device import FakeDevice
from plimsoll.memory.host import HostReader
from plimsoll.memory.phases import Phase
from plimsoll.memory.resident import Place
from plimsoll.memory.table import explain_out_of_memory, kind_of
from tests.unit.memory.bench import GIB, MIB, Bench, plan, resident


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, device=FakeDevice(total=40 * GIB, outside=2 * GIB))
    yield bench
    bench.recorder.close()


@pytest.fixture
def cpu(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.recorder.close()


def line_with(text: str, word: str) -> str:
    (found,) = [line for line in text.splitlines() if line.strip().startswith(word)]
    return found


def notes(error: BaseException) -> list[str]:
    """What Python prints after the traceback."""
    return list(vars(error).get("__notes__", ()))


def test_a_full_device_ends_with_the_table_and_the_plans_row(gpu: Bench) -> None:
    assert gpu.device is not None
    gpu.recorder.plan = plan("update", 20 * GIB)
    gpu.recorder.engine = gpu.device.engine
    gpu.residents = [resident("actor_parameters", 4 * GIB), resident("kv_cache", 5 * GIB, Place.ENGINE)]
    gpu.device.allocate(4 * GIB)
    gpu.device.add_pool(6 * GIB)
    gpu.recorder.begin_step(3)

    def work(device: FakeDevice) -> None:
        device.allocate(20 * GIB)
        device.allocate(3 * GIB)
        device.free(3 * GIB)
        device.allocate(30 * GIB)

    with pytest.raises(torch.OutOfMemoryError) as caught, gpu.recorder.phase(Phase.UPDATE):
        work(gpu.device)
    (text,) = caught.value.__notes__
    assert text.startswith("Out of device memory in the update phase of step 3 on rank 0 (trainer). OutOfMemoryError:")
    assert "fake:0: 40.0 GiB, 5.0 GiB of them free" in text
    assert line_with(text, "actor_parameters").split()[1:] == ["4.0", "GiB", "4.0", "GiB"]
    assert line_with(text, "tensors that nobody").split()[-4:] == ["20.0", "GiB", "15.0", "GiB"]
    assert line_with(text, "allocator's cache").split()[-3:] == ["3.0", "GiB", "-"]
    assert line_with(text, "engine's own").split()[-4:-2] == ["6.0", "GiB"]
    assert line_with(text, "outside torch").split()[-4:] == ["2.0", "GiB", "1.0", "GiB"]
    assert line_with(text, "together").split()[-4:] == ["35.0", "GiB", "20.0", "GiB"]
    assert "highest within the phase: allocated 27.0 GiB" in text
    assert "The largest is tensors that nobody has named" in text
    assert "train.token_budget" in text
    assert gpu.rows()[-1]["failed"] is True


def test_the_table_comes_once(gpu: Bench) -> None:
    assert gpu.device is not None
    found: list[str] = []
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) as caught, gpu.recorder.phase(Phase.UPDATE):
            gpu.device.allocate(90 * GIB)
        found += notes(caught.value)
    assert len([text for text in found if text.startswith("Out of")]) == 1


def test_the_largest_consumer_decides_what_to_change(gpu: Bench) -> None:
    assert gpu.device is not None
    gpu.residents = [resident("optimizer_state", 30 * GIB), resident("arena", 90 * GIB, Place.HOST)]
    gpu.device.allocate(30 * GIB)
    text = explain_out_of_memory(torch.OutOfMemoryError("full"), gpu.recorder)
    assert text is not None
    assert "between two phases" in text
    assert "The largest is optimizer_state, 30.0 GiB. What to change: set train.optimizer_state=streamed" in text


def test_another_error_has_no_table(gpu: Bench) -> None:
    with pytest.raises(ValueError, match="no") as caught, gpu.recorder.phase(Phase.UPDATE):
        raise ValueError("no")
    assert notes(caught.value) == []
    assert explain_out_of_memory(ValueError("no"), gpu.recorder) is None


def test_errors_that_are_about_memory() -> None:
    wrapped = RunError("4 bytes of host memory could not be mapped: …")
    wrapped.__cause__ = OSError(12, "Cannot allocate memory")
    inner = RuntimeError("worker failed")
    inner.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried …")
    device = (inner, RuntimeError("CUDA error: out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))
    host = (
        wrapped,
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RunError("64 MiB of host memory could not be registered with CUDA (CUDA error: out of memory)"),
    )
    assert [kind_of(error) for error in device] == ["device"] * 3
    assert [kind_of(error) for error in host] == ["host"] * 4
    assert kind_of(RuntimeError("out of luck")) is None
    assert kind_of(OSError(28, "No space left on device")) is None


STARVED = """
import logging, resource, sys
from pathlib import Path
import torch
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.resident import Resident, Survival
logging.basicConfig(format="%(message)s", stream=sys.stdout)
kept = torch.ones(40 * 2**20, dtype=torch.uint8)
policy = Resident(name="actor_parameters", survival=Survival.KEEP, measured=lambda: kept.nbytes)
recorder = Recorder(Path(sys.argv[1]), rank=0, device=None, residents=lambda: [policy], interval=0.02)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
hold = []
with recorder.phase("update"):
    while True:
        hold.append(torch.ones(2**26, dtype=torch.uint8))
"""


def test_a_host_without_memory_ends_with_the_table(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARVED, str(tmp_path / "memory.jsonl")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    trace, found, rest = done.stderr.partition("Out of host memory in the update phase of step 0")
    assert found, done.stderr
    assert "Error" in trace.splitlines()[-1]  # the exception went on its way, and the table comes after it
    assert line_with(rest, "actor_parameters").split()[1:3] == ["40.0", "MiB"]
    grown = line_with(rest, "host memory that nobody has named").split()[-3:-1]
    assert float(grown[0]) * (1024 if grown[1] == "GiB" else 1) > 60
    assert "last RSS by process id: " in rest
    assert "What to change: " in rest.splitlines()[-1]


def fake_cgroup(folder: Path, kills: int) -> HostReader:
    """A host with a cgroup of 1 GiB in which the kernel has killed; the processes are the real ones' names only."""
    proc, group = folder / "proc", folder / "cgroup" / "job"
    for each in (proc / "self", proc / str(os.getpid()) / "task" / "1", proc / "77", group):
        each.mkdir(parents=True, exist_ok=True)
    (proc / "self" / "cgroup").write_text("0::/job\n")
    (proc / "self" / "status").write_text("Name:\tx\nRssAnon:\t  524288 kB\n")
    (proc / "meminfo").write_text("MemTotal:  4194304 kB\nMemAvailable:  1024 kB\n")
    (proc / str(os.getpid()) / "status").write_text("Name:\tx\nVmRSS:\t  600000 kB\n")
    (proc / str(os.getpid()) / "task" / "1" / "children").write_text("77 \n")
    (proc / "77" / "status").write_text("Name:\tworker\nVmRSS:\t  307200 kB\n")
    (group / "memory.max").write_text(f"{GIB}\n")
    set_kills(folder, kills)
    return HostReader(proc, folder / "cgroup")


def set_kills(folder: Path, kills: int) -> None:
    (folder / "cgroup" / "job" / "memory.events").write_text(f"low 0\nmax 3\noom 1\noom_kill {kills}\n")


def test_a_worker_that_the_kernel_killed_is_named_with_limit_and_count(tmp_path: Path) -> None:
    bench = Bench(tmp_path, host=fake_cgroup(tmp_path, 2))
    with bench.recorder.phase(Phase.UPDATE):
        pass

    def die() -> None:
        set_kills(tmp_path, 3)
        (tmp_path / "proc" / "77" / "status").unlink()
        raise RuntimeError("a worker died unexpectedly")

    with pytest.raises(RuntimeError, match="died unexpectedly") as caught, bench.recorder.phase(Phase.ROLLOUT):
        die()
    bench.recorder.close()
    (text,) = notes(caught.value)
    assert "the kernel killed a process for memory" in text
    assert "limit of the cgroup 1.0 GiB" in text
    assert "killed by the kernel since the start: 1" in text
    assert f"{os.getpid()}: 0.6 GiB, 77: 0.3 GiB (gone)" in text


def test_a_kill_of_long_ago_does_not_explain_an_error_of_now(tmp_path: Path) -> None:
    bench = Bench(tmp_path, host=fake_cgroup(tmp_path, 2))
    with bench.recorder.phase(Phase.UPDATE):
        set_kills(tmp_path, 3)
    assert explain_out_of_memory(ValueError("no"), bench.recorder) is None
    bench.recorder.close()


def test_the_processes_below_this_one_are_seen(cpu: Bench) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        sizes = HostReader().processes()
        child.communicate(b"\n")
    assert sizes[os.getpid()] > 50 * MIB
    assert sizes[child.pid] > 0
    assert next(iter(sizes)) == os.getpid()


def test_on_a_cpu_what_the_plan_has_for_activations_is_named_though_they_are_gone(cpu: Bench) -> None:
    cpu.recorder.plan = plan("update", 4000 * GIB)
    cpu.residents = [resident("actor_parameters", 4 * MIB)]
    cpu.recorder.begin_step(1)

    def work() -> None:
        raise MemoryError("no more")

    with pytest.raises(MemoryError) as caught, cpu.recorder.phase(Phase.UPDATE):
        work()
    (text,) = notes(caught.value)
    assert "The largest is host memory that nobody has named" in text
    assert "GiB planned. What to change: lower train.token_budget" in text
