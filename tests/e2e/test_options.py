"""Every option of the algorithm and of the update runs, and does what it says."""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from plimsoll.checkpoint.locate import locate_model
from plimsoll.checkpoint.state import read_state
from plimsoll.jsonl import read_jsonl
from plimsoll.weights.tensors import TensorFiles
from plimsoll.weights.write import ShardWriter
from tests.e2e.small import Small, metrics, rollouts, tensors, weights
from tests.processes import host_buffer_bytes, open_files

STOPS = f"rollout.stop_token_ids={[1, *range(5, 261, 4)]}"
"""A quarter of the vocabulary ends a response, so that lengths differ and aggregations can be told apart."""

NO_EVAL = "data.eval=null"


def run(small: Small, *overrides: str, name: str = "rl") -> Path:
    """Two steps with responses of different lengths."""
    return small.train(STOPS, NO_EVAL, *overrides, *([] if name == "rl" else [f"name={name}"]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The run that differs from the others in nothing but their option."""
    return run(Small(tmp_path_factory.mktemp("plain"), model))


def advantages(rows: list[dict[str, Any]], *, std: bool) -> list[float]:
    """By hand, from the rewards of a file of rollouts that holds every sample."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row["reward"])
    found: list[float] = []
    for row in rows:
        rewards = groups[row["group"]]
        centred = row["reward"] - mean(rewards)
        found.append(centred / (stdev(rewards) + 1e-6) if std else centred)
    return found


def policy_loss(rows: list[dict[str, Any]], aggregation: str = "token_mean", *, std: bool = True) -> float:
    """Loss of one on-policy update: the ratio is 1, so that a token's loss is minus its advantage."""
    pairs = [(a, r["response_length"]) for a, r in zip(advantages(rows, std=std), rows, strict=True) if not r["masked"]]
    match aggregation:
        case "token_mean":
            return -sum(a * length for a, length in pairs) / sum(length for _, length in pairs)
        case "sequence_mean":
            return -sum(a for a, _ in pairs) / len(pairs)
        case _:
            return -sum(a * length for a, length in pairs) / (len(pairs) * 6)


ON_POLICY: dict[str, tuple[list[str], Callable[[list[dict[str, Any]], dict[str, Any]], float]]] = {
    "dapo": ([], lambda rows, row: policy_loss(rows)),
    "token_mean": (["algorithm.aggregation=token_mean"], lambda rows, row: policy_loss(rows)),
    "sequence_mean": (["algorithm.aggregation=sequence_mean"], lambda rows, row: policy_loss(rows, "sequence_mean")),
    "sequence_sum": (["algorithm.aggregation=sequence_sum"], lambda rows, row: policy_loss(rows, "sequence_sum")),
    "no division by std": (["algorithm.normalize_std=false"], lambda rows, row: policy_loss(rows, std=False)),
    "dual clip": (["algorithm.dual_clip=3"], lambda rows, row: policy_loss(rows)),
    "no correction": (["algorithm.importance_correction=none"], lambda rows, row: policy_loss(rows)),
    "correction by sequence": (["algorithm.importance_correction=sequence"], lambda rows, row: policy_loss(rows)),
    "overlong filter": (["algorithm.overlong_filter=true"], lambda rows, row: policy_loss(rows)),
    "entropy": (
        ["algorithm.entropy_coefficient=0.1"],
        lambda rows, row: policy_loss(rows) - 0.1 * row["actor/entropy"],
    ),
    "kl k2 in the loss": (
        ["algorithm.kl_coefficient=0.5", "algorithm.kl_estimator=k2"],
        lambda rows, row: policy_loss(rows) + 0.5 * row["actor/kl_ref"],
    ),
    "kl k3 in the loss": (
        ["algorithm.kl_coefficient=0.5", "algorithm.kl_estimator=k3"],
        lambda rows, row: policy_loss(rows) + 0.5 * row["actor/kl_ref"],
    ),
    "another temperature": (["rollout.temperature=0.7"], lambda rows, row: policy_loss(rows)),
}
"""What is set, and the loss that must come out: a function of a step's rollouts and of its row of metrics."""


@pytest.mark.parametrize("option", ON_POLICY)
def test_the_loss_of_an_on_policy_step_is_the_one_written_out_by_hand(small: Small, option: str) -> None:
    overrides, expected = ON_POLICY[option]
    folder = run(small, *overrides)
    for step, row in enumerate(metrics(folder), start=1):
        assert all(math.isfinite(value) for value in row.values())
        assert row["loss"] == pytest.approx(expected(rollouts(folder, step), row), abs=2e-6)
        assert (row["actor/ratio_mean"], row["actor/ratio_max"], row["actor/approx_kl"]) == (1.0, 1.0, 0.0)
        assert row["mismatch/logprob_diff_max"] < 1e-4
        assert row["mismatch/weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["train/grad_norm"] > 0
        assert row["train/skipped_steps"] == 0
    lengths = [r["response_length"] for r in rollouts(folder, 1)]
    assert len(set(lengths)) > 2


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_reference_is_where_training_began(small: Small, estimator: str) -> None:
    overrides = ["algorithm.kl_coefficient=0.5", f"algorithm.kl_estimator={estimator}", "train.learning_rate=1e-2"]
    folder = run(small, *overrides)
    first, second = metrics(folder)
    assert abs(first["actor/kl_ref"]) < 1e-9
    assert second["actor/kl_ref"] > 1e-4
    (scored,) = {tuple(row["residents"]) for row in read_jsonl(folder / "memory.jsonl")[1:]}
    assert "reference_parameters" in scored
    phases = [row["phase"] for row in read_jsonl(folder / "memory.jsonl") if row["step"] == 1]
    assert phases == ["rollout", "reference", "update", "sync"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads the open files from /proc")
@pytest.mark.parametrize("placement", ["ring", "arena"])
def test_a_run_that_is_over_holds_no_file_and_no_host_memory(small: Small, model: Path, placement: str) -> None:
    """Also one that fails: its trainer is closed before the process group ends."""
    before = host_buffer_bytes()
    settings = ["algorithm.kl_coefficient=0.5", f"model.reference_placement={placement}"]
    folder = run(small, *settings, "train.optimizer_state=streamed")
    assert open_files(model) == []
    assert host_buffer_bytes() == before
    row = read_jsonl(folder / "memory.jsonl")[-1]
    assert row["on_host"] == ["optimizer_state", *(["reference_arena"] if placement == "arena" else [])]
    assert all(row["residents"][name] > 0 for name in row["on_host"])


def test_another_folder_can_be_the_reference(small: Small) -> None:
    trained = run(small, "train.learning_rate=1e-2")
    reference = locate_model(trained).model
    folder = run(small, "algorithm.kl_coefficient=0.5", f"model.reference={reference}", name="other")
    assert metrics(folder)[0]["actor/kl_ref"] > 1e-4


def test_grpo_has_sequence_means_and_a_kl_of_a_thousandth(small: Small) -> None:
    folder = run(small, "algorithm.name=grpo", "train.learning_rate=1e-2")
    for step, row in enumerate(metrics(folder), start=1):
        # The KL is a mean over sequences too, which the metrics do not show: bound it.
        policy = policy_loss(rollouts(folder, step), "sequence_mean")
        assert 0 <= row["loss"] - policy + 1e-6 <= 0.001 * (6 * row["actor/kl_ref"] + 0.01)
    assert metrics(folder)[1]["actor/kl_ref"] > 0


def test_kl_in_the_reward_moves_advantages_and_not_the_loss(small: Small, plain: Path) -> None:
    kl = ["algorithm.kl_in=reward", "algorithm.kl_estimator=k1", "algorithm.kl_coefficient=5"]
    folder = run(small, *kl, "train.learning_rate=1e-2")
    first, second = metrics(folder)
    assert abs(first["actor/kl_reward"]) < 1e-6
    assert first["loss"] == pytest.approx(metrics(plain)[0]["loss"], abs=1e-6)
    assert second["actor/kl_reward"] > 1e-3
    rows = rollouts(folder, 2)
    assert abs(second["loss"] - policy_loss(rows)) > 1e-4  # the advantages are not those of the scores alone
    assert [row["reward"] for row in rows] == [row["score"] for row in rows]
    assert second["reward/mean"] == pytest.approx(mean(row["score"] for row in rows))


def test_responses_that_were_cut_off_can_be_left_out_of_the_loss(small: Small, plain: Path) -> None:
    folder = run(small, "algorithm.overlong_filter=true")
    rows, row = rollouts(folder, 1), metrics(folder)[0]
    cut = [r for r in rows if r["finish_reason"] == "length"]
    assert 0 < len(cut) < 16
    assert [r["masked"] for r in rows] == [r["finish_reason"] == "length" for r in rows]
    assert {r["response_length"] for r in cut} == {6}
    assert row["response/masked"] == len(cut)
    assert row["response/truncated_share"] == len(cut) / 16
    assert row["train/tokens"] == sum(r["prompt_length"] + r["response_length"] for r in rows if not r["masked"])
    assert metrics(plain)[0]["train/tokens"] == sum(r["prompt_length"] + r["response_length"] for r in rows)


def test_the_overlong_penalty_rises_over_the_buffer(small: Small) -> None:
    folder = run(small, "algorithm.overlong_buffer=4", "algorithm.overlong_penalty=0.8")
    for step, row in enumerate(metrics(folder), start=1):
        rows = rollouts(folder, step)
        penalties = {1: 0, 2: 0, 3: 0.2, 4: 0.4, 5: 0.6, 6: 0.8}  # by response length; 6 at most, 4 of them the buffer
        for r in rows:
            assert r["reward"] == pytest.approx(r["score"] - penalties[r["response_length"]])
        assert row["reward/mean"] == pytest.approx(mean(r["reward"] for r in rows))
        assert row["reward/score_mean"] == pytest.approx(mean(r["score"] for r in rows))
        assert (row["reward/min"], row["reward/max"]) == (
            min(r["reward"] for r in rows),
            max(r["reward"] for r in rows),
        )
        assert row["loss"] == pytest.approx(policy_loss(rows), abs=2e-6)


def test_several_updates_of_a_rollout_leave_the_policy_that_sampled_it(small: Small) -> None:
    folder = run(
        small, "train.mini_batches_per_step=2", "train.epochs_per_rollout=2", "train.learning_rate=2e-2", "seed=3"
    )
    rows = metrics(folder)
    for row in rows:
        assert row["actor/ratio_max"] > 1.0
        assert row["actor/approx_kl"] > 0
        assert row["actor/clipped_low"] + row["actor/clipped_high"] > 0
        assert row["mismatch/logprob_diff_max"] < 1e-4  # old log-probs are those of the policy that sampled
    tokens = sum(r["prompt_length"] + r["response_length"] for r in rollouts(folder, 1))
    assert rows[0]["train/tokens"] == 2 * tokens
    assert {r["version"] for r in rollouts(folder, 2)} == {4}
    state = read_state(folder / "checkpoints" / "step_2")
    assert (state.policy_version, state.optimizer_steps) == (8, 8)
    phases = [row["phase"] for row in read_jsonl(folder / "memory.jsonl") if row["step"] == 1]
    assert phases == ["rollout", "logprob", "update", "sync"]


# What may change how a number is computed, and not which.
SAME_NUMBERS = [
    "train.token_budget=12",
    "train.logprob_chunk=1",
    "train.activation_checkpointing=full",
    "train.activation_checkpointing=selective",
    "model.packing=single",
    "model.packing=padded",
    "rollout.prefill_tokens=1",
    "rollout.kv_memory=3KiB",
    "reward.workers=3",
    "observe.rollout_samples=3",
]


@pytest.mark.parametrize("option", SAME_NUMBERS)
def test_how_the_work_is_cut_changes_no_number(small: Small, plain: Path, option: str) -> None:
    folder = run(small, option)
    for row, expected in zip(metrics(folder), metrics(plain), strict=True):
        for key in expected:
            if not key.startswith(("time/", "speed/", "mismatch/")):
                assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key
    texts = {(r["group"], r["sample"]): r["response"] for step in (1, 2) for r in rollouts(plain, step)}
    mine = {(r["group"], r["sample"]): r["response"] for step in (1, 2) for r in rollouts(folder, step)}
    assert mine.items() <= texts.items()
    assert len(mine) == (6 if "rollout_samples" in option else 32)
    if "kv_memory" in option:
        assert '"num_slots": 2' in (folder / "plan.json").read_text()


def test_float64_is_float64_all_the_way(small: Small, plain: Path) -> None:
    folder = run(small, "model.dtype=float64")
    assert {tensor.dtype for tensor in weights(folder, 2).values()} == {torch.float64}
    first, expected = metrics(folder)[0], metrics(plain)[0]
    assert first["mismatch/logprob_diff_max"] < 1e-6  # the engine's log-probs travel in float32
    assert first["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
    assert first["loss"] == pytest.approx(expected["loss"], abs=2e-6)


def test_computing_in_bfloat16_keeps_float32_weights_and_a_counted_copy(small: Small, plain: Path, model: Path) -> None:
    folder = run(small, "model.compute_dtype=bfloat16")
    assert {tensor.dtype for tensor in weights(folder, 2).values()} == {torch.float32}
    num_bytes = sum(tensor.nbytes for tensor in tensors(model).values())
    residents = read_jsonl(folder / "memory.jsonl")[-1]["residents"]
    assert residents["actor_parameters"] == num_bytes
    assert residents["rollout_parameters"] == num_bytes // 2
    for row in metrics(folder):
        assert row["mismatch/logprob_diff_mean"] < 0.1
        assert row["train/skipped_steps"] == 0
    assert 1e-5 < abs(metrics(folder)[0]["actor/entropy"] - metrics(plain)[0]["actor/entropy"]) < 0.1


def test_truncated_sampling_is_possible_without_the_correction(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    small.train(NO_EVAL, "rollout.top_k=3", expect=2)
    assert "algorithm.importance_correction=none" in capfd.readouterr().err
    folder = run(small, "rollout.top_k=3", "algorithm.importance_correction=none")
    for row in metrics(folder):
        assert row["mismatch/weight_max"] == 1.0
        assert row["mismatch/kl"] > 0.1  # engine renormalised, trainer not: measured, not corrected


SCHEDULES = {
    "constant": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0],
    "linear": [0.5, 1.0, 1.0, 0.7, 0.4, 0.1],
    "cosine": [0.5, 1.0, *(0.1 + 0.9 * (1 + math.cos(math.pi * i / 3)) / 2 for i in range(4))],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rates_follow_the_schedule(small: Small, schedule: str) -> None:
    overrides = [f"train.schedule={schedule}", "train.warmup_steps=2", "train.min_learning_rate_ratio=0.1"]
    folder = run(small, *overrides, "train.steps=6", "data.prompts_per_step=2", "rollout.samples_per_prompt=2")
    rates = [row["train/learning_rate"] / 1e-3 for row in metrics(folder)]
    assert rates == pytest.approx(SCHEDULES[schedule])


def test_the_gradient_is_clipped_to_its_norm(small: Small, plain: Path, model: Path) -> None:
    """Seen through AdamW's first moment, which after one step is (1 - beta1) times the gradient."""
    from safetensors.torch import load_file

    norms: list[float] = []
    for name, limit in (("clipped", "0.01"), ("free", "null")):
        folder = run(small, f"train.max_grad_norm={limit}", "train.steps=1", name=name)
        assert metrics(folder)[0]["train/grad_norm"] == pytest.approx(metrics(plain)[0]["train/grad_norm"], rel=1e-5)
        moments = load_file(folder / "checkpoints" / "step_1" / "optimizer" / "optimizer.safetensors")
        gradient = torch.cat([m.flatten() for n, m in moments.items() if n.endswith("exp_avg")]) / 0.1
        norms.append(float(gradient.norm()))
    assert norms == pytest.approx([0.01, metrics(plain)[0]["train/grad_norm"]], rel=1e-4)


def test_an_update_waits_until_a_save_in_the_background_has_read_the_weights(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("checkpoint.every=1", "train.steps=2", "checkpoint.keep=null")
    foreground = run(small, *options, name="foreground")
    write, seconds = ShardWriter.run, 3.0  # far longer than everything between two updates takes here

    def late(writer: ShardWriter) -> None:
        time.sleep(seconds)
        write(writer)

    monkeypatch.setattr(ShardWriter, "run", late)
    background = run(small, *options, "checkpoint.background=true", name="background")

    for step in (1, 2):
        for part in ("model", "optimizer"):
            first, second = (
                TensorFiles(sorted((folder / "checkpoints" / f"step_{step}" / part).glob("*.safetensors")))
                for folder in (foreground, background)
            )
            assert first.keys() == second.keys()
            assert all(torch.equal(first[name], second[name]) for name in first), (step, part)
