"""Which residents a phase needs, and which are away, as the plan says."""

from typing import Any

import pytest

from plimsoll.config.planned import Choices, MemoryPlan, PlannedHost, PlannedPhase
from plimsoll.memory import names
from plimsoll.memory.phases import Phase
from plimsoll.memory.schedule import NEEDS, Schedule


def plan(evicted: dict[str, tuple[str, ...]], *phases: str, placement: Any = "device") -> MemoryPlan:
    rows = tuple(
        PlannedPhase(
            slot="all", phase=name, device_bytes=1, capacity_bytes=2, headroom_bytes=1, residents={}, workspace_bytes=0
        )
        for name in phases
    )
    return MemoryPlan(
        fits=True,
        phases=rows,
        host=PlannedHost(node_peak_bytes=(0,), rank_peak_bytes=(0,), file_cache_bytes=(0,)),
        moved_bytes_per_step=0,
        wire_bytes_per_step=0,
        choices=Choices(
            device="cuda",
            compute_dtype="bfloat16",
            activation_checkpointing="none",
            token_budget=1,
            optimizer_state="device",
            reference_placement=placement,
            kv_bytes=1,
            evicted=evicted,
        ),
    )


def test_the_schedule_is_the_plan_s() -> None:
    schedule = Schedule.of(
        plan(
            {
                "rollout": (names.OPTIMIZER_STATE,),
                "update/gradients": (names.KV_CACHE, names.ROLLOUT_PARAMETERS),
                "update/step": (names.KV_CACHE,),
            },
            "rollout",
            "update/gradients",
            "update/step",
        )
    )
    assert schedule.foreseen == {Phase.LOAD, Phase.ROLLOUT, Phase.UPDATE}
    assert schedule.away(Phase.ROLLOUT) == {names.OPTIMIZER_STATE}
    assert schedule.away(Phase.UPDATE) == {names.KV_CACHE}  # within a phase nothing moves
    assert schedule.away(Phase.SYNC) == frozenset()


@pytest.mark.parametrize("placement", ["page_cache", "ring", "arena"])
def test_a_reference_that_is_not_kept_on_the_device_is_there_for_its_own_phase_only(placement: str) -> None:
    found = plan({"rollout": (names.OPTIMIZER_STATE,)}, "rollout", "reference", "update/step", placement=placement)
    schedule = Schedule.of(found)
    assert schedule.away(Phase.ROLLOUT) == {names.OPTIMIZER_STATE, names.REFERENCE_PARAMETERS}
    assert schedule.away(Phase.UPDATE) == {names.REFERENCE_PARAMETERS}
    assert schedule.away(Phase.REFERENCE) == frozenset()


@pytest.mark.parametrize("phase", [phase for phase in Phase if NEEDS[phase]])
def test_a_plan_that_evicts_what_its_phase_needs_is_our_mistake(phase: Phase) -> None:
    (name, *_) = sorted(NEEDS[phase])
    with pytest.raises(AssertionError, match="needed and evicted"):
        Schedule(evicted={phase: frozenset({name})}).away(phase)
