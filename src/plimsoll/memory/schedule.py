"""Which residents a phase needs, and which the plan has moved away for it. Pure; neither torch nor files."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from plimsoll.config.planned import MemoryPlan
from plimsoll.memory import names
from plimsoll.memory.phases import Phase

NEEDS: Mapping[Phase, frozenset[str]] = {
    Phase.LOAD: frozenset(),
    Phase.ROLLOUT: frozenset({names.ROLLOUT_PARAMETERS, names.KV_CACHE}),
    Phase.EVAL: frozenset({names.ROLLOUT_PARAMETERS, names.KV_CACHE}),
    Phase.LOGPROB: frozenset({names.ACTOR_PARAMETERS}),
    Phase.REFERENCE: frozenset({names.REFERENCE_PARAMETERS}),
    Phase.UPDATE: frozenset({names.ACTOR_PARAMETERS, names.OPTIMIZER_STATE}),
    Phase.SYNC: frozenset({names.ACTOR_PARAMETERS, names.ROLLOUT_PARAMETERS}),
    Phase.SAVE: frozenset({names.ACTOR_PARAMETERS, names.OPTIMIZER_STATE}),
    Phase.EXPORT: frozenset({names.ACTOR_PARAMETERS}),
}
"""What must be on the device; a run that has no such resident (no reference, weights borrowed from the trainer) needs
nothing by that name. A streamed optimizer is a resident of the host and comes in by itself, within the step."""

READS_ROLLOUT_WEIGHTS = frozenset({Phase.ROLLOUT, Phase.EVAL})
"""Phases in which the engine's weights and KV cache must be of the policy's version."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Schedule:
    """The phases of a run. What a phase does not need may stay, unless it is listed in `evicted`."""

    foreseen: frozenset[Phase] = frozenset(Phase)
    """Phases that the plan has looked at; others are refused."""
    evicted: Mapping[Phase, frozenset[str]] = field(default_factory=dict[Phase, frozenset[str]])
    """Phase → residents that are off the device during it."""
    borrowed: frozenset[str] = frozenset()
    """Residents whose place another one takes: with the native engine on one rank in the master dtype the rollout's
    parameters are the actor's, so a rollout needs those."""

    @classmethod
    def of(cls, plan: MemoryPlan, *, borrowed: frozenset[str] = frozenset()) -> "Schedule":
        """As the plan says. Loading is always foreseen: the plan's other phases are what it ends in.

        A reference that is not kept on the device is there for its own phase only.
        """
        foreseen = {_phase_of(row.phase) for row in plan.phases} | {Phase.LOAD}
        evicted: dict[Phase, frozenset[str]] = {}
        for word, away in plan.choices.evicted.items():
            phase = _phase_of(word)
            # What only a part of a phase does without stays: nothing is moved within a phase.
            evicted[phase] = evicted.get(phase, frozenset(away)) & frozenset(away)
        if plan.choices.reference_placement != "device":
            for phase in foreseen - {Phase.REFERENCE}:
                evicted[phase] = evicted.get(phase, frozenset()) | {names.REFERENCE_PARAMETERS}
        return cls(foreseen=frozenset(foreseen), evicted=evicted, borrowed=borrowed)

    def needs(self, phase: Phase) -> frozenset[str]:
        """What must be on the device."""
        wanted = NEEDS[phase]
        if names.ROLLOUT_PARAMETERS in wanted & self.borrowed:
            wanted = (wanted - {names.ROLLOUT_PARAMETERS}) | {names.ACTOR_PARAMETERS}
        return wanted

    def away(self, phase: Phase) -> frozenset[str]:
        """What must not be on the device. A mistake of the plan if the phase needs it."""
        away = self.evicted.get(phase, frozenset())
        assert not away & self.needs(phase), f"{phase}: {sorted(away & self.needs(phase))} are needed and evicted"
        return away


def _phase_of(word: str) -> Phase:
    """`update/step` is a part of `update`."""
    return Phase(word.partition("/")[0])
