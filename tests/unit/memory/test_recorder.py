"""Every phase leaves a row and a line in the log; exceptions go on their way."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from plimsoll.memory.device import DeviceReading, FakeDevice
from plimsoll.memory.host import HostReader
from plimsoll.memory.phases import Phase
from plimsoll.memory.resident import Place
from tests.unit.memory.bench import GIB, MIB, Bench, resident


@pytest.fixture
def cpu(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.recorder.close()


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, device=FakeDevice(total=140 * GIB, outside=2 * GIB))
    yield bench
    bench.recorder.close()


def test_host_memory_that_comes_and_goes_is_in_the_peak_and_not_in_the_growth(cpu: Bench) -> None:
    cpu.recorder.begin_step(1)
    with cpu.recorder.phase(Phase.UPDATE):
        before = HostReader().anonymous()
        block = np.ones(64 * MIB, dtype=np.uint8)
        time.sleep(0.05)
        del block
    (row,) = cpu.rows()
    assert before is not None
    assert row["host_anonymous_peak"] - before >= 60 * MIB
    assert row["host_growth_peak"] - row["host_growth"] >= 60 * MIB
    with cpu.recorder.phase(Phase.SYNC):
        pass
    assert cpu.rows()[1]["host_growth_peak"] - row["host_growth"] < 8 * MIB


def test_on_a_cpu_run_device_values_are_absent(cpu: Bench) -> None:
    cpu.residents = [resident("actor_parameters", 100), resident("kv_cache", 7)]
    with cpu.recorder.phase(Phase.LOAD):
        pass
    (row,) = cpu.rows()
    absent = [key for key in row if key.startswith("device_")] + ["fragmentation", "unattributed", "host_pinned"]
    assert len(absent) > 10
    assert all(row[key] is None for key in absent)
    assert (row["step"], row["phase"], row["device"], row["allocator"]) == (0, "load", "cpu", "none")
    assert row["residents"] == {"actor_parameters": 100, "kv_cache": 7}
    assert row["predicted"] == {"actor_parameters": 100, "kv_cache": 7}
    assert row["failed"] is False


def test_where_the_host_says_nothing_the_row_is_still_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path, host=HostReader(tmp_path / "no-proc", tmp_path / "no-cgroup"))
    with bench.recorder.phase(Phase.LOAD):
        pass
    bench.recorder.close()
    (row,) = bench.rows()
    assert all(row[key] is None for key in row if key.startswith("host_"))


def test_the_driver_tells_what_the_allocator_does_not(gpu: Bench) -> None:
    assert gpu.device is not None
    gpu.device.outside += 20 * GIB  # an engine's pool, below torch's counters
    gpu.device.allocate(5 * GIB)
    with gpu.recorder.phase(Phase.ROLLOUT):
        gpu.device.outside -= 20 * GIB
    (row,) = gpu.rows()
    assert row["device_allocated"] == 5 * GIB
    assert row["device_released"] == 20 * GIB
    assert row["device_non_torch"] == 2 * GIB
    assert (row["device_used"], row["device_total"]) == (7 * GIB, 140 * GIB)


def test_device_peaks_belong_to_their_phase(gpu: Bench) -> None:
    assert gpu.device is not None
    gpu.residents = [resident("actor_parameters", 4 * GIB), resident("arena", 9 * GIB, Place.HOST)]
    gpu.device.allocate(5 * GIB)
    with gpu.recorder.phase(Phase.LOGPROB):
        gpu.device.allocate(30 * GIB)
        gpu.device.free(30 * GIB)
    gpu.device.empty_cache()
    with gpu.recorder.phase(Phase.UPDATE):
        gpu.device.allocate(GIB)
        gpu.device.free(GIB)
    logprob, update = gpu.rows()
    assert logprob["residents"] == {"actor_parameters": 4 * GIB, "arena": 9 * GIB}
    assert logprob["on_host"] == ["arena"]
    assert (logprob["device_allocated_peak"], logprob["device_reserved_peak"]) == (35 * GIB, 35 * GIB)
    assert (logprob["fragmentation"], logprob["unattributed"]) == (30 * GIB, GIB)
    assert (update["device_allocated_peak"], update["fragmentation"]) == (6 * GIB, GIB)


@pytest.mark.parametrize("phase", [Phase.LOAD, Phase.SYNC, Phase.SAVE, Phase.EXPORT])
def test_pinned_memory_is_back_at_its_start_when_weights_have_moved(gpu: Bench, phase: Phase) -> None:
    """torch's host allocator keeps what is freed; what is registered beside it counts as long as it is there."""
    assert gpu.device is not None
    with gpu.recorder.phase(Phase.ROLLOUT):
        gpu.device.pin(100)
    with gpu.recorder.phase(phase):
        gpu.device.pin(33 * MIB)
        gpu.registered += 5
        gpu.device.unpin()
    with gpu.recorder.phase(phase):
        gpu.registered -= 5
    assert gpu.device.pinned_cached == 0
    start, during, end = (row["host_pinned"] for row in gpu.rows())
    assert (start, during, end) == (128, 5, 0)


