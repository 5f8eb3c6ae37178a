"""What verl holds, against numbers worked out by hand from the table of its sources."""

from dataclasses import replace

import pytest

from plimsoll.migrate.holdings import (
    HostPhase,
    host_phases,
    node_peaks,
    pinned,
    pinned_bytes,
    rank_peaks,
    rounding,
    shard_bytes,
)
from plimsoll.migrate.on_device import ASLEEP, COMMUNICATOR, CONTEXT, device_phases
from plimsoll.migrate.verl_job import VerlJob, Worker
from plimsoll.model.sizes import ModelSizes, read_sizes

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
# Per layer: q 8x8 and bias 8, k and v 4x8 and bias 4 each, o 8x8, gate and up 12x8 each, down 8x12, two norms of 8.
LAYER = 64 + 8 + 2 * (32 + 4) + 64 + 3 * 96 + 2 * 8
P = LAYER + 2 * 100 * 8 + 8  # 512 + embedding and head + the last norm


def sizes(**changes: object) -> ModelSizes:
    """The small model."""
    return read_sizes({**CONFIG, **changes})


def worker(**changes: object) -> Worker:
    """An actor on four ranks of one group."""
    usual = Worker(
        sizes=sizes(),
        itemsize=4,
        shard=4,
        param_offload=False,
        optimizer_offload=False,
        checkpointing=True,
        tokens=10,
    )
    return replace(usual, **changes)  # pyright: ignore[reportArgumentType]


def job(**changes: object) -> VerlJob:
    """Eight ranks on two nodes, two shard groups of four, with a reference."""
    usual = VerlJob(
        strategy="fsdp2",
        ranks=8,
        ranks_per_node=4,
        actor=worker(),
        reference=worker(param_offload=True),
        critic=None,
        engine="vllm",
        tensor_parallel=2,
        memory_utilization=0.5,
        frees_cache=True,
        lora=False,
        logprob_tokens=10,
        materialises_logits=True,
        saves_hf_model=False,
        bucket_bytes=2048 * 2**20,
    )
    return replace(usual, **changes)  # pyright: ignore[reportArgumentType]


def phase(phases: tuple[HostPhase, ...], name: str) -> HostPhase:
    """The phase of that name."""
    (found,) = (item for item in phases if item.name == name)
    return found


# On 4 ranks: rows of each tensor a rank gets at most, times the row: q 2x8, its bias 2, k and v 1x8 and 1, o 2x8,
# gate and up 3x8, down 2x12, norms 2 (three), embedding and head 25x8. All fp32.
SHARD = [16, 2, 8, 1, 8, 1, 16, 24, 24, 24, 2, 2, 2, 200, 200]
ROUNDED = [16, 2, 8, 1, 8, 1, 16, 32, 32, 32, 2, 2, 2, 256, 256]


def test_the_shard_is_exact_and_its_pinned_copy_rounded_tensor_by_tensor() -> None:
    assert sizes().num_parameters == P
    assert shard_bytes(worker(), "fsdp2") == 4 * sum(SHARD)
    assert pinned_bytes(worker(), "fsdp2") == 4 * sum(ROUNDED)
    assert rounding(worker(), "fsdp2") == pytest.approx(sum(ROUNDED) / sum(SHARD))


