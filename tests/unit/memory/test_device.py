"""The fake device does what an engine's pool does to torch's counters and to the driver's."""

import pytest
import torch

from plimsoll.memory.device import EngineMemory, FakeDevice, device_reader

GIB = 2**30


def test_a_sleeping_pool_is_free_for_the_driver_and_stands_in_torchs_counters() -> None:
    device = FakeDevice(total=80 * GIB, outside=GIB)
    device.allocate(5 * GIB)
    device.add_pool(20 * GIB)
    awake = device.read()
    device.sleep()
    asleep = device.read()
    assert awake.used - asleep.used == 20 * GIB
    assert (awake.allocated, awake.reserved) == (asleep.allocated, asleep.reserved) == (25 * GIB, 25 * GIB)
    assert device.engine() == EngineMemory(counted=20 * GIB, mapped=0)
    device.wake()
    assert device.read() == awake
    assert device.engine() == EngineMemory(counted=20 * GIB, mapped=20 * GIB)


def test_what_a_sleeping_pool_gave_back_can_be_used() -> None:
    device = FakeDevice(total=24 * GIB)
    device.add_pool(20 * GIB)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        device.allocate(5 * GIB)
    device.sleep()
    device.allocate(5 * GIB)
    assert device.read().used == 5 * GIB


def test_a_full_device_has_not_taken_anything() -> None:
    device = FakeDevice(total=10 * GIB)
    before = device.read()
    with pytest.raises(torch.OutOfMemoryError):
        device.allocate(11 * GIB)
    assert device.read() == before


def test_a_cpu_has_no_reader() -> None:
    assert device_reader(torch.device("cpu")) is None
