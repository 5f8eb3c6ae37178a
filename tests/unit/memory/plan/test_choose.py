"""What is chosen where the recipe leaves it open, and what is refused."""

from collections.abc import Mapping
from typing import Any

import pytest

from plimsoll.config.planned import MemoryPlan
from plimsoll.errors import RefusedError
from plimsoll.memory.phases import Phase
from plimsoll.memory.plan.choose import choose, first_choices, plan, plan_without_advice
from plimsoll.memory.plan.combine import Tables
from plimsoll.memory.plan.constants import ALLOCATOR_SHARE, KV_SHARE
from plimsoll.memory.plan.device import residents_of, workspace_of
from plimsoll.memory.plan.engine import sequence_bytes, useful_kv
from plimsoll.memory.plan.job import GIB, Job, Machine
from plimsoll.memory.schedule import Schedule
from tests.unit.memory.plan.support import REPORT_A, REPORT_B, TINY, cpu, gpu, make_job, make_recipe

H200 = gpu(139)


def job_of(config: Mapping[str, Any] = REPORT_B, **sections: dict[str, Any]) -> Job:
    """One rank with vLLM, unless told otherwise."""
    sections.setdefault("rollout", {"engine": "vllm"})
    return make_job(make_recipe(**sections), config)


def report_a(**train: Any) -> Job:
    """Four nodes of eight GPUs, two groups of 16."""
    recipe = make_recipe(
        cluster={"ranks": 32, "ranks_per_node": 8},
        parallel={"shard": 16},
        rollout={"engine": "vllm", "tensor_parallel": 8, "max_response_tokens": 8192, "samples_per_prompt": 16},
        data={"train": "x", "prompts_per_step": 512, "max_prompt_tokens": 2048},
        algorithm={"kl_coefficient": 0.001},
        train={"mini_batches_per_step": 16} | train,
    )
    return make_job(recipe, REPORT_A)


A800 = gpu(79, ranks=32, ranks_per_node=8, host_gib=1800)


def evicted_is_allowed(found: MemoryPlan) -> None:
    """What the schedule would refuse is an assertion there."""
    schedule = Schedule.of(found)
    for phase in Phase:
        schedule.away(phase)


def test_with_room_for_all_nothing_is_moved_or_recomputed() -> None:
    job = job_of()
    found = plan(job, H200)
    assert found.fits
    assert found.choices == first_choices(job, H200)
    assert found.choices.evicted == {}
    assert found.choices.kv_bytes == useful_kv(job, found.choices)
    assert found.choices.activation_checkpointing == "none"
    assert found.choices.compute_dtype == "bfloat16"
    assert found.choices.token_budget == 16384
    assert found.moved_bytes_per_step == 0


def test_less_and_less_room() -> None:
    """Recomputing comes before moving, and the refusal last; every plan that fits does so in each phase."""
    order = {"none": 0, "selective": 1, "full": 2}
    seen: list[tuple[int, int]] = []
    for gib in (139, 60, 40, 32, 28, 25, 22, 20, 18, 16, 14, 12, 10, 8):
        found = plan_without_advice(job_of(), gpu(gib))
        evicted_is_allowed(found)
        assert found.fits == all(row.headroom_bytes >= 0 for row in found.phases)
        if not found.fits:
            break
        assert all(row.headroom_bytes >= 0.9 * ALLOCATOR_SHARE * row.capacity_bytes for row in found.phases) or gib < 20
        seen.append((found.moved_bytes_per_step, order[found.choices.activation_checkpointing]))
    else:
        pytest.fail("everything fitted")
    assert [moved for moved, _ in seen] == sorted(moved for moved, _ in seen)
    in_place = [again for moved, again in seen if not moved]
    assert in_place == sorted(in_place)
    assert {0, 2} <= set(in_place)
    assert seen[-1][0] > 0


