"""Bytes of a step over PCIe and over the wire, counted by hand."""

from typing import Any

import pytest

from plimsoll.memory.plan.job import Job
from plimsoll.memory.plan.moved import moved
from tests.unit.memory.plan.support import TINY, cpu, gpu, make_choices, make_job, make_recipe


def job_of(ranks: int = 1, shard: int | None = None, **sections: dict[str, Any]) -> Job:
    """8 samples of at most 64 tokens a rank; two micro-batches of 256."""
    base: dict[str, dict[str, Any]] = {
        "data": {"prompts_per_step": 4 * ranks, "max_prompt_tokens": 32, "train": "x"},
        "rollout": {"samples_per_prompt": 2, "max_response_tokens": 32},
        "cluster": {"ranks": ranks},
        "parallel": {"shard": shard},
    }
    return make_job(make_recipe(**(base | sections)), TINY)


ON_GPU: dict[str, Any] = {"device": "cuda", "compute_dtype": "bfloat16", "token_budget": 256}


def test_nothing_is_moved_where_everything_stays() -> None:
    found = moved(job_of(), make_choices(**ON_GPU), gpu(80))
    assert (found.moved_bytes, found.wire_bytes) == (0, 0)
    assert found.seconds["compute"] > 0
    assert "full length" in found.notes[0]


def test_a_streamed_optimizer_goes_both_ways_at_each_of_its_steps() -> None:
    job = job_of(train={"mini_batches_per_step": 2, "epochs_per_rollout": 3})
    found = moved(job, make_choices(**ON_GPU, optimizer_state="streamed"), gpu(80))
    assert found.moved_bytes == 2 * 2 * job.sizes.num_parameters * 4 * 6
    assert found.seconds["moved"] == pytest.approx(found.moved_bytes / 88e9)


@pytest.mark.parametrize(
    ("evicted", "ways"),
    [
        ({"rollout": ("actor_parameters",)}, 2),
        ({"rollout": ("actor_parameters",), "reference": ("actor_parameters",)}, 4),
        ({"rollout": ("kv_cache",)}, 0),  # made again, not copied
        ({"rollout": ("optimizer_state",)}, 4),  # twice the parameters, out and in
        # Nobody needs the moments between rollout and update: they stay out from one to the other.
        ({"rollout": ("optimizer_state",), "reference": ("optimizer_state",)}, 4),
        ({}, 0),
    ],
)
def test_evictions_go_out_and_come_back_when_a_phase_needs_them(evicted: dict[str, Any], ways: int) -> None:
    job = job_of()
    found = moved(job, make_choices(**ON_GPU, evicted=evicted), gpu(80))
    assert found.moved_bytes == ways * job.sizes.num_parameters * 4


@pytest.mark.parametrize("placement", ["device", "page_cache", "ring", "arena"])
def test_a_reference_is_read_once_for_its_pass(placement: str) -> None:
    job = job_of(algorithm={"kl_coefficient": 0.1})
    found = moved(job, make_choices(**ON_GPU, reference_placement=placement), gpu(80))
    assert found.moved_bytes == (0 if placement == "device" else 2 * job.sizes.num_parameters)


def test_a_shard_group_gathers_for_forward_and_backward_and_scatters_gradients() -> None:
    job = job_of(4)
    total, layers = job.sizes.num_parameters, sum(layer.num_parameters for layer in job.sizes.layers)
    gathered = 2 * (2 * layers + (total - layers)) * 2  # two micro-batches, bfloat16
    reduced = 2 * total * 4
    synced = total * 4
    found = moved(job, make_choices(**ON_GPU), gpu(80, ranks=4))
    assert found.wire_bytes == pytest.approx((gathered + reduced + synced) * 3 / 4, abs=1)
    assert found.seconds["wire"] == pytest.approx(found.wire_bytes / 300e9)


def test_a_shard_group_over_several_nodes_gathers_at_the_speed_of_the_network() -> None:
    found = moved(job_of(4), make_choices(**ON_GPU), gpu(80, ranks=4, ranks_per_node=2))
    assert found.seconds["wire"] == pytest.approx(found.wire_bytes / 25e9)


def test_hybrid_sharding_reduces_the_shard_over_its_copies_once_an_optimizer_step() -> None:
    together = moved(job_of(8, 4), make_choices(**ON_GPU), gpu(80, ranks=8))
    apart = moved(job_of(4, 4), make_choices(**ON_GPU), gpu(80, ranks=4))
    shard = job_of(8, 4).sizes.parameter_bytes(4, 4)
    assert together.wire_bytes - apart.wire_bytes == pytest.approx(shard, abs=1)  # 2 (R - 1) / R with R = 2
    over_nodes = moved(job_of(8, 4), make_choices(**ON_GPU), gpu(80, ranks=8, ranks_per_node=4))
    slower = over_nodes.seconds["wire"] - together.seconds["wire"]
    assert slower == pytest.approx(shard / 25e9 - shard / 300e9, rel=1e-3)  # only the copies are on different nodes


def test_old_log_probs_and_a_reference_gather_once_more() -> None:
    plain = moved(job_of(4), make_choices(**ON_GPU), gpu(80, ranks=4)).wire_bytes
    scored = moved(job_of(4, train={"mini_batches_per_step": 2}), make_choices(**ON_GPU), gpu(80, ranks=4)).wire_bytes
    job = job_of(4, algorithm={"kl_coefficient": 0.1})
    with_reference = moved(job, make_choices(**ON_GPU), gpu(80, ranks=4)).wire_bytes
    layers = sum(layer.num_parameters for layer in job.sizes.layers)
    root = job.sizes.num_parameters - layers
    assert scored - plain == pytest.approx((2 * layers + root) * 2 * 3 / 4, abs=2)
    assert with_reference - plain == pytest.approx(2 * job.sizes.num_parameters * 2 * 3 / 4, abs=2)


def test_arithmetic_counts_backward_twice_and_what_is_computed_again() -> None:
    job = job_of()
    seconds = {
        mode: moved(job, make_choices(**ON_GPU, activation_checkpointing=mode), gpu(80)).seconds["compute"]
        for mode in ("none", "selective", "full")
    }
    assert seconds["none"] == pytest.approx(3 * job.sizes.forward_flops(8 * 64, 32) / (0.4 * 989e12))
    assert seconds["selective"] / seconds["none"] == pytest.approx(3.5 / 3)
    assert seconds["full"] / seconds["none"] == pytest.approx(4 / 3)


def test_without_a_gpu_there_is_no_bus_and_no_estimate() -> None:
    found = moved(job_of(), make_choices(optimizer_state="streamed"), cpu(8))
    assert (found.moved_bytes, found.seconds, found.notes) == (0, {}, ())
