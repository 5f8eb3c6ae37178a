"""Truncated importance weights and mismatch metrics, by hand."""

import math

import pytest
import torch
from torch import Tensor

from plimsoll.config.algorithm import AlgorithmConfig
from plimsoll.loss.importance import ImportanceMode, MismatchStats, importance_weights

MODES: list[ImportanceMode] = ["none", "token", "sequence"]
# two sequences of three tokens; the first token of each was not sampled
ROLLOUT = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5, -1.5], dtype=torch.float64)
DIFF = torch.tensor([0.0, 0.5, 0.4, 0.0, -0.2, 0.9], dtype=torch.float64)
MASK = torch.tensor([False, True, True, False, True, True])
SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 1])


def weigh(mode: ImportanceMode, diff: Tensor = DIFF, *, cap: float = 2.0) -> tuple[Tensor, MismatchStats]:
    return importance_weights(ROLLOUT + diff, ROLLOUT, MASK, SEQUENCE, mode=mode, cap=cap)


def test_token_weights_are_truncated_ratios() -> None:
    weights, stats = weigh("token")
    expected = [1.0, math.exp(0.5), math.exp(0.4), 1.0, math.exp(-0.2), 2.0]
    assert weights.tolist() == pytest.approx(expected)
    assert weights[5].item() == 2.0
    assert stats.metrics()["mismatch/truncated"] == 1 / 4


def test_sequence_weight_is_the_truncated_product_over_sampled_tokens() -> None:
    weights, stats = weigh("sequence")
    assert weights.tolist() == pytest.approx([1.0, 2.0, 2.0, 1.0, 2.0, 2.0])  # exp(0.9), exp(0.7) are above 2
    assert stats.metrics()["mismatch/truncated"] == 1.0
    weights, stats = weigh("sequence", cap=2.2)
    assert weights.tolist() == pytest.approx([1.0, 2.2, 2.2, 1.0, math.exp(0.7), math.exp(0.7)])
    assert stats.metrics()["mismatch/truncated"] == 0.5


def test_none_weighs_one_and_still_measures() -> None:
    weights, stats = weigh("none", cap=0.5)
    assert weights.tolist() == [1.0] * 6
    assert stats.metrics()["mismatch/truncated"] == 0.0
    assert stats.metrics()["mismatch/logprob_diff_max"] == pytest.approx(0.9)


def test_metrics_by_hand() -> None:
    metrics = weigh("token")[1].metrics()
    diffs, rollout = DIFF[MASK], ROLLOUT[MASK]
    weights = torch.tensor([math.exp(0.5), math.exp(0.4), math.exp(-0.2), 2.0], dtype=torch.float64)
    assert metrics == pytest.approx(
        {
            "mismatch/logprob_diff_mean": 0.5,
            "mismatch/logprob_diff_max": 0.9,
            "mismatch/prob_diff_mean": ((rollout + diffs).exp() - rollout.exp()).abs().mean().item(),
            "mismatch/kl": -0.4,
            "mismatch/kl_k3": (diffs.exp() - 1 - diffs).mean().item(),
            "mismatch/perplexity_ratio": math.exp(-(rollout + diffs).mean().item()) / math.exp(-rollout.mean().item()),
            "mismatch/truncated": 0.25,
            "mismatch/weight_mean": weights.mean().item(),
            "mismatch/weight_max": 2.0,
            "mismatch/effective_share": (weights.sum() ** 2 / (4 * weights.square().sum())).item(),
        }
    )


@pytest.mark.parametrize("mode", MODES)
def test_equal_logprobs_weigh_exactly_one(mode: ImportanceMode) -> None:
    weights, stats = weigh(mode, torch.zeros(6, dtype=torch.float64))
    assert weights.tolist() == [1.0] * 6
    metrics = stats.metrics()
    assert metrics["mismatch/perplexity_ratio"] == metrics["mismatch/effective_share"] == 1.0
    assert metrics["mismatch/kl"] == metrics["mismatch/logprob_diff_max"] == metrics["mismatch/truncated"] == 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_unsampled_positions_are_never_read(mode: ImportanceMode, poison: float) -> None:
    weights, stats = weigh(mode)
    for old, rollout in ((poison, 0.0), (0.0, poison), (poison, poison)):
        got, got_stats = importance_weights(
            torch.where(MASK, ROLLOUT + DIFF, old),
            torch.where(MASK, ROLLOUT, rollout),
            MASK,
            SEQUENCE,
            mode=mode,
            cap=2.0,
        )
        assert torch.equal(got, weights)
        assert torch.equal(got_stats.sums, stats.sums)
        assert torch.equal(got_stats.maxima, stats.maxima)


@pytest.mark.parametrize("mode", MODES)
def test_weights_have_no_gradient(mode: ImportanceMode) -> None:
    old = (ROLLOUT + DIFF).requires_grad_()
    weights, stats = importance_weights(old, ROLLOUT, MASK, SEQUENCE, mode=mode, cap=2.0)
    assert not weights.requires_grad
    assert not stats.sums.requires_grad


@pytest.mark.parametrize("mode", MODES)
def test_a_long_sequence_far_off_stays_finite(mode: ImportanceMode) -> None:
    likely, unlikely = torch.full((6,), -1.0), torch.full((6,), -1000.0)
    for old, rollout in ((likely, unlikely), (unlikely, likely)):
        weights, stats = importance_weights(old, rollout, MASK, SEQUENCE, mode=mode, cap=2.0)
        assert torch.isfinite(weights).all()
        assert all(math.isfinite(value) for value in stats.metrics().values())


@pytest.mark.parametrize("mode", MODES)
def test_statistics_add_up_over_micro_batches_and_empty_ones(mode: ImportanceMode) -> None:
    def part(rows: slice) -> MismatchStats:
        old, rollout, mask = (ROLLOUT + DIFF)[rows], ROLLOUT[rows], MASK[rows]
        return importance_weights(old, rollout, mask, SEQUENCE[rows], mode=mode, cap=2.0)[1]

    merged = part(slice(0, 3)).merge(part(slice(0, 0))).merge(part(slice(3, 6)))
    assert merged.metrics() == pytest.approx(weigh(mode)[1].metrics())
    neutral = part(slice(0, 0)).metrics()
    assert neutral["mismatch/perplexity_ratio"] == neutral["mismatch/weight_mean"] == 1.0
    assert neutral["mismatch/kl"] == 0.0


def test_modes_are_those_of_the_recipe() -> None:
    assert AlgorithmConfig.model_fields["importance_correction"].annotation == ImportanceMode
