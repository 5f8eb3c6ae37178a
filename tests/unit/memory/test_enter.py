"""The border between phases: its order, what it refuses, and the hand-over from training to sampling on one device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll.errors import PlanError
from plimsoll.memory import names
from plimsoll.memory.enter import Memory
from plimsoll.memory.phases import Phase
from plimsoll.memory.resident import Place, Resident, Survival
from plimsoll.memory.schedule import Schedule
from plimsoll.rollout.fake import FakeEngine
from plimsoll.rollout.movers import kv_resident, weights_resident
from tests.unit.memory.colocated import ACTOR, AWAY, KV, MOMENTS, PLANNED, WEIGHTS, Colocated


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Colocated]:
    colocated = Colocated(tmp_path)
    yield colocated
    colocated.memory.close()


def last(events: list[str], event: str, before: int) -> int:
    """Index of the last such event before an index; -1: there is none."""
    return max((i for i, each in enumerate(events[:before]) if each == event), default=-1)


def test_hand_over_from_training_to_sampling_in_the_order_that_never_holds_both(both: Colocated) -> None:
    both.step()
    both.events.clear()
    cycles: list[list[str]] = []
    for _ in range(2):
        both.step()
        cycles.append(list(both.events))
        both.events.clear()
    first = cycles[0]
    weights, kv = first.index("engine.wake(weights)"), first.index("engine.wake(kv_cache)")
    freed = last(first, "trainer.evict(optimizer_state)", weights)
    assert 0 <= freed < last(first, "trainer.empty_cache", weights)
    assert last(first, "engine.bucket", len(first)) < kv
    left = last(first, "trainer.evict(actor_parameters)", kv)
    assert weights < left < last(first, "trainer.empty_cache", kv)
    assert kv < first.index("generate") < first.index("engine.sleep(kv_cache)")
    assert first.index("engine.sleep(weights)") < first.index("trainer.admit(actor_parameters)")
    assert cycles[1] == first


def test_the_device_never_holds_more_than_the_fullest_phase_of_the_plan(both: Colocated) -> None:
    peak = max(PLANNED.values())
    for _ in range(3):
        both.step()
    assert len(both.used) > 20
    assert max(both.used) == peak
    assert both.device.read().reserved_peak <= peak
    for row in both.rows():  # and each phase no more than its own
        assert row["device_used"] <= row["device_non_torch"] + row["device_reserved_peak"] <= PLANNED[row["phase"]]


def test_a_device_with_room_for_one_phase_at_a_time_is_enough(tmp_path: Path) -> None:
    both = Colocated(tmp_path, total=max(PLANNED.values()))
    both.step()
    both.step()
    both.memory.close()


def test_one_border_has_one_order(both: Colocated) -> None:
    both.sync()
    both.events.clear()
    with both.memory.enter(Phase.ROLLOUT):
        pass
    assert both.events == [
        "quiesce(rollout: actor_parameters)",
        "trainer.evict(actor_parameters)",
        "trainer.empty_cache",
        "barrier",
        "engine.wake(kv_cache)",
    ]
    both.events.clear()
    with both.memory.enter(Phase.UPDATE):
        inside = list(both.events)
    assert inside == [
        "quiesce(update: kv_cache rollout_parameters)",
        "engine.sleep(weights)",
        "engine.sleep(kv_cache)",
        "trainer.empty_cache",
        "barrier",
        "trainer.admit(actor_parameters)",
        "trainer.admit(optimizer_state)",
    ]
    assert both.memory.last_border.evicted == {names.ROLLOUT_PARAMETERS: 0, names.KV_CACHE: 0}
    assert both.memory.last_border.admitted == {names.ACTOR_PARAMETERS: ACTOR, names.OPTIMIZER_STATE: MOMENTS}
    rollout, update = both.rows()[-2:]
    assert (rollout["evicted"], rollout["admitted"]) == (ACTOR, 0)
    assert (update["evicted"], update["admitted"]) == (0, ACTOR + MOMENTS)


def test_what_is_made_again_leaves_before_what_must_survive(both: Colocated) -> None:
    schedule = Schedule(evicted={Phase.LOGPROB: frozenset({names.OPTIMIZER_STATE, names.ROLLOUT_PARAMETERS})})
    memory = Memory(both.recorder, residents=lambda: both.residents, schedule=schedule)
    both.engine.wake(("weights",))
    both.events.clear()
    with memory.enter(Phase.LOGPROB):
        pass
    assert both.events == ["engine.sleep(weights)", "trainer.evict(optimizer_state)"]


def test_a_border_that_moves_nothing_empties_the_caches_and_meets_the_other_ranks(both: Colocated) -> None:
    with both.memory.enter(Phase.UPDATE):
        pass
    assert both.events == ["quiesce(update: )", "trainer.empty_cache", "barrier"]
    assert both.memory.last_border.evicted == {}


def test_loading_moves_nothing(both: Colocated) -> None:
    with both.memory.enter(Phase.LOAD):
        pass
    assert both.events == []
    assert [row["phase"] for row in both.rows()] == ["load"]


def test_a_phase_that_the_plan_did_not_foresee_is_refused_and_nothing_moves(both: Colocated) -> None:
    schedule = Schedule(foreseen=frozenset({Phase.SYNC, Phase.UPDATE}), evicted=AWAY)
    memory = Memory(both.recorder, residents=lambda: both.residents, schedule=schedule)
    with pytest.raises(PlanError, match=r"did not foresee a phase rollout.*sync, update"), memory.enter(Phase.ROLLOUT):
        pytest.fail("it was entered")
    assert both.events == []
    assert both.rows() == []
    with memory.enter(Phase.SYNC):  # the refusal is not a phase
        pass


def test_sampling_with_weights_of_another_version_is_refused(both: Colocated) -> None:
    both.sync()
    both.version += 1
    both.events.clear()
    stale = r"rollout phase.*stale weights: rollout_parameters is of policy version 0.*version 1; sync first"
    with pytest.raises(PlanError, match=stale), both.memory.enter(Phase.ROLLOUT):
        pytest.fail("it was entered")
    assert both.events == []
    both.sync()
    with both.memory.enter(Phase.ROLLOUT):
        pass


def test_weights_that_came_back_from_an_eviction_are_of_no_version_until_they_are_synced(both: Colocated) -> None:
    both.sync()
    with both.memory.enter(Phase.UPDATE):  # a step that was skipped: the policy's version stays
        pass
    with pytest.raises(PlanError, match="rollout_parameters has no contents, and"), both.memory.enter(Phase.EVAL):
        pytest.fail("it was entered")
    with both.memory.enter(Phase.SYNC):
        pass  # memory alone is no sync
    assert both.engine.awake("weights")
    with pytest.raises(PlanError, match="rollout_parameters has no contents, and"), both.memory.enter(Phase.ROLLOUT):
        pytest.fail("it was entered")


def test_an_engine_that_drops_more_than_it_was_told_gets_it_back_and_is_not_trusted(both: Colocated) -> None:
    class AllAtOnce(FakeEngine):
        def sleep(self, parts: Any) -> None:
            FakeEngine.sleep(self, [part for part in ("weights", "kv_cache") if self.awake(part)])

    engine = AllAtOnce(script=lambda *_: (), events=both.events)
    both.residents[2:] = [weights_resident(engine, WEIGHTS), kv_resident(engine, KV, Place.ENGINE)]
    with both.memory.enter(Phase.SYNC):
        assert engine.awake("weights")
        assert not engine.awake("kv_cache")
    assert both.events[-1] == "engine.wake(weights)"
    with pytest.raises(PlanError, match="no contents"), both.memory.enter(Phase.ROLLOUT):
        pytest.fail("it was entered")


def test_a_rollout_with_borrowed_weights_needs_those_of_the_trainer(both: Colocated) -> None:
    actor = both.residents[0]
    both.residents[:] = [
        Resident(
            name=actor.name, survival=actor.survival, measured=actor.measured, mover=actor.mover, version=lambda: 3
        )
    ]
    schedule = Schedule(
        evicted={Phase.SAVE: frozenset(), Phase.REFERENCE: frozenset({names.ACTOR_PARAMETERS})},
        borrowed=frozenset({names.ROLLOUT_PARAMETERS}),
    )
    version = 3
    memory = Memory(both.recorder, residents=lambda: both.residents, schedule=schedule, policy_version=lambda: version)
    with memory.enter(Phase.REFERENCE):
        assert not both.actor.present
    with memory.enter(Phase.ROLLOUT):
        assert both.actor.present
    version = 4
    with pytest.raises(PlanError, match="actor_parameters is of policy version 3"), memory.enter(Phase.ROLLOUT):
        pytest.fail("it was entered")


def test_after_an_exception_inside_the_residents_stay_where_they_are(both: Colocated) -> None:
    both.sync()

    def fails() -> None:
        both.events.clear()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), both.memory.enter(Phase.ROLLOUT):
        fails()
    assert both.events == []
    assert not both.actor.present
    assert both.engine.awake("kv_cache")
    assert both.rows()[-1]["failed"]
    with both.memory.enter(Phase.UPDATE):
        assert both.actor.present


def test_a_border_without_room_leaves_a_failed_row_and_the_table_of_who_holds_what(both: Colocated) -> None:
    both.sync()
    both.moments.fails = torch.OutOfMemoryError("the fake device is full")
    with pytest.raises(torch.OutOfMemoryError) as caught, both.memory.enter(Phase.UPDATE):
        pytest.fail("it was entered")
    row = both.rows()[-1]
    assert (row["phase"], row["failed"]) == ("update", True)
    assert "actor_parameters" in caught.value.__notes__[0]
    both.moments.fails = None
    with both.memory.enter(Phase.UPDATE):  # nothing was lost
        assert both.moments.present


def test_phases_do_not_nest_and_the_border_of_the_inner_one_is_not_crossed(both: Colocated) -> None:
    with both.memory.enter(Phase.UPDATE):
        both.events.clear()
        with pytest.raises(AssertionError, match="do not nest"), both.memory.enter(Phase.SYNC):
            pytest.fail("it was entered")
        assert both.events == []


def test_a_resident_that_cannot_move_stays_whatever_the_plan_says(both: Colocated) -> None:
    both.residents[1] = Resident(name=names.OPTIMIZER_STATE, survival=Survival.KEEP, measured=lambda: MOMENTS)
    with both.memory.enter(Phase.SYNC):
        assert both.moments.present


def test_what_slept_through_the_load_is_there_from_the_first_phase_on_unless_it_is_away_then(both: Colocated) -> None:
    both.events.clear()
    assert not both.engine.awake("kv_cache")
    schedule = Schedule(evicted={Phase.SYNC: frozenset({names.KV_CACHE})})
    memory = Memory(both.recorder, residents=lambda: both.residents, schedule=schedule)
    memory.admit_staying(Phase.SYNC)
    assert both.engine.awake("weights")
    assert not both.engine.awake("kv_cache")
    Memory(both.recorder, residents=lambda: both.residents, schedule=Schedule()).admit_staying(Phase.SYNC)
    assert both.engine.awake("kv_cache")
