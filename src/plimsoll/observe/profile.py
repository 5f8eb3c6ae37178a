"""Profiles of chosen phases in chosen steps: RUN/profile/step_000003_update.trace.json.gz (Perfetto, chrome://tracing)."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from plimsoll.config.observe import ObserveConfig

MemoryRecorder = Callable[[Path], AbstractContextManager[None]]
"""Records the allocations of what runs inside it into a file."""

_TRACE, _MEMORY = ".trace.json.gz", ".memory.pickle"


class Profiler:
    """Does nothing but for the phases that `observe.profile_steps` and `observe.profile_phases` name.

    What goes wrong with a profile (disk full, a profiler that does not start) is said and never reaches the phase.
    """

    def __init__(
        self, config: ObserveConfig, folder: Path, record_memory: MemoryRecorder | None, say: Callable[[str], None]
    ) -> None:
        self._steps = frozenset(config.profile_steps)
        self._phases: frozenset[str] = frozenset(config.profile_phases)
        self._folder = folder
        self._record_memory = record_memory if config.profile_memory else None
        self._say = say
        if config.profile_memory and record_memory is None and self._steps:
            say("observe.profile_memory does nothing on a CPU run: a memory snapshot is one of a device's allocator")

    @contextmanager
    def phase(self, step: int, phase: str) -> Generator[None]:
        """Profile what runs inside, if this phase of this step is asked for. A phase that fails leaves no profile."""
        if step not in self._steps or phase not in self._phases:
            yield
            return
        base = self._base(step, phase)
        with ExitStack() as trace, ExitStack() as memory:
            recorded = self._start_trace(trace, base)
            self._start_memory(memory, base)
            yield
            self._stop(memory, base + _MEMORY)
            if recorded is not None and self._stop(trace, base + _TRACE):
                self._write(recorded, self._folder / (base + _TRACE))

    def _start_trace(self, running: ExitStack, base: str) -> profile | None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        try:
            self._folder.mkdir(exist_ok=True)
            # acc_events: without it torch warns that it forgets events at the end of a cycle; here is one cycle only.
            return running.enter_context(profile(activities=activities, acc_events=True))
        except (OSError, RuntimeError) as error:
            self._failed(base + _TRACE, error)
            return None

    def _start_memory(self, running: ExitStack, base: str) -> None:
        if self._record_memory is None:
            return
        try:
            running.enter_context(self._record_memory(self._folder / (base + _MEMORY)))
        except (OSError, RuntimeError) as error:
            self._failed(base + _MEMORY, error)

    def _stop(self, running: ExitStack, name: str) -> bool:
        try:
            running.close()
        except (OSError, RuntimeError) as error:
            self._failed(name, error)
            return False
        return True

    def _write(self, recorded: profile, path: Path) -> None:
        try:
            recorded.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self._failed(path.name, error)
        else:
            self._say(f"profile written: {path}")

    def _failed(self, name: str, error: Exception) -> None:
        path = self._folder / name
        with suppress(OSError):
            path.unlink()  # half of a profile opens nowhere
        self._say(f"the profile {path} could not be written ({error})")

    def _base(self, step: int, phase: str) -> str:
        """A phase may be entered more than once in a step (sync), and a resumed run may do a step again."""
        name, number = f"step_{step:06d}_{phase}", 1
        while (self._folder / (name + _TRACE)).exists():
            number += 1
            name = f"step_{step:06d}_{phase}_{number}"
        return name
