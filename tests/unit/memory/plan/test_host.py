"""Host memory of the plan: every consumer by the bytes that the code takes, nodes by their ranks."""

from typing import Any

import pytest
import torch

from plimsoll.config.checkpoint import CheckpointConfig
from plimsoll.config.planned import PlannedPhase
from plimsoll.memory.plan import host
from plimsoll.memory.plan.host import (
    HOST,
    PROCESS,
    PROCESS_BYTES,
    all_tensors,
    arena_bytes,
    file_cache,
    host_consumers,
    host_plan,
    host_refusals,
    phase_host_bytes,
    sleep_host_bytes,
    with_host_bytes,
)
from plimsoll.memory.plan.job import GIB, MIB, Job
from plimsoll.model.sizes import read_sizes
from plimsoll.update.streamed import plan_stream
from plimsoll.weights import arena, limits, read, ring
from tests.unit.memory.plan.support import REPORT_A, TINY, cpu, gpu, make_choices, make_job, make_recipe

GB = 10**9


def row(phase: str, device_bytes: int = 0) -> PlannedPhase:
    """A row of the device's part."""
    return PlannedPhase(
        slot="all",
        phase=phase,
        device_bytes=device_bytes,
        capacity_bytes=0,
        headroom_bytes=0,
        residents={},
        workspace_bytes=0,
    )


def tiny(**sections: dict[str, Any]) -> Job:
    """A small model that is read from files; no sample columns to speak of."""
    small: dict[str, dict[str, Any]] = {"data": {"prompts_per_step": 1, "max_prompt_tokens": 1, "train": "x"}}
    recipe = make_recipe(**(small | sections))
    return make_job(recipe, TINY, longest_sequence=0)


def test_constants_are_those_of_the_code_that_takes_the_memory() -> None:
    assert limits.ARENA_ALIGNMENT == 64
    assert arena.HostArena({"odd": [1, 65]}, device=torch.device("cpu")).num_bytes == 64 + 128
    assert read.READERS is limits.READERS
    for device in ("cpu",):
        made = ring.StagingRing(device=torch.device(device))
        assert (made.num_bytes, made.buffer_bytes) == (limits.RING_BYTES, limits.RING_BUFFER_BYTES[device])