def test_what_is_evicted_is_dropped_first_and_only_where_it_must_be() -> None:
    job = job_of(train={"activation_checkpointing": "none", "token_budget": 16384, "optimizer_state": "device"})
    whole = plan_without_advice(job, H200)
    fullest = whole.phase("update")
    assert fullest is not None
    cache = fullest.residents["kv_cache"]
    tight = Machine(
        device="cuda",
        device_bytes=int((fullest.device_bytes - cache // 2) / (1 - ALLOCATOR_SHARE)),
        host_bytes=512 * GIB,
        ranks=1,
        ranks_per_node=1,
    )
    found = plan_without_advice(job, tight)
    assert found.fits
    # It comes back when a phase needs it, and not before.
    assert found.choices.evicted == dict.fromkeys(("update", "sync", "save"), ("kv_cache",))
    assert found.choices.kv_bytes == cache
    assert found.moved_bytes_per_step == 0


def test_a_save_keeps_the_weights_that_a_sync_has_brought() -> None:
    """Even where it does not fit with them: dropped in between they would be missing in the next rollout."""
    found = plan_without_advice(job_of(train={"optimizer_state": "device"}), gpu(13))
    save = next(row for row in found.phases if row.phase == "save")
    assert save.headroom_bytes < 0
    assert "rollout_parameters" in save.residents
    assert found.choices.evicted["save"] == ("kv_cache",)
    assert "rollout_parameters" in found.choices.evicted["update"]


def test_explicit_settings_win() -> None:
    settings = {
        "optimizer_state": "streamed",
        "activation_checkpointing": "selective",
        "token_budget": 4096,
    }
    choices = choose(job_of(train=settings, model={"path": "x", "compute_dtype": "float32"}), H200)
    assert (choices.optimizer_state, choices.activation_checkpointing) == ("streamed", "selective")
    assert (choices.token_budget, choices.compute_dtype) == (4096, "float32")
    asked = job_of(rollout={"engine": "vllm", "kv_memory": 3 * GIB})
    assert choose(asked, H200).kv_bytes == 3 * GIB


def test_the_cache_of_the_native_engine_is_of_whole_slots() -> None:
    job = job_of(TINY, rollout={"engine": "native", "kv_memory": 1_000_000, "max_response_tokens": 16})
    choices = choose(job, cpu(4))
    one = sequence_bytes(job, choices)
    assert choices.kv_bytes == 1_000_000 // one * one
    with pytest.raises(RefusedError, match=r"rollout\.kv_memory: 1000 bytes do not hold one sequence"):
        choose(job_of(TINY, rollout={"engine": "native", "kv_memory": 1000}), cpu(4))


def test_a_cpu_moves_nothing_and_gives_the_cache_a_quarter() -> None:
    job = job_of(TINY, rollout={"engine": "native", "samples_per_prompt": 64}, algorithm={"kl_coefficient": 0.1})
    machine = cpu(0.2)
    choices = choose(job, machine)
    assert (choices.compute_dtype, choices.activation_checkpointing, choices.token_budget) == ("float32", "none", 2048)
    assert (choices.optimizer_state, choices.reference_placement, choices.evicted) == ("device", "device", {})
    one = sequence_bytes(job, choices)
    assert choices.kv_bytes == int(KV_SHARE * machine.device_bytes) // one * one
    assert choices.kv_bytes < useful_kv(job, choices)


def test_a_cache_for_one_sequence_is_the_least() -> None:
    job = job_of(train={"optimizer_state": "device", "activation_checkpointing": "full"})
    found = plan_without_advice(job, gpu(10))
    assert not found.fits
    assert found.choices.kv_bytes >= sequence_bytes(job, found.choices)


def test_the_budget_falls_last_and_never_below_a_sequence() -> None:
    sections: dict[str, Any] = {
        "rollout": {"engine": "vllm", "max_response_tokens": 3584},
        "train": {"optimizer_state": "device", "activation_checkpointing": "none"},
    }
    budgets = [choose(job_of(**sections), gpu(gib)).token_budget for gib in (139, 60, 45, 35, 30, 26)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] == 16384
    assert budgets[-1] == 4096


def test_a_reference_that_no_file_holds_goes_to_the_arena() -> None:
    frozen: dict[str, Any] = {"algorithm": {"kl_coefficient": 0.1}, "train": {"optimizer_state": "device"}}
    assert choose(job_of(**frozen), H200).reference_placement == "device"
    tight = gpu(19.5)
    assert choose(job_of(**frozen), tight).reference_placement == "page_cache"
    made = job_of(model={"init": "random", "config": "x"}, **frozen)
    assert choose(made, tight).reference_placement == "arena"


def test_report_a_is_streamed() -> None:
    """80 B parameters over 16 ranks: parameters, gradients and moments are 74 GiB of 79."""
    found = plan(report_a(), A800)
    assert found.fits
    assert found.choices.optimizer_state == "streamed"
    evicted_is_allowed(found)
    on_device = found.choices.model_copy(update={"optimizer_state": "device"})
    residents = residents_of(report_a(), on_device, A800)
    trained = sum(residents[name] for name in ("actor_parameters", "actor_gradients", "optimizer_state"))
    assert trained == pytest.approx(74.3 * GIB, rel=0.01)
    assert len(set(found.host.node_peak_bytes)) == 1


def test_report_a_does_not_fit_with_its_moments_on_the_device() -> None:
    found = plan_without_advice(report_a(optimizer_state="device"), A800)
    assert not found.fits
    # The calibration of the load takes what an update takes.
    updates = [refusal for refusal in found.refusals if refusal.phase != "load"]
    worst = max(updates, key=lambda refusal: refusal.need_bytes - refusal.have_bytes)
    assert (worst.slot, worst.phase, worst.rank) == ("all", "update/gradients", 0)
    assert worst.have_bytes == 79 * GIB
    assert worst.need_bytes > 80 * GIB
    assert worst.largest == "optimizer_state"


def test_each_phase_that_does_not_fit_is_refused() -> None:
    found = plan_without_advice(job_of(train={"optimizer_state": "device"}), gpu(5))
    over = [row.phase for row in found.phases if row.headroom_bytes < 0]
    assert [refusal.phase for refusal in found.refusals if refusal.phase != "host"] == over
    assert len(over) >= 2
    for refusal in found.refusals:
        assert refusal.need_bytes > refusal.have_bytes


def test_advice_applied_makes_it_fit() -> None:
    found = plan(job_of(train={"optimizer_state": "device", "activation_checkpointing": "full"}), gpu(17))
    assert not found.fits
    assert any(entry.set == ("train.optimizer_state=streamed",) for entry in found.advice)


@pytest.mark.parametrize("engine", ["vllm", "native"])
@pytest.mark.parametrize("kv_bytes", [0, GIB, 40 * GIB])
def test_the_search_counts_with_the_workspace_of_the_plan(engine: str, kv_bytes: int) -> None:
    job = job_of(rollout={"engine": engine})
    tables = Tables(job, H200)
    other = first_choices(job, H200).model_copy(update={"kv_bytes": 2 * GIB})
    for moments in ("device", "streamed"):
        for recomputed in ("none", "full"):
            changes = {"kv_bytes": kv_bytes, "optimizer_state": moments, "activation_checkpointing": recomputed}
            choices = other.model_copy(update=changes)
            for phase in tables.phases:
                tables.workspace(other, phase)  # what another size has left in the table must not count
                assert tables.workspace(choices, phase) == sum(workspace_of(job, choices, phase).values()), phase
