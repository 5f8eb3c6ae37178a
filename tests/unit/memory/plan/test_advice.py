"""Advice is what was seen to fit. The plan behind it is a small one here, with needs that can be read off."""

from collections.abc import Callable
from typing import Any

import pytest

from plimsoll.config.checkpoint import CheckpointConfig
from plimsoll.config.planned import Advice, MemoryPlan, PlannedHost, PlannedPhase, Refusal
from plimsoll.memory.plan.advice import advise, find_advice, refusal_error, size, with_settings
from plimsoll.memory.plan.job import MIB, Job, Machine
from tests.unit.memory.plan.support import TINY, gpu, make_choices, make_job, make_recipe

MACHINE = gpu(1)


def job_of(**sections: dict[str, Any]) -> Job:
    """Sequences of at most 1024 tokens."""
    base: dict[str, dict[str, Any]] = {
        "data": {"train": "x", "max_prompt_tokens": 512},
        "rollout": {"max_response_tokens": 512, "kv_memory": 64 * MIB},
        "algorithm": {"overlong_buffer": 0},
    }
    return make_job(make_recipe(**(base | sections)), TINY)


def planner(
    update: Callable[[Job], int], *, host: Callable[[Job], int] = lambda job: 0, have: int = 1000
) -> Callable[[Job], MemoryPlan]:
    """A plan of one phase: needs of device and node in bytes, and what both have."""

    def plan(job: Job) -> MemoryPlan:
        train = job.recipe.train
        needs = {"update/step": update(job), "host": host(job)}
        refusals = tuple(
            Refusal(slot="all", phase=phase, rank=0, need_bytes=need, have_bytes=have, largest="moments")
            for phase, need in needs.items()
            if need > have
        )
        row = PlannedPhase(
            slot="all",
            phase="update/step",
            device_bytes=needs["update/step"],
            capacity_bytes=have,
            headroom_bytes=have - needs["update/step"],
            residents={},
            workspace_bytes=0,
        )
        nodes = PlannedHost(node_peak_bytes=(needs["host"],), rank_peak_bytes=(needs["host"],), file_cache_bytes=(0,))
        checkpointing = "none" if train.activation_checkpointing == "auto" else train.activation_checkpointing
        choices = make_choices(
            device="cuda",
            token_budget=train.token_budget or 16384,
            optimizer_state="device" if train.optimizer_state == "auto" else train.optimizer_state,
            activation_checkpointing=checkpointing,
            kv_bytes=int(job.recipe.rollout.kv_memory or 0),
        )
        return MemoryPlan(
            fits=not refusals,
            phases=(row,),
            host=nodes,
            moved_bytes_per_step=0,
            wire_bytes_per_step=0,
            refusals=refusals,
            choices=choices,
        )

    return plan


def advice_of(job: Job, plan: Callable[[Job], MemoryPlan]) -> dict[tuple[str, ...], int]:
    """What is set → what it frees."""
    return {entry.set: entry.frees_bytes for entry in advise(job, MACHINE, plan(job), plan)}


def streamed(job: Job) -> bool:
    return job.recipe.train.optimizer_state == "streamed"


def budget(job: Job) -> int:
    return job.recipe.train.token_budget or 16384


