"""What the trainer does besides the gradient: counting, skipping, state, columns."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.loss.kl import kl_penalty
from plimsoll.parallel.tensors import full
from plimsoll.plane.local import LocalPlane
from plimsoll.types import Group
from plimsoll.update.worker import PolicyWorker
from plimsoll.weights.tensors import TensorFiles, write_tensors
from tests import tiny
from tests.unit.update import reference
from tests.unit.update.support import (
    full_moments,
    load_state,
    make_batch,
    make_groups,
    make_plan,
    make_recipe,
    save,
    write_state,
)

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny.qwen2(seed=1), tmp_path_factory.mktemp("qwen2"))


def build(folder: Path, plane: LocalPlane, **sections: Any) -> PolicyWorker:
    model = {"dtype": "float32", **sections.pop("model", {})}
    recipe = make_recipe(folder, model=model, **sections)
    return PolicyWorker(recipe, make_plan(compute_dtype="float32", optimizer_steps=6), plane)


def snapshot(worker: PolicyWorker) -> tuple[State, State]:
    return {name: tensor.clone() for name, tensor in worker.model_state().items()}, full_moments(worker)


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(worker: PolicyWorker, plane: LocalPlane, seed: int) -> dict[str, float]:
    batch = make_batch(make_groups(plane, seed=seed))
    worker.advantages(batch)
    return dict(worker.update(batch).values)


def test_an_update_moves_the_weights_and_the_version(folder: Path) -> None:
    plane = LocalPlane()
    worker = build(folder, plane)
    before, _ = snapshot(worker)
    values = train(worker, plane, 0)
    after, _ = snapshot(worker)
    assert worker.version == 1
    assert not same(before, after)
    assert values["train/skipped_steps"] == 0
    assert values["train/learning_rate"] == 1e-3
    assert values["actor/ratio_max"] == 1.0
    assert 0 < values["actor/entropy"] < 4.2  # log 64 = 4.16


def test_a_learning_rate_of_zero_moves_nothing_but_the_version(folder: Path) -> None:
    plane = LocalPlane()
    worker = build(folder, plane, train={"learning_rate": 0.0})
    before, _ = snapshot(worker)
    train(worker, plane, 0)
    assert worker.version == 1
    assert same(before, snapshot(worker)[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_weights_moments_and_version_untouched(folder: Path, bad: float) -> None:
    plane = LocalPlane()
    worker = build(folder, plane)
    train(worker, plane, 0)
    before = snapshot(worker)
    batch = make_batch(make_groups(plane, seed=1))
    worker.advantages(batch)
    spoiled = batch.samples()[0]
    plane.put(spoiled.ref, advantages=torch.full((spoiled.length,), bad))
    values = worker.update(batch).values
    after = snapshot(worker)
    assert same(before[0], after[0])
    assert same(before[1], after[1])
    assert values["train/skipped_steps"] == 1
    counters = worker.counters()
    assert (counters.version, counters.optimizer_steps, counters.skipped_nonfinite) == (1, 1, 1)
    train(worker, plane, 2)
    assert worker.version == 2


def test_an_empty_mini_batch_is_skipped_and_counted(folder: Path) -> None:
    plane = LocalPlane()
    worker = build(folder, plane)
    batch = make_batch(make_groups(plane, num_groups=1, samples=2), mini_batches=3)
    worker.score(batch, old=True, reference=False)
    worker.advantages(batch)
    values = worker.update(batch).values
    assert values["train/skipped_steps"] == 1
    assert worker.counters().skipped_empty == 1
    assert worker.version == 2


@pytest.mark.parametrize("steps", [0, 2])
def test_a_worker_built_from_saved_state_goes_on_bit_for_bit(folder: Path, steps: int, tmp_path: Path) -> None:
    options = {"train": {"schedule": "cosine", "warmup_steps": 2, "max_grad_norm": 0.5}}
    plane = LocalPlane()
    worker = build(folder, plane, **options)
    for seed in range(steps):
        train(worker, plane, seed)
    written = write_state(worker, tmp_path / "state")
    resumed = build(folder, plane, **options)
    load_state(resumed, written, worker.counters())
    for seed in range(steps, steps + 2):
        assert train(worker, plane, seed) == train(resumed, plane, seed)
    assert same(snapshot(worker)[0], snapshot(resumed)[0])
    assert same(snapshot(worker)[1], snapshot(resumed)[1])
    assert worker.counters() == resumed.counters()


def test_weights_of_another_model_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    worker = build(folder, LocalPlane())
    written = write_state(worker, tmp_path / "state")
    path = written / "model" / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in TensorFiles([path]).items()}
    assert "lm_head.weight" not in weights
    weights["stranger"] = weights.pop("model.norm.weight")
    write_tensors(path, weights)
    with pytest.raises(RefusedError, match=r"(?s)model\.norm\.weight"):
        load_state(worker, written, worker.counters())


MOMENTS = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stranger.step": torch.zeros(())}, r"1 of no parameter \(stranger\.step\)"),
        ({f"{MOMENTS}.exp_avg": None}, r"1 missing \(model\.norm\.weight\.exp_avg\)"),
        ({f"{MOMENTS}.exp_avg": torch.zeros(31)}, r"1 of another shape \(model\.norm\.weight\.exp_avg\)"),
        ({f"{MOMENTS}.step": None}, r"2 of no parameter \(model\.norm\.weight\.exp_avg, "),
    ],
)
def test_moments_that_do_not_fit_are_refused_by_name(
    folder: Path, tmp_path: Path, change: dict[str, torch.Tensor | None], said: str
) -> None:
    plane = LocalPlane()
    worker = build(folder, plane)
    train(worker, plane, 0)
    moments = {name: tensor for name, tensor in (full_moments(worker) | change).items() if tensor is not None}
    write_tensors(tmp_path / "moments.safetensors", moments)
    with pytest.raises(CheckpointError, match=said):
        worker.load_state([tmp_path / "moments.safetensors"], worker.counters())


def test_scored_log_probs_are_those_of_the_plain_model_at_the_recipe_s_temperature(folder: Path) -> None:
    plane = LocalPlane()
    worker = build(folder, plane, algorithm={"kl_coefficient": 0.1}, temperature=0.5)
    batch = make_batch(make_groups(plane), token_budget=30)
    worker.score(batch, old=True, reference=True)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for sample in batch.samples():
        ids = plane.get(sample.ref, "token_ids").tolist()
        with torch.no_grad():
            logp = reference.distributions(model, ids, 0.5)
        want = torch.zeros(sample.length)
        for i in range(sample.prompt_length, sample.length):
            want[i] = logp[i - 1, ids[i]]
        torch.testing.assert_close(plane.get(sample.ref, "old_logprobs"), want, atol=2e-6, rtol=0)
        assert torch.equal(plane.get(sample.ref, "old_logprobs"), plane.get(sample.ref, "ref_logprobs"))


def test_gathered_weights_are_let_go_of_after_a_forward_without_backward(folder: Path) -> None:
    plane = LocalPlane()
    worker = build(folder, plane, algorithm={"kl_coefficient": 0.1})
    batch = make_batch(make_groups(plane))
    assert worker.reference is not None
    for _ in range(2):  # after the probe, after scoring
        for policy in (worker.policy, worker.reference.policy):
            assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
        worker.score(batch, old=True, reference=True)


def test_scored_old_log_probs_give_a_ratio_of_one_in_the_first_mini_batch(folder: Path) -> None:
    plane = LocalPlane()
    worker = build(folder, plane, train={"epochs_per_rollout": 2, "learning_rate": 0.0})
    batch = make_batch(make_groups(plane), token_budget=30)
    worker.score(batch, old=True, reference=False)
    worker.advantages(batch)
    values = worker.update(batch).values
    assert values["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert worker.version == 2


def test_kl_in_the_reward_is_taken_off_before_group_statistics(folder: Path, tmp_path: Path) -> None:
    other = save(tiny.qwen2(seed=9), tmp_path / "reference")
    algorithm = {"kl_coefficient": 0.5, "kl_in": "reward", "kl_estimator": "k1", "normalize_std": False}
    plane = LocalPlane()
    worker = build(folder, plane, algorithm=algorithm, model={"reference": str(other)})
    groups = make_groups(plane, num_groups=1)
    groups = [masked_first(groups[0])]
    batch = make_batch(groups)
    assert worker.needs_old
    assert worker.needs_reference
    worker.score(batch, old=True, reference=True)
    worker.advantages(batch)
    rewards: list[float] = []
    for sample in groups[0].samples:  # the masked one counts in the statistics
        old, ref = plane.get(sample.ref, "old_logprobs"), plane.get(sample.ref, "ref_logprobs")
        assert sample.reward is not None
        rewards.append(sample.reward - 0.5 * float(kl_penalty(old, ref, "k1").sum()))
    mean = sum(rewards) / len(rewards)
    for sample, reward in list(zip(groups[0].samples, rewards, strict=True))[1:]:
        column = plane.get(sample.ref, "advantages")
        assert not column[: sample.prompt_length].any()
        assert column[sample.prompt_length :].tolist() == pytest.approx([reward - mean] * sample.response_length)


def masked_first(group: Group) -> Group:
    first = group.samples[0]
    fields = {name: getattr(first, name) for name in type(first).__dataclass_fields__}
    masked = type(first)(**(fields | {"masked": True}))
    return Group(id=group.id, prompt=group.prompt, samples=(masked, *group.samples[1:]))


def test_supervised_loss_is_the_token_mean_over_all_micro_batches(folder: Path) -> None:
    plane = LocalPlane()
    batch = make_batch(make_groups(plane), token_budget=20)
    recipe = make_recipe(folder, model={"dtype": "float32"}, algorithm={"kl_coefficient": 1.0}, temperature=0.3)
    worker = PolicyWorker(recipe, make_plan(compute_dtype="float32"), plane, objective="supervised")
    assert worker.reference is None
    values = worker.supervised(batch).values
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    nll: list[float] = []
    for sample in batch.samples():
        ids = plane.get(sample.ref, "token_ids").tolist()
        with torch.no_grad():
            logp = reference.distributions(model, ids, 1.0)
        nll += [-float(logp[i - 1, ids[i]]) for i in range(sample.prompt_length, sample.length)]
    assert values["loss"] == pytest.approx(sum(nll) / len(nll), rel=1e-6)
    assert values["train/tokens"] == sum(sample.length for sample in batch.samples())
    assert worker.version == 1
    again = worker.supervised(batch).values
    assert again["loss"] < values["loss"]


def test_a_mismatch_on_the_first_micro_batch_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plane = LocalPlane()
    worker = build(folder, plane)
    with caplog.at_level(logging.WARNING):
        train(worker, plane, 0)
        train(worker, plane, 1)
    assert sum("temperature" in record.message for record in caplog.records) == 1


def test_engine_log_probs_that_agree_raise_no_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plane = LocalPlane()
    worker = build(folder, plane)
    batch = make_batch(make_groups(plane))
    worker.score(batch, old=True, reference=False)
    for sample in batch.samples():
        plane.put(sample.ref, rollout_logprobs=plane.get(sample.ref, "old_logprobs"))
    worker.advantages(batch)
    with caplog.at_level(logging.WARNING):
        values = worker.update(batch).values
    assert not caplog.records
    assert values["mismatch/logprob_diff_max"] < 1e-5


def test_residents_are_counted_in_bytes(folder: Path) -> None:
    plane = LocalPlane()
    worker = build(folder, plane, algorithm={"kl_coefficient": 0.1})
    size = 4 * sum(full(tensor).numel() for tensor in worker.model_state().values())
    measured = lambda: {resident.name: resident.measured() for resident in worker.residents()}  # noqa: E731
    assert measured() == {
        "actor_parameters": size,
        "actor_gradients": 0,
        "optimizer_state": 2 * size,  # from the start
        "reference_parameters": size,
    }
    batch = make_batch(make_groups(plane))
    worker.score(batch, old=False, reference=True)
    worker.advantages(batch)
    worker.update(batch)
    assert measured()["optimizer_state"] == 2 * size
    assert measured()["actor_gradients"] == 0


def test_random_weights_come_from_the_seed(folder: Path) -> None:
    model = {"init": "random", "config": str(folder), "path": None}
    first, second = (build(folder, LocalPlane(), model=model) for _ in range(2))
    assert same(snapshot(first)[0], snapshot(second)[0])


def test_packed_rows_are_refused_on_a_cpu(folder: Path) -> None:
    recipe = make_recipe(folder, model={"packing": "packed"})
    with pytest.raises(RefusedError, match=r"model\.packing=packed.*padded"):
        PolicyWorker(recipe, make_plan(packing="packed"), LocalPlane())
