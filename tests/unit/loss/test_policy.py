"""Clipped policy loss: values and gradients by hand, and what stays out of it."""

import math

import pytest
import torch
from torch import Tensor

from plimsoll.loss.policy import MAX_LOG_RATIO, PolicyStats, policy_loss

NAN = math.nan
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def columns(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def test_each_region_of_the_clip_by_hand() -> None:
    # ratio, advantage → loss, gradient by logprob
    table = [
        (1.1, 1.0, -1.1, -1.1),  # inside
        (1.5, 1.0, -1.28, 0.0),  # above, would go on rising: clipped at 1 + clip_high
        (0.5, 1.0, -0.5, -0.5),  # below, must come back: not clipped
        (0.9, -1.0, 0.9, 0.9),  # inside
        (0.5, -1.0, 0.8, 0.0),  # below, would go on falling: clipped at 1 - clip_low
        (1.5, -1.0, 1.5, 1.5),  # above, must come back: not clipped
        (4.0, -1.0, 3.0, 0.0),  # dual clip
        (4.0, 1.0, -1.28, 0.0),  # dual clip is for negative advantages only
        (1.3, 0.0, 0.0, 0.0),
    ]
    ratio, advantage, loss, gradient = columns(*map(list, zip(*table, strict=True)))
    logprobs = ratio.log().requires_grad_()
    mask = torch.ones(len(table), dtype=torch.bool)
    values, stats = policy_loss(logprobs, torch.zeros_like(ratio), advantage, mask, dual_clip=3.0, **CLIP)
    torch.testing.assert_close(values, loss)
    torch.testing.assert_close(torch.autograd.grad(values.sum(), logprobs)[0], gradient)
    metrics = stats.metrics()
    n = len(table)
    assert metrics["actor/clipped_low"] == 1 / n
    assert metrics["actor/clipped_high"] == 2 / n
    assert metrics["actor/dual_clipped"] == 1 / n
    assert metrics["actor/ratio_mean"] == pytest.approx(ratio.mean().item())
    assert metrics["actor/ratio_max"] == pytest.approx(4.0)
    assert metrics["actor/approx_kl"] == pytest.approx((ratio - 1 - ratio.log()).mean().item())


def test_on_policy_gradient_is_the_policy_gradient_and_the_ratio_is_one() -> None:
    logprobs, advantages, weights = columns([-1.0, -2.0, -0.1], [2.0, -3.0, 0.5], [0.5, 2.0, 1.0])
    logprobs.requires_grad_()
    mask = torch.ones(3, dtype=torch.bool)
    values, stats = policy_loss(logprobs, logprobs.detach(), advantages, mask, weights=weights, dual_clip=3.0, **CLIP)
    torch.testing.assert_close(torch.autograd.grad(values.sum(), logprobs)[0], -advantages * weights, atol=0, rtol=0)
    assert stats.metrics()["actor/ratio_mean"] == stats.metrics()["actor/ratio_max"] == 1.0
    assert stats.metrics()["actor/approx_kl"] == 0.0


def test_weights_advantages_and_old_logprobs_get_no_gradient() -> None:
    logprobs, old, advantages, weights = columns([-1.0], [-1.1], [2.0], [0.5])
    leaves = [leaf.requires_grad_() for leaf in (logprobs, old, advantages, weights)]
    values, _ = policy_loss(logprobs, old, advantages, torch.tensor([True]), weights=weights, **CLIP)
    grads = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
    assert grads[0] is not None
    assert grads[1:] == (None, None, None)


@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf])
def test_unsampled_positions_are_never_read(poison: float) -> None:
    mask = torch.tensor([False, True, False, True])
    clean = columns([0.0, -1.0, 0.0, -2.0], [0.0, -1.5, 0.0, -1.0], [0.0, 2.0, 0.0, -1.0], [0.0, 0.5, 0.0, 2.0])

    def outcome(columns_: list[Tensor]) -> tuple[Tensor, Tensor, PolicyStats]:
        logprobs, old, advantages, weights = columns_
        logprobs = logprobs.clone().requires_grad_()
        values, stats = policy_loss(logprobs, old, advantages, mask, dual_clip=1.5, weights=weights, **CLIP)
        return values, torch.autograd.grad(values.sum(), logprobs)[0], stats

    values, gradient, stats = outcome(clean)
    assert gradient[mask].abs().min() >= 0
    assert torch.equal(gradient[~mask], torch.zeros(2, dtype=torch.float64))
    for i in range(len(clean)):
        poisoned = [torch.where(mask, c, poison) if i == j else c for j, c in enumerate(clean)]
        got_values, got_gradient, got_stats = outcome(poisoned)
        assert torch.equal(got_values, values)
        assert torch.equal(got_gradient, gradient)
        assert torch.equal(got_stats.sums, stats.sums)
        assert torch.equal(got_stats.maxima, stats.maxima)


def test_an_absurd_ratio_stays_finite_and_has_no_gradient() -> None:
    logprobs = torch.tensor([500.0, -500.0], requires_grad=True)
    values, stats = policy_loss(
        logprobs, torch.zeros(2), torch.tensor([-1.0, 1.0]), torch.ones(2, dtype=torch.bool), **CLIP
    )
    assert values[0].item() == pytest.approx(math.exp(MAX_LOG_RATIO))
    assert torch.isfinite(stats.sums).all()
    assert torch.equal(torch.autograd.grad(values.sum(), logprobs)[0], torch.zeros(2))


def test_nan_at_a_sampled_token_is_not_hidden() -> None:
    values, _ = policy_loss(
        torch.tensor([NAN, 0.0]), torch.zeros(2), torch.ones(2), torch.ones(2, dtype=torch.bool), **CLIP
    )
    assert values.isnan().tolist() == [True, False]


def test_statistics_of_micro_batches_add_up_to_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(40, generator=generator) < 0.6

    def stats(rows: slice) -> PolicyStats:
        return policy_loss(logprobs[rows], old[rows], advantages[rows], mask[rows], dual_clip=3.0, **CLIP)[1]

    whole = stats(slice(None)).metrics()
    parts = stats(slice(0, 11)).merge(stats(slice(11, 11))).merge(stats(slice(11, 40))).metrics()
    assert parts == pytest.approx(whole, rel=1e-12)


def test_no_token_at_all_is_zero_everywhere() -> None:
    empty = torch.zeros(0)
    values, stats = policy_loss(empty, empty, empty, torch.zeros(0, dtype=torch.bool), dual_clip=3.0, **CLIP)
    assert values.shape == (0,)
    assert set(stats.metrics().values()) == {0.0}
