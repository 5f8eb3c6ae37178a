"""An engine's pool, what lies outside torch, what borders move, and the plan: beside what torch counts."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll.memory.device import FakeDevice
from plimsoll.memory.phases import Phase
from plimsoll.memory.resident import Place
from tests.unit.memory.bench import GIB, Bench, plan, resident


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, device=FakeDevice(total=140 * GIB, outside=2 * GIB))
    yield bench
    bench.recorder.close()


def test_an_engine_that_sleeps_is_seen_by_the_driver_alone(gpu: Bench, caplog: pytest.LogCaptureFixture) -> None:
    assert gpu.device is not None
    gpu.recorder.engine = gpu.device.engine
    gpu.device.allocate(5 * GIB)
    gpu.device.add_pool(20 * GIB)
    allocated = gpu.device.read().allocated
    with caplog.at_level(logging.INFO, "plimsoll.memory"), gpu.recorder.phase(Phase.ROLLOUT):
        gpu.device.sleep()
    assert gpu.device.read().allocated == allocated  # torch's counter has not moved
    (row,) = gpu.rows()
    assert row["device_released"] == 20 * GIB
    assert (row["device_allocated"], row["device_reserved"]) == (5 * GIB, 5 * GIB)
    assert (row["device_engine"], row["device_non_torch"], row["fragmentation"]) == (0, 2 * GIB, 0)
    assert any("Over generate_sequences, released 20.0 GiB" in line for line in caplog.messages)


def test_what_lies_in_the_engines_pool_is_taken_off_once(gpu: Bench) -> None:
    assert gpu.device is not None
    gpu.recorder.engine = gpu.device.engine
    gpu.residents = [resident("actor_parameters", 4 * GIB), resident("kv_cache", 15 * GIB, Place.ENGINE)]
    gpu.device.allocate(4 * GIB)
    gpu.device.add_pool(20 * GIB)
    with gpu.recorder.phase(Phase.ROLLOUT):
        gpu.device.allocate(3 * GIB)
    (row,) = gpu.rows()
    assert (row["unattributed"], row["device_engine"], row["device_non_torch"]) == (3 * GIB, 20 * GIB, 2 * GIB)
    assert row["in_engine"] == ["kv_cache"]
    assert row["device_allocated_peak"] == 7 * GIB


def test_memory_outside_torch_is_counted_from_the_baseline(gpu: Bench) -> None:
    assert gpu.device is not None
    with gpu.recorder.phase(Phase.LOAD):
        gpu.device.outside += 3 * GIB
    gpu.recorder.take_baseline()
    with gpu.recorder.phase(Phase.UPDATE):
        gpu.device.outside += GIB
    load, update = gpu.rows()
    assert (load["non_torch_growth"], update["non_torch_growth"]) == (None, GIB)
    assert (update["device_non_torch"], gpu.recorder.residual()) == (6 * GIB, GIB)


def test_the_residual_of_a_sleep_is_what_the_engine_left(gpu: Bench) -> None:
    assert gpu.device is not None
    gpu.recorder.engine = gpu.device.engine
    gpu.device.add_pool(20 * GIB)
    gpu.recorder.take_baseline()
    gpu.device.sleep()
    assert gpu.recorder.residual() == 0
    gpu.device.outside += GIB
    assert gpu.recorder.residual() == GIB


def test_a_border_is_part_of_its_phase_and_of_no_other(gpu: Bench, caplog: pytest.LogCaptureFixture) -> None:
    assert gpu.device is not None
    gpu.device.allocate(9 * GIB)
    with caplog.at_level(logging.INFO, "plimsoll.memory"):
        with gpu.recorder.border() as moved:
            gpu.device.free(8 * GIB)
            gpu.device.empty_cache()
            moved.evicted, moved.admitted = 8 * GIB, 5
            time.sleep(0.01)
        with gpu.recorder.phase(Phase.ROLLOUT):
            pass
    with gpu.recorder.phase(Phase.UPDATE):
        pass
    rollout, update = gpu.rows()
    assert (rollout["evicted"], rollout["admitted"], update["evicted"]) == (8 * GIB, 5, 0)
    assert rollout["seconds_border"] >= 0.01 > update["seconds_border"]
    assert "Before generate_sequences, evicted 8.0 GiB, admitted 0.0 MiB, released 8.0 GiB" in caplog.messages[0]


def test_the_plan_stands_beside_what_was_measured(gpu: Bench, caplog: pytest.LogCaptureFixture) -> None:
    assert gpu.device is not None
    gpu.recorder.plan = plan("update/step", 20 * GIB, host_bytes=7)
    with caplog.at_level(logging.WARNING, "plimsoll.memory"):
        for phase in (Phase.LOGPROB, Phase.UPDATE, Phase.UPDATE):
            with gpu.recorder.phase(phase):
                gpu.device.allocate(24 * GIB)
                gpu.device.free(24 * GIB)
    logprob, update, _ = gpu.rows()
    assert (logprob["planned_device"], logprob["planned_host"]) == (None, None)
    assert (update["planned_device"], update["planned_host"]) == (20 * GIB, 7)
    (text,) = caplog.messages
    assert "26.0 GiB of device memory" in text
