"""`with memory.enter(PHASE):` the border between phases. It records; it moves nothing yet."""

import logging
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from plimsoll.memory.device import DeviceReader, DeviceReading
from plimsoll.memory.host import HostReader, HostReading, PeakSampler
from plimsoll.memory.ledger import Ledger, LedgerRow
from plimsoll.memory.phases import Phase
from plimsoll.memory.resident import Place, Resident

logger = logging.getLogger("plimsoll.memory")

# The "GB" of the log lines is 1024³ bytes, as in the lines that people compare it with.
_GB = 1024**3
# A line is INFO when its figure moved by this share since the last INFO line of the phase, else DEBUG: at one line a
# phase the console would say little else. memory.jsonl has every row.
_NEWS = 0.05
_MAY_LEAVE_PINNED = {Phase.LOAD, Phase.SYNC, Phase.SAVE, Phase.EXPORT}
"""Phases that move weights. Nothing of ours pins memory by torch's allocator; a library that did would leave it there,
rounded up and unused, for the rest of the run."""


class Memory:
    """Measures every phase of one process and writes a row for it.

    `residents` is asked at each border, so that a resident may come and go. `interval` is the time in seconds between
    two readings of host memory inside a phase. The host baseline is taken here: build this object when the worker
    starts, before anything large is loaded. `device` None: a CPU run. `registered`: bytes of host memory that are
    pinned for the device beside torch's allocator.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        device: DeviceReader | None,
        residents: Callable[[], Sequence[Resident]],
        interval: float,
        process: str = "trainer",
        host: HostReader | None = None,
        registered: Callable[[], int] = lambda: 0,
    ) -> None:
        self._ledger = Ledger(path)
        self._rank = rank
        self._device = device
        self._residents = residents
        self._process = process
        self._registered = registered
        self._host = HostReader() if host is None else host
        self._sampler = PeakSampler(self._host.anonymous, interval)
        self._baseline = self._host.anonymous()
        self._step = 0
        self._phase: Phase | None = None
        self._seconds: dict[Phase, float] = {}
        self._mode = "none"
        self._mode_step: int | None = None
        self._announced: dict[Phase, float] = {}

    def begin_step(self, step: int) -> None:
        """Rows from here on belong to `step`, and the times of `seconds_by_phase` start at zero.

        Before the first call it is step 0. A resumed run calls it with the step that it resumes from before it loads.
        """
        self._step = step
        self._seconds.clear()

    @property
    def step(self) -> int:
        """The step that rows belong to."""
        return self._step

    def seconds_by_phase(self) -> dict[Phase, float]:
        """Wall seconds of each phase since `begin_step`, in the order in which the phases were first entered."""
        return dict(self._seconds)

    def truncate(self, step: int) -> None:
        """Drop the rows of later steps (resume)."""
        self._ledger.truncate(step)

    def close(self) -> None:
        """End the sampler thread and close the files."""
        self._sampler.close()
        self._host.close()
        self._ledger.close()

    @contextmanager
    def enter(self, phase: Phase) -> Generator[None]:
        """Measure what happens inside. An exception is recorded (`failed`) and goes on its way."""
        assert self._phase is None, f"{phase} entered inside {self._phase}: phases do not nest"
        before = None
        if self._device is not None:
            self._device.reset_peaks()
            before = self._device.read()
        self._sampler.begin()
        self._phase = phase
        start = time.perf_counter()
        try:
            yield
            if self._device is not None:
                self._device.synchronize()  # work still queued belongs to this phase, not to the next one's time
                if phase in _MAY_LEAVE_PINNED:
                    self._device.empty_host_cache()
        except BaseException as error:
            try:
                self._record(phase, before, time.perf_counter() - start, failed=True)
            except Exception as second:  # after a device error the counters fail too; the first error is the cause
                error.add_note(f"The memory of the failed {phase} phase could not be recorded: {second!r}")
            raise
        else:
            self._record(phase, before, time.perf_counter() - start, failed=False)
        finally:
            self._phase = None

    def _record(self, phase: Phase, before: DeviceReading | None, seconds: float, *, failed: bool) -> None:
        peak = self._sampler.end()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        host = self._host.read()
        if peak is not None and host.anonymous is not None:
            peak = max(peak, host.anonymous)  # the border is a reading too
        device = self._device.read() if self._device is not None else None
        row = self._row(phase, before, device, host, peak, seconds, failed=failed)
        warnings = self._ledger.write(row)
        self._announce(phase, row)
        for text in warnings:
            logger.warning(text)

    def _row(
        self,
        phase: Phase,
        before: DeviceReading | None,
        device: DeviceReading | None,
        host: HostReading,
        peak: int | None,
        seconds: float,
        *,
        failed: bool,
    ) -> LedgerRow:
        residents = self._residents()
        sizes = {resident.name: resident.measured() for resident in residents}
        assert len(sizes) == len(residents), "two residents have the same name"
        owned = sum(sizes[resident.name] for resident in residents if resident.place is Place.DEVICE)
        return LedgerRow(
            step=self._step,
            phase=phase.value,
            rank=self._rank,
            device=self._device.name if self._device is not None else "cpu",
            process=self._process,
            pid=os.getpid(),
            failed=failed,
            host_anonymous=host.anonymous,
            host_anonymous_peak=peak,
            host_growth=_minus(host.anonymous, self._baseline),
            host_growth_peak=_minus(peak, self._baseline),
            host_file=host.file,
            host_shared=host.shared,
            host_pinned=_plus(device.pinned, self._registered()) if device else None,
            host_available=host.available,
            host_limit=self._host.limit,
            device_allocated=device.allocated if device else None,
            device_reserved=device.reserved if device else None,
            device_allocated_peak=device.allocated_peak if device else None,
            device_reserved_peak=device.reserved_peak if device else None,
            device_used=device.used if device else None,
            device_total=device.total if device else None,
            device_non_torch=device.used - device.reserved if device else None,
            device_released=before.used - device.used if before and device else None,
            fragmentation=device.reserved - device.allocated if device else None,
            unattributed=device.allocated - owned if device else None,
            residents=sizes,
            on_host=[resident.name for resident in residents if resident.place is Place.HOST],
            predicted={resident.name: resident.predicted_bytes for resident in residents},
            allocator=self._allocator_mode(),
            seconds=seconds,
        )

    def _allocator_mode(self) -> str:
        # Reading it walks every segment: once a step is enough to see a library that switched it.
        if self._device is not None and self._mode_step != self._step:
            self._mode = self._device.allocator_mode()
            self._mode_step = self._step
        return self._mode

    def _announce(self, phase: Phase, row: LedgerRow) -> None:
        figure, text = log_line(phase, row)
        last = self._announced.get(phase)
        news = last is None or abs(figure - last) > _NEWS * last
        if news:
            self._announced[phase] = figure
        logger.log(logging.INFO if news else logging.DEBUG, "%s%s", f"[rank {row.rank}] " if row.rank else "", text)


def log_line(phase: Phase, row: LedgerRow) -> tuple[float, str]:
    """The figure that matters most in the row (bytes), and the line for the log."""
    head = f"After {phase.log_name}"
    if (
        row.device_allocated is not None
        and row.device_reserved is not None
        and row.device_used is not None
        and row.device_total is not None
    ):
        return float(row.device_used), (
            f"{head}, memory allocated (GB): {row.device_allocated / _GB:.2f}, "
            f"memory reserved (GB): {row.device_reserved / _GB:.2f}, "
            f"device memory used/total (GB): {row.device_used / _GB:.2f}/{row.device_total / _GB:.2f}"
        )
    if row.host_anonymous is None or row.host_anonymous_peak is None:
        return 0.0, f"{head}, host anonymous memory: this system does not say"
    return float(row.host_anonymous_peak), (
        f"{head}, host anonymous memory (GB): {row.host_anonymous / _GB:.2f}, peak (GB): "
        f"{row.host_anonymous_peak / _GB:.2f}"
    )


def _plus(value: int | None, more: int) -> int | None:
    return None if value is None else value + more


def _minus(value: int | None, base: int | None) -> int | None:
    return None if value is None or base is None else value - base