def test_pinned_memory_that_is_in_use_or_left_by_a_phase_of_other_work_is_counted(gpu: Bench) -> None:
    assert gpu.device is not None
    with gpu.recorder.phase(Phase.LOAD):
        gpu.device.pin(3 * MIB)
    with gpu.recorder.phase(Phase.UPDATE):
        gpu.device.unpin()
    assert [row["host_pinned"] for row in gpu.rows()] == [4 * MIB, 4 * MIB]


def test_the_allocator_mode_is_read_anew_every_step(gpu: Bench) -> None:
    assert gpu.device is not None
    for step, mode in ((1, "expandable"), (2, "plain")):
        gpu.device.mode = mode
        gpu.recorder.begin_step(step)
        with gpu.recorder.phase(Phase.UPDATE):
            pass
    assert [row["allocator"] for row in gpu.rows()] == ["expandable", "plain"]


def test_a_failed_phase_is_recorded_and_its_exception_goes_on(cpu: Bench) -> None:
    cpu.recorder.begin_step(3)
    with pytest.raises(KeyboardInterrupt), cpu.recorder.phase(Phase.ROLLOUT):
        raise KeyboardInterrupt
    with cpu.recorder.phase(Phase.SAVE):
        pass
    assert [(row["step"], row["phase"], row["failed"]) for row in cpu.rows()] == [
        (3, "rollout", True),
        (3, "save", False),
    ]


class BrokenDevice(FakeDevice):
    """Counters fail after the work has failed, as after an illegal access."""

    broken = False

    def read(self) -> DeviceReading:
        if self.broken:
            raise RuntimeError("counters unreadable")
        return super().read()


def test_the_first_error_is_the_one_that_is_raised(tmp_path: Path) -> None:
    device = BrokenDevice(total=GIB)
    bench = Bench(tmp_path, device=device)

    def fail() -> None:
        device.broken = True
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause") as caught, bench.recorder.phase(Phase.UPDATE):
        fail()
    bench.recorder.close()
    assert any("counters unreadable" in note for note in caught.value.__notes__)


def test_phases_do_not_nest(cpu: Bench) -> None:
    with (
        pytest.raises(AssertionError, match="do not nest"),
        cpu.recorder.phase(Phase.UPDATE),
        cpu.recorder.phase(Phase.SYNC),
    ):
        pass
    with cpu.recorder.phase(Phase.SYNC):  # and the outer one was left in order
        pass


def test_seconds_add_up_within_a_step_and_start_again_with_the_next(cpu: Bench) -> None:
    cpu.recorder.begin_step(1)
    for phase in (Phase.ROLLOUT, Phase.UPDATE, Phase.ROLLOUT):
        with cpu.recorder.phase(phase):
            time.sleep(0.01)
    seconds = cpu.recorder.seconds_by_phase()
    assert list(seconds) == [Phase.ROLLOUT, Phase.UPDATE]
    assert seconds[Phase.ROLLOUT] >= 0.02
    assert sum(row["seconds"] for row in cpu.rows()) == pytest.approx(sum(seconds.values()))
    cpu.recorder.begin_step(2)
    assert cpu.recorder.seconds_by_phase() == {}


def test_the_device_line_has_the_known_words(gpu: Bench, caplog: pytest.LogCaptureFixture) -> None:
    assert gpu.device is not None
    gpu.device.allocate(GIB + GIB // 4)
    gpu.device.fragment(GIB // 2)
    with caplog.at_level(logging.INFO, "plimsoll.memory"), gpu.recorder.phase(Phase.LOGPROB):
        pass
    assert caplog.messages == [
        "After compute_log_prob, memory allocated (GB): 1.25, memory reserved (GB): 1.75, "
        "device memory used/total (GB): 3.75/140.00"
    ]


def test_a_line_without_news_is_only_for_debugging(gpu: Bench, caplog: pytest.LogCaptureFixture) -> None:
    assert gpu.device is not None
    with caplog.at_level(logging.DEBUG, "plimsoll.memory"):
        for size in (10 * GIB, 0, 0, 5 * GIB):
            gpu.device.allocate(size)
            with gpu.recorder.phase(Phase.UPDATE):
                pass
    assert [record.levelname for record in caplog.records] == ["INFO", "DEBUG", "DEBUG", "INFO"]


def test_the_host_line_of_a_cpu_run(cpu: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "plimsoll.memory"), cpu.recorder.phase(Phase.ROLLOUT):
        pass
    (line,) = caplog.messages
    assert line.startswith("After generate_sequences, host anonymous memory (GB): ")
    assert ", peak (GB): " in line


def test_a_leak_is_warned_of_once(gpu: Bench, caplog: pytest.LogCaptureFixture) -> None:
    assert gpu.device is not None
    with caplog.at_level(logging.WARNING, "plimsoll.memory"):
        for step in range(1, 12):
            gpu.recorder.begin_step(step)
            with gpu.recorder.phase(Phase.UPDATE):
                gpu.device.allocate(GIB)
    (line,) = caplog.messages
    assert "allocated device memory grows" in line
    assert "1.0 GiB a step" in line


def test_phases_may_have_names_of_their_own(cpu: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "plimsoll.memory"), cpu.recorder.phase("my phase"):
        pass
    assert cpu.rows()[0]["phase"] == "my phase"
    assert caplog.messages[0].startswith("After my phase, ")
    assert list(cpu.recorder.seconds_by_phase()) == ["my phase"]
