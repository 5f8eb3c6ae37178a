"""Profiles of chosen phases in chosen steps: RUN/profile/step_000003_update.trace.json.gz (Perfetto, chrome://tracing)."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from plimsoll.config.observe import ObserveConfig

MemoryRecorder = Callable[[Path], AbstractContextManager[None]]
"""Records the allocations of what runs inside it into a file."""


class Profiler:
    """Does nothing but for the phases that `observe.profile_steps` and `observe.profile_phases` name."""

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
        """Profile what runs inside, if this phase of this step is asked for."""
        if step not in self._steps or phase not in self._phases:
            yield
            return
        self._folder.mkdir(exist_ok=True)
        base = self._base(step, phase)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        memory = (
            nullcontext() if self._record_memory is None else self._record_memory(base.with_suffix(".memory.pickle"))
        )
        # acc_events: without it torch warns that it forgets events at the end of a cycle, of which there is one here.
        with profile(activities=activities, acc_events=True) as recorded, memory:
            yield
        trace = base.with_suffix(".trace.json.gz")
        try:
            recorded.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:
            self._say(f"the profile {trace} could not be written ({error})")
        else:
            self._say(f"profile written: {trace}")

    def _base(self, step: int, phase: str) -> Path:
        """A phase may be entered more than once in a step (sync)."""
        name, number = f"step_{step:06d}_{phase}", 1
        while (self._folder / f"{name}.trace.json.gz").exists():
            number += 1
            name = f"step_{step:06d}_{phase}_{number}"
        return self._folder / name
