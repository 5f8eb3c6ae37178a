"""What is measured in every phase of one process: a row of the ledger, a line in the log, warnings."""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from plimsoll.config.planned import MemoryPlan
from plimsoll.memory.device import DeviceReader, DeviceReading, EngineMemory
from plimsoll.memory.host import HostReader, PeakSampler
from plimsoll.memory.ledger import MIB, Ledger, LedgerRow, gib_text
from plimsoll.memory.measure import Measured, Moved, OwnMemory
from plimsoll.memory.phases import Phase
from plimsoll.memory.resident import Resident
from plimsoll.memory.table import Holdings, explain_out_of_memory
from plimsoll.memory.warnings import RowWatch

logger = logging.getLogger("plimsoll.memory")

# The "GB" of the log lines is 1024³ bytes, as in the lines that people compare it with.
_GB = 1024**3
# A line is INFO when its figure moved by this share since the last INFO line of the phase, else DEBUG: at one line a
# phase the console would say little else. memory.jsonl has every row.
_NEWS = 0.05
_SPOKEN_OF = 256 * MIB
"""Device memory that comes or goes over a phase or a border gets a line of its own from here on."""
_MAY_LEAVE_PINNED: frozenset[str] = frozenset({Phase.LOAD, Phase.SYNC, Phase.SAVE, Phase.EXPORT})
"""Phases that move weights. Nothing of ours pins memory by torch's allocator; a library that did would leave it there,
rounded up and unused, for the rest of the run."""
_NO_ENGINE = EngineMemory(counted=0, mapped=0)


