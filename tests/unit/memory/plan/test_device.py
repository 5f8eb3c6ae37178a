"""Residents and workspace of every phase."""

from typing import Any

import pytest

from plimsoll.memory.plan.constants import (
    CUDA_CONTEXT,
    FIRST_COMMUNICATOR,
    FURTHER_COMMUNICATOR,
    LIBRARY_WORKSPACE,
    VLLM_SEGMENTS,
)
from plimsoll.memory.plan.device import communicators, device_phases, residents_of
from plimsoll.memory.plan.engine import rollout_workspace, sequence_bytes
from plimsoll.memory.plan.job import GIB, MIB, Job
from plimsoll.memory.plan.workspace import chunk_bytes, logits_bytes, micro_batch_tokens
from plimsoll.model.sizes import read_sizes
from plimsoll.weights.limits import SYNC_BUCKET_BYTES
from tests.unit.memory.plan.support import REPORT_A, REPORT_B, TINY, cpu, gpu, make_choices, make_job, make_recipe

LAYER = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128 + 2 * 64
ROOT = 2 * 100 * 64 + 64
"""Elements of the tiny model."""


def tiny_job(**sections: dict[str, Any]) -> Job:
    return make_job(make_recipe(**sections), TINY)


def test_residents_of_a_tiny_job_by_hand() -> None:
    elements = 2 * LAYER + ROOT
    found = residents_of(tiny_job(), make_choices(kv_bytes=1000), cpu(1))
    # One rank, one dtype: the native engine generates with the trainer's parameters.
    assert found == {
        "actor_parameters": 4 * elements,
        "actor_gradients": 4 * elements,
        "optimizer_state": 8 * elements,
        "kv_cache": 1000,
    }


@pytest.mark.parametrize("tokens", [10, 60])
def test_workspace_of_a_tiny_job_by_hand(tokens: int) -> None:
    """Two layers, float32. With few tokens the reduction of the last layer's gradients is the widest place, with more
    the middle of its backward."""
    job = make_job(
        make_recipe(train={"logprob_chunk": 4}, model={"packing": "packed", "path": "x"}), TINY, longest_sequence=tokens
    )
    rows = device_phases(job, make_choices(token_budget=tokens), cpu(1))
    row = next(row for row in rows if row.phase == "update/gradients")
    norm = 4 * 64 + 2 * 4 * 64 + 4
    saved = tokens * (2 * norm + 4 * (64 + 32 + 32 + 64) + 4 * 4 + 4 * 4 * 128)
    kept = saved + tokens * 2 * 4 * 16
    common = {"gathered_root": 4 * ROOT, "columns": tokens * 64}
    if tokens == 10:
        assert row.workspace == common | {
            "activations": kept + tokens * 4 * 64,
            "gradients": 4 * (LAYER + 100 * 64),
            "reduction": 2 * 4 * LAYER,
        }
    else:
        assert row.workspace == common | {
            "activations": kept + saved + tokens * 4 * 2 * (128 + 64),
            "gathered_layers": 4 * LAYER,
            "gradients": 4 * (128 * 64 + 100 * 64),
        }
    assert row.workspace_bytes == sum(row.workspace.values())
    assert row.device_bytes == sum(row.residents.values()) + row.workspace_bytes
    assert row.headroom_bytes == GIB - row.device_bytes


def test_shards_are_of_the_fullest_rank() -> None:
    """100 rows of the embedding over 3 ranks: the first holds 34."""
    job = tiny_job(cluster={"ranks": 3})
    found = residents_of(job, make_choices(device="cuda"), gpu(1, ranks=3))
    rows = 2 * (2 * 22 * 64 + 2 * 11 * 64 + 2 * 43 * 64 + 22 * 128 + 2 * 22) + 2 * 34 * 64 + 22
    assert found["actor_parameters"] == 4 * rows
    assert found["rollout_parameters"] == 4 * (2 * LAYER + ROOT)  # whole on every rank