def test_streamed_moments_take_what_the_streamed_optimizer_lays_out() -> None:
    job = tiny()
    parameters = {tensor.name: torch.empty(tensor.shape, device="meta") for tensor in all_tensors(job.sizes)}
    for group_bytes in (2**12, 2**16, limits.STREAM_GROUP_BYTES):  # slices of large ones; shared storages; all in one
        storages = plan_stream(parameters, group_bytes).storages
        taken = sum(-(-size // limits.ARENA_ALIGNMENT) * limits.ARENA_ALIGNMENT for size in storages)
        found = host_consumers(job, make_choices(optimizer_state="streamed"), cpu(1), row("update/step"))
        assert found["optimizer_state"] == taken


def test_arenas_count_in_every_phase_and_staging_where_it_is_used() -> None:
    job = tiny(algorithm={"kl_coefficient": 0.1})
    choices = make_choices(
        device="cuda",
        compute_dtype="bfloat16",
        reference_placement="arena",
        evicted={"rollout": ("actor_parameters", "optimizer_state", "kv_cache")},
    )
    shard = arena_bytes(job.sizes, 4, 1)
    stays = {PROCESS: PROCESS_BYTES["cuda"], "reference_arena": arena_bytes(job.sizes, 2, 1), "host_arena": 3 * shard}
    machine = gpu(80)
    assert host_consumers(job, choices, machine, row("update/step")) == stays
    assert host_consumers(job, choices, machine, row("load")) == stays | {"staging_ring": 192 * MIB}
    assert host_consumers(job, choices, machine, row("save")) == stays | {"checkpoint_staging": 64 * MIB}
    assert phase_host_bytes(job, choices, machine, row("save", 10 * GIB)) == sum(stays.values()) + 64 * MIB


def test_a_save_in_the_background_stages_in_every_phase_after_the_load() -> None:
    job = tiny()
    recipe = job.recipe.model_copy(update={"checkpoint": CheckpointConfig(background=True)})
    job = make_job(recipe, TINY, longest_sequence=0)
    phases, choices = ("load", "rollout", "update/step"), make_choices(device="cuda")
    found = [host_consumers(job, choices, gpu(80), row(phase)) for phase in phases]
    assert ["checkpoint_staging" in each for each in found] == [False, True, True]
    # On a CPU tensors are written from where they are.
    assert "checkpoint_staging" not in host_consumers(job, make_choices(), cpu(1), row("save"))


@pytest.mark.parametrize(("placement", "expected"), [("ring", 192 * MIB), ("page_cache", 0), ("device", 0)])
def test_a_reference_that_is_read_through_the_ring_takes_it_for_its_pass(placement: str, expected: int) -> None:
    job = tiny(algorithm={"kl_coefficient": 0.1})
    found = host_consumers(job, make_choices(device="cuda", reference_placement=placement), gpu(80), row("reference"))
    assert found.get("staging_ring", 0) == expected


def test_without_a_gpu_the_device_is_host_memory() -> None:
    job = tiny()
    assert phase_host_bytes(job, make_choices(), cpu(8), row("rollout", 3 * GIB)) == 3 * GIB + PROCESS_BYTES["cpu"]
    (filled,) = with_host_bytes(job, make_choices(), cpu(8), [row("rollout", 3 * GIB)])
    assert filled.host_bytes == 3 * GIB + PROCESS_BYTES["cpu"]


def test_random_weights_are_whole_on_the_host_of_every_rank() -> None:
    job = tiny(model={"path": None, "init": "random"}, cluster={"ranks": 4})
    whole = job.sizes.parameter_bytes(4)
    choices = make_choices(device="cuda")
    assert host_consumers(job, choices, gpu(80, ranks=4), row("load"))["whole_model"] == whole
    assert "whole_model" not in host_consumers(job, choices, gpu(80, ranks=4), row("rollout"))
    on_cpu = host_consumers(job, make_choices(), cpu(1), row("load"))["whole_model"]
    largest = max(tensor.shard_numel(4) for tensor in all_tensors(job.sizes)) * 4
    assert on_cpu == whole - job.sizes.parameter_bytes(4, 4) + largest
    # What the load does on the device afterwards takes the same memory again.
    working = row("load", 10 * MIB).model_copy(update={"residents": {"actor_parameters": 10 * MIB - 1000}})
    assert host_consumers(job, make_choices(), cpu(1), working)["whole_model"] == on_cpu - 1000


def test_every_node_is_planned_alike_and_the_last_may_hold_fewer_ranks() -> None:
    job = tiny(cluster={"ranks": 20})
    machine = gpu(80, ranks=20, ranks_per_node=8, host_gib=5)
    found = host_plan(job, make_choices(device="cuda"), machine, [row("rollout"), row("save"), row("load")])
    rank = PROCESS_BYTES["cuda"] + 192 * MIB
    assert found.rank_peak_bytes == (rank,) * 20
    assert found.node_peak_bytes == (8 * rank, 8 * rank, 4 * rank)
    assert list(found.consumers) == [PROCESS, "staging_ring"]
    (refusal,) = host_refusals(found, machine)
    assert (refusal.phase, refusal.rank, refusal.need_bytes, refusal.have_bytes) == (HOST, 0, 8 * rank, 5 * GIB)
    assert refusal.largest == PROCESS
    assert host_refusals(found, gpu(80, ranks=20, ranks_per_node=8, host_gib=10)) == ()


def test_the_page_cache_holds_the_files_that_the_ranks_of_a_node_read() -> None:
    """Shard groups of 16 over nodes of 8: each node reads half of the model, and with 32 ranks two nodes the same."""
    recipe = make_recipe(
        algorithm={"kl_coefficient": 0.1},
        cluster={"ranks": 32, "ranks_per_node": 8},
        parallel={"shard": 16},
        rollout={"engine": "vllm"},
    )
    job = make_job(recipe, REPORT_A)
    whole = read_sizes(REPORT_A).num_parameters * 2
    machine = gpu(79, ranks=32, ranks_per_node=8)
    choices = make_choices(device="cuda", compute_dtype="bfloat16", reference_placement="ring")
    first, second, third, fourth = file_cache(job, choices, machine)
    assert first + second == third + fourth == whole
    assert first == pytest.approx(whole / 2, rel=0.01)
    mapped = choices.model_copy(update={"reference_placement": "page_cache"})
    assert list(file_cache(job, mapped, machine)) == [whole] * 4  # a registered map is the whole file
    assert list(file_cache(job, choices.model_copy(update={"reference_placement": "arena"}), machine)) == [0] * 4


def test_what_engines_keep_on_the_host_while_they_sleep() -> None:
    assert sleep_host_bytes(4, 78 * GB, level=1) == 312 * GB
    assert sleep_host_bytes(4, 78 * GB, level=2) == 0
    assert host.SLEEP_STEPS[host.SLEEP_LEVEL] == ("resend weights and buffers",)
    recipe = make_recipe(rollout={"engine": "vllm"})
    found = host_consumers(make_job(recipe, TINY), make_choices(device="cuda"), gpu(80), row("update/step"))
    assert "sleeping_engine" not in found