class Recorder:
    """Measures every phase of one process and writes a row for it.

    `residents` is asked at each border, so that a resident may come and go. `interval` is the time in seconds between
    two readings of host memory inside a phase. The host baseline is taken here: build this object when the worker
    starts, before anything large is loaded. `device` None: a CPU run. `registered`: bytes of host memory that are
    pinned for the device beside torch's allocator. `host_start`: anonymous memory when the worker started, if that is
    longer ago. `engine`: memory of an engine in this process; None: there is none.
    `plan` and `engine` may be set later.
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
        host_start: int | None = None,
        engine: Callable[[], EngineMemory] | None = None,
        plan: MemoryPlan | None = None,
    ) -> None:
        self.plan = plan
        self.engine = engine
        self._ledger = Ledger(path)
        self._watch = RowWatch()
        self._rank = rank
        self._device = device
        self._residents = residents
        self._process = process
        self._registered = registered
        self._host = HostReader() if host is None else host
        self._sampler = PeakSampler(self._host.anonymous, interval)
        self._baseline = self._host.anonymous() if host_start is None else host_start
        self._non_torch: int | None = None
        self._oom_start = self._oom_seen = self._host.oom_kills() or 0
        self._processes: dict[int, int] = {}
        self._explained = False
        self._step = 0
        self._phase: str | None = None
        self._moved = Moved()
        self._seconds: dict[str, float] = {}
        self._mode = "none"
        self._mode_step: int | None = None
        self._announced: dict[str, float] = {}

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

    def seconds_by_phase(self) -> dict[str, float]:
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

    def take_baseline(self) -> None:
        """Device memory outside torch and engine is from now on counted from its present value (`non_torch_growth`).

        For the end of the load: contexts, groups of ranks and the engine exist by then.
        """
        own = self._read_device()
        self._non_torch = own.non_torch if own is not None else None

    def residual(self) -> int:
        """Device memory that is neither torch's nor expected, bytes: for `ResidualGate`, while the engine sleeps.

        0 on a CPU run. Before `take_baseline` the context and everybody else are part of it.
        """
        own = self._read_device()
        return 0 if own is None else own.reading.used - own.reserved - (self._non_torch or 0)

    @contextmanager
    def border(self) -> Generator[Moved]:
        """Around the moving of residents before a phase: time, and what the driver got back, for the phase's row."""
        moved = Moved()
        before = self._device.read().used if self._device is not None else None
        start = time.perf_counter()
        yield moved
        moved.seconds = time.perf_counter() - start
        if self._device is not None and before is not None:
            moved.released = before - self._device.read().used
        self._moved = moved

    @contextmanager
    def phase(self, phase: str) -> Generator[None]:
        """Measure what happens inside. `phase` is a `Phase`, or any name.

        An exception is recorded (`failed`) and goes on its way; the first one that is about memory gets the table of
        who holds what as a note, which Python prints after the traceback.
        """
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
                if self._phase in _MAY_LEAVE_PINNED:
                    self._device.empty_host_cache()
        except BaseException as error:
            try:
                self._explain(error)
                self._record(before, time.perf_counter() - start, failed=True)
            except Exception as second:  # after a device error the counters fail too; the first error is the cause
                error.add_note(f"The memory of the failed {phase} phase could not be recorded: {second!r}")
            raise
        else:
            self._record(before, time.perf_counter() - start, failed=False)
            self._oom_seen = self._host.oom_kills() or 0
            self._processes = self._host.processes()
        finally:
            self._phase = None
            self._moved = Moved()

    def rename(self, phase: str) -> None:
        """The phase that goes on gets another name: for loops that are only told afterwards what it was."""
        assert self._phase is not None, "no phase goes on"
        self._phase = phase

    def holdings(self) -> Holdings:
        """Who holds what now, for the table of `memory.table`."""
        kills = self._host.oom_kills()
        now = self._host.processes()
        return Holdings(
            step=self._step,
            phase=None if self._phase is None else str(self._phase),
            rank=self._rank,
            process=self._process,
            device_name=self._device.name if self._device is not None else "cpu",
            device=self._device.read() if self._device is not None else None,
            engine=self._engine_memory(),
            residents=[(each.name, each.measured(), each.place) for each in self._residents()],
            host=self._host.read(),
            host_start=self._baseline,
            registered=self._registered(),
            limit=self._host.limit,
            limit_is_cgroup=self._host.cgroup is not None and self._host.limit == self._host.cgroup.limit,
            oom_kills=None if kills is None else kills - self._oom_start,
            oom_kills_now=0 if kills is None else kills - self._oom_seen,
            processes=now | {pid: size for pid, size in self._processes.items() if pid not in now},
            gone=frozenset(self._processes) - frozenset(now),
            planned=self.plan.phase(self._phase) if self.plan is not None and self._phase is not None else None,
        )

    def _explain(self, error: BaseException) -> None:
        if self._explained:
            return
        text = explain_out_of_memory(error, self)
        if text is not None:
            self._explained = True
            error.add_note(text)  # not a line of the log: a note comes after the traceback, so that it is seen

    def _engine_memory(self) -> EngineMemory:
        return _NO_ENGINE if self.engine is None else self.engine()

    def _read_device(self) -> OwnMemory | None:
        return None if self._device is None else OwnMemory(reading=self._device.read(), engine=self._engine_memory())

    def _record(self, before: DeviceReading | None, seconds: float, *, failed: bool) -> None:
        phase = self._phase
        assert phase is not None
        peak = self._sampler.end()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        host = self._host.read()
        if peak is not None and host.anonymous is not None:
            peak = max(peak, host.anonymous)  # the border is a reading too
        row = Measured(
            step=self._step,
            phase=str(phase),
            rank=self._rank,
            process=self._process,
            failed=failed,
            seconds=seconds,
            host=host,
            host_peak=peak,
            host_start=self._baseline,
            host_limit=self._host.limit,
            registered=self._registered(),
            device_name=self._device.name if self._device is not None else "cpu",
            device=self._read_device(),
            used_before=before.used if before is not None else None,
            non_torch_start=self._non_torch,
            residents=self._residents(),
            planned=self.plan.phase(phase) if self.plan is not None else None,
            moved=self._moved,
            allocator=self._allocator_mode(),
        ).row()
        self._ledger.write(row)
        self._announce(phase, row)
        for text in self._watch.add(row):
            logger.warning(text)

    def _allocator_mode(self) -> str:
        # Reading it walks every segment: once a step is enough to see a library that switched it.
        if self._device is not None and self._mode_step != self._step:
            self._mode = self._device.allocator_mode()
            self._mode_step = self._step
        return self._mode

    def _announce(self, phase: str, row: LedgerRow) -> None:
        name = log_name(phase)
        moved = self._moved
        border = abs(moved.released or 0)
        if moved.evicted or moved.admitted or border >= _SPOKEN_OF:
            self._say(
                f"border {phase}",
                float(moved.evicted + moved.admitted + border),
                f"Before {name}, evicted {gib_text(moved.evicted)}, admitted {gib_text(moved.admitted)}"
                f"{_released_text(moved.released)}, {moved.seconds:.2f} s",
            )
        self._say(phase, *log_line(name, row))
        if abs(row.device_released or 0) >= _SPOKEN_OF:
            change = f"Over {name}{_released_text(row.device_released)} (the driver's count)"
            self._say(f"change {phase}", float(row.device_released or 0), change)

    def _say(self, key: str, figure: float, text: str) -> None:
        last = self._announced.get(key)
        news = last is None or abs(figure - last) > _NEWS * abs(last)
        if news:
            self._announced[key] = figure
        logger.log(logging.INFO if news else logging.DEBUG, "%s%s", f"[rank {self._rank}] " if self._rank else "", text)


def log_name(phase: str) -> str:
    """The word of the log lines; a free name is its own."""
    return phase.log_name if isinstance(phase, Phase) else phase


def log_line(name: str, row: LedgerRow) -> tuple[float, str]:
    """The figure that matters most in the row (bytes), and the line for the log."""
    head = f"After {name}"
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


def _released_text(released: int | None) -> str:
    if released is None or released == 0:
        return ""
    return f", {'released' if released > 0 else 'took'} {gib_text(abs(released))} of device memory"
