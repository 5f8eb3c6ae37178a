"""What ends in an out-of-memory later is said once, with its slope; what a sleep leaves behind is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from plimsoll.errors import RunError
from plimsoll.memory.device import FakeDevice
from plimsoll.memory.ledger import GIB, MIB
from plimsoll.memory.phases import Phase
from plimsoll.memory.warnings import FragmentationWatch, PlanWatch, ResidualGate, RowWatch, TrendWatch, slope
from tests.ledger_rows import ROW
from tests.unit.memory.bench import Bench


def series(watch: TrendWatch, values: list[float], *, phase: str = "update") -> list[str]:
    said: list[str] = []
    for step, value in enumerate(values, start=1):
        said += watch.add(replace(ROW, step=step, phase=phase, fragmentation=round(value * GIB)))
    return said


def test_a_growing_series_is_said_once_with_its_slope() -> None:
    said = series(TrendWatch(), [float(n) for n in range(1, 9)] + [9.0, 10.0])
    assert len(said) == 1
    assert "1.0 GiB a step" in said[0]
    assert "fragmentation" in said[0]


def test_every_watch_sees_the_row() -> None:
    watch = RowWatch()
    said = [watch.add(replace(ROW, step=n, host_anonymous=n * GIB)) for n in range(1, 9)]
    assert [len(texts) for texts in said] == [0] * 7 + [1]
    assert "anonymous host memory" in said[-1][0]
    (text,) = watch.add(replace(ROW, device_allocated_peak=50 * GIB, device_reserved_peak=135 * GIB))
    assert "fragmentation" in text
    (text,) = watch.add(replace(ROW, host_growth_peak=3 * GIB, planned_host=GIB))
    assert "planned" in text


def test_a_plateau_a_zigzag_and_a_small_rise_are_no_leak() -> None:
    assert series(TrendWatch(), [1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]) == []
    assert series(TrendWatch(), [1, 5] * 40) == []
    assert series(TrendWatch(), [1 + n / 1024 for n in range(8)]) == []  # 1 MiB a step: too little to speak of yet


def test_a_slow_leak_under_noise_is_found_over_more_steps() -> None:
    noise = [0.0, 0.01, -0.007, 0.015, -0.013, 0.003, 0.007]
    said = series(TrendWatch(), [4 + n * 8 / 1024 + noise[n % 7] for n in range(200)])  # 8 MiB a step
    assert len(said) == 1
    assert " MiB a step" in said[0]


def test_phases_are_watched_apart_but_a_quantity_is_said_once() -> None:
    watch = TrendWatch()
    rows = [(n, phase) for n in range(1, 9) for phase in ("rollout", "update")]
    said = [t for n, phase in rows for t in watch.add(replace(ROW, step=n, phase=phase, fragmentation=n * GIB))]
    assert len(said) == 1
    # The same values, alternating between two borders, are level at each border.
    watch = TrendWatch()
    rows = [(n, phase, size) for n in range(1, 9) for phase, size in (("rollout", 1), ("update", 5))]
    assert not [t for n, phase, s in rows for t in watch.add(replace(ROW, step=n, phase=phase, fragmentation=s * GIB))]


def test_rows_of_failed_phases_are_no_part_of_a_series() -> None:
    watch = RowWatch()
    said = [watch.add(replace(ROW, step=n, host_anonymous=n * GIB, failed=n == 8)) for n in range(1, 9)]
    assert said == [[]] * 8


def test_slope_is_least_squares() -> None:
    assert slope([(1, 10), (2, 20), (3, 30)]) == 10.0
    assert slope([(1, 0), (2, 30), (3, 30)]) == 15.0
    assert slope([(4, 1), (4, 9)]) == 0.0


def test_fragmentation_over_the_limit_is_said_once() -> None:
    watch = FragmentationWatch()
    fine = replace(ROW, device_allocated_peak=20 * GIB, device_reserved_peak=23 * GIB)
    # Reserved stays where the update left it while a small phase needs little: that is a cache, not fragmentation.
    cached = replace(ROW, phase="logprob", device_allocated_peak=4 * GIB, device_reserved_peak=23 * GIB)
    bad = replace(ROW, step=2, device_allocated_peak=50 * GIB, device_reserved_peak=135 * GIB)
    assert watch.add(fine) == []
    assert watch.add(cached) == []
    (text,) = watch.add(bad)
    assert "135.00 GiB" in text
    assert "85.00 GiB more" in text
    assert watch.add(bad) == []


def test_small_devices_are_not_spoken_of() -> None:
    small = replace(ROW, device_allocated_peak=10 * MIB, device_reserved_peak=30 * MIB)
    assert FragmentationWatch().add(small) == []


def planned(measured: int, plan: int, *, phase: str = "update") -> list[str]:
    """Half of it in tensors, the rest outside torch and in the engine."""
    row = replace(ROW, phase=phase, planned_device=plan, device_allocated_peak=measured // 2)
    return PlanWatch().add(replace(row, device_engine=measured // 4, device_non_torch=measured // 4))


def test_more_than_planned_is_said_with_both_figures() -> None:
    (text,) = planned(24 * GIB, 20 * GIB)
    assert "24.0 GiB of device memory" in text
    assert "4.0 GiB more than the 20.0 GiB" in text
    assert "update" in text


def test_a_little_more_than_planned_is_not_spoken_of() -> None:
    assert planned(22 * GIB, 20 * GIB) == []  # 10 %
    assert planned(GIB + 500 * MIB, GIB) == []  # 49 %, but small
    assert planned(10 * GIB, 20 * GIB) == []


def test_the_plan_is_spoken_of_once_for_each_phase_and_place() -> None:
    watch = PlanWatch()
    row = replace(ROW, host_growth_peak=3 * GIB, planned_host=GIB)
    both = replace(row, planned_device=GIB, device_allocated_peak=9 * GIB, device_non_torch=0)
    assert [len(watch.add(each)) for each in (row, row, both, both, replace(both, phase="save"))] == [1, 0, 1, 0, 2]


def test_a_row_without_a_plan_is_not_compared() -> None:
    assert PlanWatch().add(replace(ROW, device_allocated_peak=9 * GIB, device_non_torch=0, host_growth_peak=GIB)) == []


def test_what_is_left_after_a_sleep_may_not_grow() -> None:
    gate = ResidualGate(tolerance=2 * GIB)
    gate.check(1, 4 * GIB)
    gate.check(2, round(4.1 * GIB))
    with pytest.raises(RunError) as caught:
        gate.check(3, round(11.6 * GIB))
    text = str(caught.value)
    assert "step 3" in text
    assert "11.6 GiB" in text
    assert "4.0 GiB" in text


def test_the_residual_of_the_first_sleep_stays_the_baseline() -> None:
    """Else a residual that creeps up would never be refused."""
    gate = ResidualGate(tolerance=2 * GIB)
    for step, residual in enumerate((4, 5, 6), start=1):
        gate.check(step, residual * GIB)
    with pytest.raises(RunError):
        gate.check(4, 7 * GIB)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_list_that_grows_on_the_device_is_named_with_its_slope(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice(total=80 * GIB)
    bench = Bench(tmp_path, device=device)
    leak: list[int] = []
    for step in range(1, 10):
        bench.recorder.begin_step(step)
        with bench.recorder.phase(Phase.UPDATE):
            device.allocate(GIB)  # activations: they come and go
            device.free(GIB)
            leak.append(300 * MIB)
            device.allocate(leak[-1])
    bench.recorder.close()
    (text,) = warned(caplog)
    assert "allocated device memory grows at the end of every update phase" in text
    assert "0.3 GiB a step" in text


def test_a_list_that_grows_on_the_host_is_named_with_its_slope(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In this process and by the kernel's counters, which lag by some pages."""
    bench = Bench(tmp_path)
    leak: list[bytearray] = []
    for step in range(1, 10):
        bench.recorder.begin_step(step)
        with bench.recorder.phase(Phase.UPDATE):
            leak.append(bytearray(b"x") * (40 * MIB))
        with bench.recorder.phase(Phase.SYNC):
            pass
    bench.recorder.close()
    (text,) = warned(caplog)
    assert "anonymous host memory grows at the end of every update phase" in text
    slope_text = re.search(r"([\d.]+) MiB a step", text)
    assert slope_text is not None
    assert float(slope_text[1]) == pytest.approx(40, abs=1)


def test_a_host_that_holds_what_it_held_is_not_spoken_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tmp_path)
    for step in range(1, 10):
        bench.recorder.begin_step(step)
        with bench.recorder.phase(Phase.UPDATE):
            bytearray(b"x") * (40 * MIB)
    bench.recorder.close()
    assert warned(caplog) == []
