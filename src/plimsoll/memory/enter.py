"""`with memory.enter(PHASE):` the border between phases, and the only code that moves residents across it.

    quiesce → evict → release caches → barrier → admit → record

Evicting comes before admitting, and the caches go in between: what enters never stands beside what leaves. The barrier
is there because ranks that share a device must all have let go before one of them takes.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from plimsoll.errors import PlanError
from plimsoll.memory.phases import Phase
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.resident import Mover, Resident, Survival
from plimsoll.memory.schedule import READS_ROLLOUT_WEIGHTS, Schedule


@dataclass(slots=True, kw_only=True, frozen=True)
class Border:
    """What one crossing moved, in bytes that were copied."""

    evicted: Mapping[str, int] = field(default_factory=dict[str, int])
    """Residents that left, in their order; 0: dropped."""
    admitted: Mapping[str, int] = field(default_factory=dict[str, int])
    """Residents that came; 0: memory only."""


def _nobody(phase: Phase, leaving: frozenset[str]) -> None:
    """Nobody else reads residents."""


def _nothing() -> None:
    """For a CPU, and for one rank."""


class Memory:
    """The phases of one process.

    Args:
        recorder: measures each phase, after its border was crossed.
        residents: asked at each border. Names are unique.
        schedule: which phases there are, and who is away in which.
        policy_version: of the trainer; None: nothing here can be stale.
        quiesce: gets the phase and the names of those who are about to leave; returns when nobody else reads them (a
            save in the background, say).
        release: empties the caches of the device's allocator.
        barrier: returns when every rank has come.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        residents: Callable[[], Sequence[Resident]],
        schedule: Schedule,
        policy_version: Callable[[], int] | None = None,
        quiesce: Callable[[Phase, frozenset[str]], None] = _nobody,
        release: Callable[[], None] = _nothing,
        barrier: Callable[[], None] = _nothing,
    ) -> None:
        self.recorder = recorder
        self.last_border = Border()
        """Of the last phase that was entered."""
        self._residents = residents
        self._schedule = schedule
        self._policy_version = policy_version
        self._quiesce = quiesce
        self._release = release
        self._barrier = barrier
        self._inside: Phase | None = None

    def adopt(
        self,
        schedule: Schedule,
        *,
        policy_version: Callable[[], int],
        quiesce: Callable[[Phase, frozenset[str]], None] = _nobody,
    ) -> None:
        """From the next phase on this holds: what has been built is known only at the end of the load."""
        assert self._inside is None, "a phase goes on"
        self._schedule, self._policy_version, self._quiesce = schedule, policy_version, quiesce

    def admit_staying(self, phase: Phase) -> None:
        """Bring in what is away and would stay in `phase`: after the load, parts of an engine that slept through it.

        The plan counts with them from the first phase on; brought in one by one as they are needed they would make the
        first step unlike the others.
        """
        away = self._schedule.away(phase)
        for resident in self._residents():
            if resident.mover is not None and resident.name not in away and not resident.mover.present:
                resident.mover.admit()

    @contextmanager
    def enter(self, phase: Phase) -> Generator[None]:
        """Everything that the phase needs is on the device inside, and nothing that the plan has moved away.

        LOAD moves nothing: the residents come into being in it. After an exception, here or inside, the residents stay
        where they are; the recorder has said who holds what.

        Raises:
            PlanError: a phase that the plan did not foresee, or one that would sample with stale weights. Nothing has
                been moved, unless an engine lost its weights on the way.
        """
        assert self._inside is None, f"{phase} entered inside {self._inside}: phases do not nest"
        self._inside = phase
        try:
            if phase not in self._schedule.foreseen:
                raise PlanError(
                    f"the memory plan did not foresee a phase {phase.value}: it has looked at "
                    f"{', '.join(sorted(each.value for each in self._schedule.foreseen))}, and only those are known to "
                    "fit; plan the run with every phase that it enters"
                )
            if phase is not Phase.LOAD:
                self._check_versions(phase)
                self._cross_recorded(phase)
                self._check_versions(phase)
            with self.recorder.phase(phase):
                yield
        finally:
            self._inside = None

    def _cross_recorded(self, phase: Phase) -> None:
        try:
            with self.recorder.border() as moved:
                border = self._cross(phase)
                moved.evicted = sum(border.evicted.values())
                moved.admitted = sum(border.admitted.values())
        except BaseException:
            with self.recorder.phase(phase):  # a row that says `failed`, and the table of who holds what
                raise
        self.last_border = border

    def _cross(self, phase: Phase) -> Border:
        away, needed = self._schedule.away(phase), self._schedule.needs(phase)
        leaving = [pair for pair in self._movable(away) if pair[1].present]
        # What is made again anyway goes first: if the host has no room for what must survive, most is already free.
        leaving.sort(key=lambda pair: pair[0].survival is not Survival.REBUILD)
        self._quiesce(phase, frozenset(resident.name for resident, _ in leaving))
        evicted = {resident.name: mover.evict() for resident, mover in leaving}
        # Asked only now: an engine may have to drop more than it was told to.
        coming = [pair for pair in self._movable(needed) if not pair[1].present]
        coming.sort(key=lambda pair: pair[0].survival is Survival.REBUILD)
        # Also where nothing moves: what one phase has left in the cache does not fit the next one's shapes.
        self._release()
        self._barrier()
        admitted = {resident.name: mover.admit() for resident, mover in coming}
        return Border(evicted=evicted, admitted=admitted)

    def _movable(self, names: frozenset[str]) -> list[tuple[Resident, Mover]]:
        return [(each, each.mover) for each in self._residents() if each.name in names and each.mover is not None]

    def _check_versions(self, phase: Phase) -> None:
        if phase not in READS_ROLLOUT_WEIGHTS or self._policy_version is None:
            return
        wanted, needed = self._policy_version(), self._schedule.needs(phase)
        for resident in self._residents():
            if resident.name not in needed or resident.version is None:
                continue
            version = resident.version()
            if version != wanted:
                holds = "has no contents" if version < 0 else f"is of policy version {version}"
                raise PlanError(
                    f"the {phase.value} phase would sample with stale weights: {resident.name} {holds}, and the policy "
                    f"is at version {wanted}; sync first (the {Phase.SYNC.value} phase)"
                )

    # ── the recorder's, so that whoever has the memory of a run needs nothing else ──────────────────────────────────

    def begin_step(self, step: int) -> None:
        """See `Recorder.begin_step`."""
        self.recorder.begin_step(step)

    @property
    def step(self) -> int:
        """The step that rows belong to."""
        return self.recorder.step

    def seconds_by_phase(self) -> dict[str, float]:
        """See `Recorder.seconds_by_phase`."""
        return self.recorder.seconds_by_phase()

    def truncate(self, step: int) -> None:
        """Drop the rows of later steps (resume)."""
        self.recorder.truncate(step)

    def close(self) -> None:
        """End the recorder's thread and close its files."""
        self.recorder.close()