def test_fsdp1_rounds_one_flat_parameter_a_layer() -> None:
    assert shard_bytes(worker(), "fsdp") == 4 * (LAYER // 4 + (P - LAYER) // 4)
    assert pinned_bytes(worker(), "fsdp") == 4 * (128 + 512)  # 512 / 4 fits exactly, 1608 / 4 = 402 does not


@pytest.mark.parametrize(("size", "taken"), [(0, 0), (1, 1), (3, 4), (4, 4), (5, 8), (2**30 + 1, 2**31)])
def test_pinned_memory_comes_in_powers_of_two(size: int, taken: int) -> None:
    assert pinned(size) == taken


def test_loading_costs_the_first_rank_of_each_shard_group_a_full_copy() -> None:
    phases = host_phases(job())
    assert [item.name for item in phases] == ["load reference", "load actor", "build rollout", "steps", "save"]
    loading = phase(phases, "load reference")
    assert loading.rank_bytes == (4 * P, 0, 0, 0, 4 * P, 0, 0, 0)
    assert loading.transient_bytes == int(0.4 * 4 * P)
    kept = 4 * sum(ROUNDED)  # of the reference, on every rank, from now on
    assert phase(phases, "load actor").rank_bytes == (4 * P + kept, kept, kept, kept) * 2
    assert phase(phases, "steps").rank_bytes == (kept,) * 8


def test_the_first_node_of_each_group_holds_a_copy_more_than_its_second() -> None:
    over_nodes = job(ranks=16, actor=worker(shard=8), reference=worker(shard=8, param_offload=True))
    loading = phase(host_phases(over_nodes), "load reference").node_bytes(4)
    assert loading == (4 * P, 0, 4 * P, 0)


def test_tied_embeddings_cost_every_rank_a_full_copy() -> None:
    tied = worker(sizes=sizes(tie_word_embeddings=True))
    loading = phase(host_phases(job(actor=tied, reference=None)), "load actor")
    assert loading.rank_bytes == (4 * (P - 800),) * 8
    assert loading.transient_bytes == 0


def test_offloading_pins_parameters_at_once_and_moments_from_the_first_step() -> None:
    phases = host_phases(job(actor=worker(param_offload=True, optimizer_offload=True), reference=None))
    kept = 4 * sum(ROUNDED)
    assert phase(phases, "load actor").rank_bytes[1] == 0
    assert phase(phases, "build rollout").rank_bytes[1] == kept
    assert phase(phases, "steps").rank_bytes[1] == 3 * kept


def test_bfloat16_halves_the_copy() -> None:
    assert phase(host_phases(job(actor=worker(itemsize=2))), "load actor").ranks[0]["actor's full copy"] == 2 * P


@pytest.mark.parametrize(
    ("changes", "asleep"),
    [({}, 0), ({"engine": "sglang"}, P), ({"lora": True}, P), ({"engine": "sglang", "frees_cache": False}, 0)],
)
def test_what_a_sleeping_engine_keeps_in_host_memory(changes: dict[str, object], asleep: int) -> None:
    phases = host_phases(job(reference=None, **changes))
    assert phase(phases, "steps").rank_bytes == (asleep,) * 8  # 2 P / TP, TP is 2


def test_saving_with_a_hugging_face_model_gathers_it_on_rank_0() -> None:
    phases = host_phases(job(reference=None, saves_hf_model=True))
    assert phase(phases, "save").rank_bytes == (4 * P, 0, 0, 0, 0, 0, 0, 0)


def test_the_critic_is_built_first_and_stays() -> None:
    critic = worker(param_offload=True, optimizer_offload=True)
    phases = host_phases(job(critic=critic))
    assert [item.name for item in phases][:3] == ["load critic", "load reference", "load actor"]
    assert phase(phases, "load reference").rank_bytes[1] == 4 * sum(ROUNDED)
    assert phase(phases, "steps").rank_bytes[1] == 4 * 4 * sum(ROUNDED)  # its three, and the reference


def test_peaks_are_of_phases_not_of_ranks() -> None:
    phases = host_phases(job())
    kept = 4 * sum(ROUNDED)
    assert rank_peaks(phases) == (4 * P + kept, kept, kept, kept) * 2
    assert node_peaks(phases, 4) == (4 * P + 4 * kept,) * 2


def test_the_device_phases() -> None:
    found = {item.name: item for item in device_phases(job(), 2**30)}
    shard, fixed = 4 * sum(SHARD), CONTEXT + COMMUNICATOR
    assert list(found) == ["rollout", "compute_log_prob", "compute_ref_log_prob", "update_actor", "sync"]
    assert sum(found["rollout"].residents.values()) == fixed + 3 * shard + 2**29  # half of the device is the engine's
    assert sum(found["update_actor"].residents.values()) == fixed + ASLEEP + 4 * shard
    assert found["update_actor"].workspace["full logits"] == 10 * 100 * 18
    assert found["compute_log_prob"].workspace["full logits"] == 10 * 100 * 10
    assert found["sync"].residents["rollout weights"] == P
    assert found["sync"].workspace == {"one full tensor": 4 * 800, "sync bucket": 2**31}


def test_offloading_leaves_the_device_to_the_engine() -> None:
    offloaded = job(actor=worker(param_offload=True, optimizer_offload=True), materialises_logits=False)
    found = {item.name: item for item in device_phases(offloaded, 2**30)}
    assert sum(found["rollout"].residents.values()) == CONTEXT + COMMUNICATOR + 2**29
    assert sum(found["update_actor"].residents.values()) == CONTEXT + COMMUNICATOR + ASLEEP + 16 * sum(SHARD)
    assert "full logits" not in found["update_actor"].workspace