def test_phases_of_a_policy_and_of_supervised_training() -> None:
    recipe = make_recipe(
        algorithm={"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
        data={"train": "x", "eval": "y"},
    )
    names = [row.phase for row in device_phases(make_job(recipe, TINY), make_choices(), cpu(1))]
    update = ["update/gradients", "update/step"]
    assert names == ["load", "rollout", "logprob", "reference", *update, "sync", "save", "eval"]
    alone = make_job(make_recipe(), TINY)
    assert [row.phase for row in device_phases(alone, make_choices(), cpu(1))] == [
        *("load", "rollout", *update, "sync", "save")
    ]
    supervised = make_job(make_recipe(), TINY, objective="supervised", generates=False)
    rows = device_phases(supervised, make_choices(), cpu(1))
    assert [row.phase for row in rows] == ["load", *update, "save"]
    assert all("kv_cache" not in row.residents for row in rows)


def test_what_exists_when() -> None:
    recipe = make_recipe(algorithm={"kl_coefficient": 0.1})
    rows = device_phases(make_job(recipe, TINY), make_choices(reference_placement="page_cache"), cpu(1))
    there = {row.phase: set(row.residents) for row in rows}
    assert {phase for phase, held in there.items() if "actor_gradients" in held} == {"update/gradients", "update/step"}
    assert {phase for phase, held in there.items() if "reference_parameters" in held} == {"reference"}
    assert all("optimizer_state" in held for held in there.values())  # from the start, not from the first step on
    evicted = device_phases(make_job(recipe, TINY), make_choices(kv_bytes=5, evicted={"update": ("kv_cache",)}), cpu(1))
    assert [row.phase for row in evicted if "kv_cache" in row.evicted] == ["update/gradients", "update/step"]
    assert all(("kv_cache" in row.residents) != ("kv_cache" in row.evicted) for row in evicted)


def test_one_line_a_group_of_ranks() -> None:
    """Three groups are three communicators, and a fourth is one more; a group of one has none."""
    three = tiny_job(cluster={"ranks": 32}, parallel={"shard": 16}, rollout={"engine": "vllm", "tensor_parallel": 4})
    machine = gpu(80, ranks=32)
    assert communicators(three, machine) == {
        "communicator/shard": FIRST_COMMUNICATOR,
        "communicator/replicate": FURTHER_COMMUNICATOR,
        "communicator/rollout": FURTHER_COMMUNICATOR,
    }
    four = tiny_job(
        cluster={"ranks": 32},
        parallel={"shard": 16, "context": 2},
        rollout={"engine": "vllm", "tensor_parallel": 4},
    )
    assert len(communicators(four, machine)) == 4
    assert communicators(tiny_job(), gpu(80)) == {}
    assert communicators(three, cpu(1)) == {}


def test_context_and_communicators_are_in_every_phase() -> None:
    job = tiny_job(cluster={"ranks": 2})
    for row in device_phases(job, make_choices(device="cuda"), gpu(80, ranks=2)):
        assert row.residents["cuda_context"] == CUDA_CONTEXT
        assert row.residents["communicator/shard"] == FIRST_COMMUNICATOR


def test_logits_dominate_where_nobody_cuts_them() -> None:
    assert logits_bytes(2, 256, 151665, 2) == 155_304_960
    job = make_job(make_recipe(train={"logprob_chunk": 64}), REPORT_B, longest_sequence=512)
    choices = make_choices(compute_dtype="bfloat16")
    assert chunk_bytes(job.sizes, job, choices, backward=False) == 2 * 64 * 151936 * 4
    # A backward without entropy needs no second one in float32.
    assert chunk_bytes(job.sizes, job, choices, backward=True) == 64 * 151936 * (4 + 2)
    short = make_job(make_recipe(train={"logprob_chunk": 4096}), REPORT_B, longest_sequence=512)
    assert chunk_bytes(short.sizes, short, make_choices(token_budget=512), backward=False) == 2 * 512 * 151936 * 4


def test_the_first_measured_table() -> None:
    """20.9 GiB at the peak of an update on one H200, without the context: float32 master weights, bfloat16 compute, all
    layers checkpointed, micro-batches of up to 12288 tokens of which 2048 have logits at a time."""
    recipe = make_recipe(
        rollout={"max_response_tokens": 4096 - 512},
        data={"train": "x", "prompts_per_step": 100},
        memory={"calibration": "off"},
    )
    job = make_job(recipe, REPORT_B, objective="supervised", generates=False)
    choices = make_choices(device="cuda", compute_dtype="bfloat16", activation_checkpointing="full", token_budget=12288)
    rows = {row.phase: row for row in device_phases(job, choices, gpu(139))}
    allocated = rows["update/gradients"].device_bytes - CUDA_CONTEXT
    assert rows["load"].workspace.keys() == {"probe"}
    assert allocated == pytest.approx(20.9 * GIB, rel=0.15)
    assert max(rows.values(), key=lambda row: row.device_bytes).phase == "update/gradients"


def test_a_streamed_optimizer_is_in_the_step_alone() -> None:
    job = make_job(make_recipe(), REPORT_B)
    rows = {row.phase: row for row in device_phases(job, make_choices(optimizer_state="streamed"), gpu(139))}
    assert all("optimizer_state" not in row.residents for row in rows.values())
    assert rows["update/step"].workspace == {"streamed_moments": 768 * MIB}
    small = {row.phase: row for row in device_phases(tiny_job(), make_choices(optimizer_state="streamed"), gpu(139))}
    assert small["update/step"].workspace == {"streamed_moments": 8 * (2 * LAYER + ROOT)}


def test_an_engine_of_its_own_has_weights_buffers_and_a_bucket() -> None:
    job = make_job(
        make_recipe(cluster={"ranks": 4}, rollout={"engine": "vllm", "tensor_parallel": 2, "cuda_graphs": False}),
        REPORT_B,
    )
    choices = make_choices(device="cuda", compute_dtype="bfloat16", kv_bytes=GIB)
    found = residents_of(job, choices, gpu(139, ranks=4))
    embedding = 151936 * 1536
    # A head is made before it is tied, and stays in the pool.
    assert found["rollout_parameters"] == (job.sizes.parameter_bytes(2) + 2 * embedding) // 2 + VLLM_SEGMENTS
    assert 128 * 151936 * 4 < found["engine_buffers"] < 0.5 * GIB
    assert found["kernel_buffers"] == 3 * LIBRARY_WORKSPACE
    rows = {row.phase: row for row in device_phases(job, choices, gpu(139, ranks=4))}
    assert not rows["load"].residents.keys() & {"rollout_parameters", "kv_cache"}  # asleep while the trainer is built
    assert rows["sync"].workspace == {
        "sync_bucket": max(SYNC_BUCKET_BYTES, embedding * 2),
        "reloaded_layer": embedding * 2,
        "gathered_tensor": embedding * 4,
    }
    newer = make_job(job.recipe, REPORT_B, num_sequences=2000)
    assert rollout_workspace(newer, choices)["logits"] == 1024 * 151936 * (2 + 4)
    older = make_job(job.recipe, REPORT_A, num_sequences=2000)
    assert rollout_workspace(older, choices)["logits"] == 1024 * 151936 * (2 + 4 * 4)


def test_what_was_measured_takes_the_place_of_a_formula() -> None:
    recipe = make_recipe(algorithm={"kl_coefficient": 0.1})
    measured = {"update/gradients": 123_456, "logprob": 789, "cuda_context": 555, "engine_buffers": 5}
    job = make_job(recipe, TINY, measured=measured)
    rows = {row.phase: row for row in device_phases(job, make_choices(device="cuda"), gpu(80))}
    assert rows["update/gradients"].workspace == {"measured": 123_456}
    assert rows["reference"].workspace == {"measured": 789}
    assert rows["save"].residents["cuda_context"] == 555
    assert "engine_buffers" not in rows["save"].residents  # the native engine has none


def test_a_micro_batch_holds_no_more_than_a_mini_batch_has() -> None:
    recipe = make_recipe(
        data={"train": "x", "prompts_per_step": 2}, rollout={"samples_per_prompt": 4, "max_response_tokens": 8}
    )
    job = make_job(recipe, TINY, longest_sequence=10)
    assert micro_batch_tokens(job, make_choices(token_budget=2048)) == 80
    assert micro_batch_tokens(job, make_choices(token_budget=64)) == 64
    assert micro_batch_tokens(job, make_choices(token_budget=4)) == 10  # a longer sequence goes alone


def test_one_sequence_of_the_cache() -> None:
    job = make_job(make_recipe(rollout={"max_response_tokens": 88}, data={"train": "x", "max_prompt_tokens": 12}), TINY)
    assert sequence_bytes(job, make_choices()) == 100 * 2 * 2 * 2 * 16 * 4
    assert read_sizes(TINY).kv_bytes_per_token(4) * 100 == sequence_bytes(job, make_choices())