def test_every_single_setting_that_is_enough_is_named_with_what_it_frees() -> None:
    plan = planner(lambda job: 1100 - 300 * streamed(job) - (16384 - budget(job)) // 64)
    assert advice_of(job_of(), plan) == {
        ("train.optimizer_state=streamed",): 300,
        ("train.token_budget=8192",): 128,  # the largest that is enough
    }


def test_a_micro_batch_is_never_made_smaller_than_the_longest_sequence() -> None:
    tried: list[int] = []

    def need(job: Job) -> int:
        tried.append(budget(job))
        return 2000 - 999 * (budget(job) == 1024)

    assert advice_of(job_of(), planner(need)) == {}
    assert advice_of(job_of(), planner(lambda job: need(job) - 1)) == {("train.token_budget=1024",): 999}
    assert min(tried) == 1024


def test_settings_that_are_not_enough_alone_are_combined_and_what_is_not_needed_is_dropped() -> None:
    def need(job: Job) -> int:
        train = job.recipe.train
        # Checkpointing takes a little, which in the end is not needed; chunks below 512 take nothing more.
        full = 10 * (train.activation_checkpointing == "full")
        chunk = 200 * (train.logprob_chunk <= 512)
        return 1500 - 300 * streamed(job) - full - chunk - 150 * (job.recipe.rollout.tensor_parallel == 2)

    job = job_of(rollout={"engine": "vllm"}, cluster={"ranks": 2})
    found = advise(job, gpu(1, ranks=2), planner(need)(job), planner(need))
    (entry,) = found
    assert set(entry.set) == {"train.optimizer_state=streamed", "train.logprob_chunk=512"}
    assert entry.frees_bytes == 500


def test_a_setting_that_moves_the_need_to_the_host_must_fit_there_too() -> None:
    plan = planner(lambda job: 1100 - 300 * streamed(job), host=lambda job: 1200 * streamed(job))
    job = job_of()
    found = find_advice(job, MACHINE, plan(job), plan)
    assert found.advice == ()
    assert found.nothing_helps is not None
    roomy = planner(lambda job: 1100 - 300 * streamed(job), host=lambda job: 900 * streamed(job))
    assert advice_of(job, roomy) == {("train.optimizer_state=streamed",): 300}


def test_a_refused_node_is_helped_by_moments_on_the_device() -> None:
    plan = planner(lambda job: 100 + 500 * (not streamed(job)), host=lambda job: 700 + 600 * streamed(job))
    job = job_of(train={"optimizer_state": "streamed"})
    assert advice_of(job, plan) == {("train.optimizer_state=device",): 600}


def test_a_setting_that_makes_it_worse_is_not_part_of_a_combination() -> None:
    def need(job: Job) -> int:
        worse = 800 * (job.recipe.train.activation_checkpointing != "auto")
        return 1500 - 300 * streamed(job) + worse - 250 * (job.recipe.train.logprob_chunk <= 1024)

    (entry,) = advise(job_of(), MACHINE, planner(need)(job_of()), planner(need))
    assert set(entry.set) == {"train.optimizer_state=streamed", "train.logprob_chunk=1024"}


def test_engines_are_shared_by_so_many_ranks_only_as_divide_all_of_them() -> None:
    """Nodes of 4 ranks, 6 in all: an engine on 4 of them would leave 2 over."""
    plan = planner(lambda job: 2100 // job.recipe.rollout.tensor_parallel)
    job = job_of(
        rollout={"engine": "vllm"},
        cluster={"ranks": 6, "ranks_per_node": 4},
        data={"train": "x", "prompts_per_step": 6},
    )
    assert advise(job, gpu(1, ranks=6, ranks_per_node=4), plan(job), plan) == ()
    roomy = planner(lambda job: 1900 // job.recipe.rollout.tensor_parallel)
    (entry,) = advise(job, gpu(1, ranks=6, ranks_per_node=4), roomy(job), roomy)
    assert entry.set == ("rollout.tensor_parallel=2",)


def test_what_breaks_a_rule_of_the_recipe_is_not_advice() -> None:
    """Responses may be shortened down to the buffer over which long ones are penalised."""
    plan = planner(lambda job: 900 + job.longest_sequence - 512)
    job = job_of(algorithm={"overlong_buffer": 200})
    assert ("rollout.max_response_tokens=256",) not in advice_of(job, plan)
    enough = planner(lambda job: 700 + job.longest_sequence - 512)
    assert advice_of(job, enough)[("rollout.max_response_tokens=256",)] == 256


def test_where_nothing_helps_the_advice_is_empty_and_the_message_says_how_much_is_left() -> None:
    plan = planner(lambda job: 5000 - 300 * streamed(job))
    job = job_of()
    found = find_advice(job, MACHINE, plan(job), plan)
    assert found.advice == ()
    assert "train.optimizer_state=streamed" in (found.nothing_helps or "")
    assert "4.59 KiB of 1000 B" in (found.nothing_helps or "")
    error = refusal_error(plan(job))
    assert "update/step on rank 0 needs 4.88 KiB and has 1000 B, 3.91 KiB short" in error.causes[0]
    assert "the largest part is moments" in error.causes[0]
    assert "no setting" in error.causes[1]
    said = refusal_error(plan(job).model_copy(update={"notes": ("other", found.nothing_helps)}))
    assert said.causes[1:] == (found.nothing_helps,)


def test_sizes_and_switches_are_written_as_the_command_line_takes_them() -> None:
    plan = planner(lambda job: 900 + int(job.recipe.rollout.kv_memory or 0) // MIB * 2)
    assert advice_of(job_of(), plan) == {("rollout.kv_memory=48MiB",): 32}
    job = job_of()
    recipe = job.recipe.model_copy(update={"checkpoint": CheckpointConfig(background=True)})
    saving = planner(lambda job: 10, host=lambda job: 900 + 200 * job.recipe.checkpoint.background)
    assert advice_of(make_job(recipe, TINY), saving) == {("checkpoint.background=false",): 200}


def test_precision_is_never_advised() -> None:
    plan = planner(lambda job: 2000 if job.recipe.model.dtype == "float32" else 10)
    assert advice_of(job_of(), plan) == {}


def test_settings_change_the_work_that_follows_from_them() -> None:
    job = job_of(rollout={"tensor_parallel": 1, "engine": "vllm"}, cluster={"ranks": 4})
    changed = with_settings(
        job, [("rollout.max_response_tokens", 100), ("data.max_prompt_tokens", 50), ("rollout.tensor_parallel", 4)]
    )
    assert (changed.longest_prompt, changed.longest_sequence) == (50, 150)
    assert changed.num_sequences == 4 * job.num_sequences
    assert changed.recipe.rollout.max_response_tokens == 100
    assert job.recipe.rollout.max_response_tokens == 256  # the job itself is as it was


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (79 * 2**30, "79.0 GiB"), (312 * 10**9, "291 GiB")],
)
def test_sizes_have_three_digits(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_a_node_that_nothing_helps_wants_more_host_memory_and_not_larger_devices() -> None:
    plan = planner(lambda job: 100, host=lambda job: 5000)
    found = find_advice(job_of(), MACHINE, plan(job_of()), plan)
    assert "the host of a node still needs 4.88 KiB of 1000 B. It takes more host memory" in (found.nothing_helps or "")


def test_moments_are_not_streamed_where_the_host_is_the_device() -> None:
    plan = planner(lambda job: 1100 - 300 * streamed(job))
    cpu = Machine(device="cpu", device_bytes=1000, host_bytes=1000, ranks=1, ranks_per_node=1)
    assert advise(job_of(), MACHINE, plan(job_of()), plan)
    assert advise(job_of(), cpu, plan(job_of()), plan) == ()


def test_what_is_freed_is_said_of_the_update_where_a_load_that_measures_lacks_as_much() -> None:
    plan = planner(lambda job: 1500)(job_of())
    (same,) = plan.refusals
    load = same.model_copy(update={"phase": "load"})
    advised = plan.model_copy(update={"refusals": (load, same), "advice": (Advice(set=("a.b=1",), frees_bytes=600),)})
    assert refusal_error(advised).causes[-1] == "a.b=1 alone makes it fit: 600 B less in update/step"


def test_a_setting_that_helps_only_once_another_phase_fits_is_part_of_a_combination() -> None:
    """Smaller chunks cost the update 100 here and give the node 50: alone that is worse."""

    def chunked(job: Job) -> bool:
        return job.recipe.train.logprob_chunk < 2048

    def update(job: Job) -> int:
        return 1600 - 700 * (job.longest_sequence < 1024) + 100 * chunked(job)

    plan = planner(update, host=lambda job: 1040 - 50 * chunked(job))
    (entry,) = advise(job_of(), MACHINE, plan(job_of()), plan)
    assert entry.set == ("train.logprob_chunk=1024", "rollout.max_response_tokens=256")
    assert entry.frees_bytes == 600
