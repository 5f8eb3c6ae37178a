"""Value and expected gradient of each KL estimator, by enumeration over a policy of two tokens."""

import math

import pytest
import torch
from torch import Tensor

from plimsoll.config.algorithm import AlgorithmConfig
from plimsoll.loss.kl import KlEstimator, kl_in_reward, kl_penalty

THETA = math.log(4.0)  # sigmoid: 0.8
REFERENCE = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
ESTIMATORS: list[KlEstimator] = ["k1", "k2", "k3"]


def policy() -> tuple[Tensor, Tensor]:
    """theta and the log-probabilities of both tokens."""
    theta = torch.tensor(THETA, dtype=torch.float64, requires_grad=True)
    return theta, torch.stack([torch.nn.functional.logsigmoid(theta), torch.nn.functional.logsigmoid(-theta)])


def gradient(value: Tensor, theta: Tensor) -> float:
    return torch.autograd.grad(value, theta)[0].item()


def test_the_true_divergence_and_its_gradient() -> None:
    theta, logp = policy()
    divergence = (logp.exp() * (logp - REFERENCE)).sum()
    assert divergence.item() == pytest.approx(0.192745, abs=1e-6)
    assert gradient(divergence, theta) == pytest.approx(0.221807, abs=1e-6)


@pytest.mark.parametrize(("estimator", "mean"), [("k1", 0.192745), ("k2", 0.172320), ("k3", 0.192745)])
def test_mean_value(estimator: KlEstimator, mean: float) -> None:
    _, logp = policy()
    assert (logp.exp() * kl_penalty(logp, REFERENCE, estimator)).sum().item() == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.0), ("k2", 0.221807), ("k3", 0.3)])
def test_expected_gradient_in_the_loss(estimator: KlEstimator, expected: float) -> None:
    theta, logp = policy()
    # samples are drawn: their probability carries no gradient
    loss = (logp.exp().detach() * kl_penalty(logp, REFERENCE, estimator)).sum()
    assert gradient(loss, theta) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.221807), ("k2", -0.049495), ("k3", -0.078193)])
def test_expected_gradient_in_the_reward(estimator: KlEstimator, expected: float) -> None:
    theta, logp = policy()
    penalties = torch.stack(
        [
            kl_in_reward(logp[i : i + 1], REFERENCE[i : i + 1], torch.tensor([True]), estimator)
            for i in range(len(REFERENCE))
        ]
    )
    assert not penalties.requires_grad
    score_term = (logp.exp().detach() * penalties * logp).sum()
    assert gradient(score_term, theta) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e4, -1e4])
def test_extreme_ratios_are_finite_with_finite_gradient(estimator: KlEstimator, log_ratio: float) -> None:
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    value = kl_penalty(logprobs, torch.zeros(1), estimator)
    assert torch.isfinite(value).all()
    assert torch.isfinite(torch.autograd.grad(value.sum(), logprobs)[0]).all()


def test_k3_is_exact_inside_its_bound_and_without_gradient_beyond() -> None:
    logprobs = torch.tensor([0.0, 1e-4, 19.0, -19.0, 100.0, -100.0], dtype=torch.float64, requires_grad=True)
    value = kl_penalty(logprobs, torch.zeros(6, dtype=torch.float64), "k3")
    exact = [math.expm1(-d) + d for d in logprobs.tolist()[:5]]
    assert value[:5].tolist() == pytest.approx(exact, rel=1e-12)
    assert torch.autograd.grad(value.sum(), logprobs)[0][5].item() == 0.0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_unsampled_positions_are_never_read(estimator: KlEstimator) -> None:
    mask = torch.tensor([True, False])
    logprobs = torch.tensor([-1.0, math.nan], requires_grad=True)
    for reference in (torch.tensor([-1.5, math.nan]), torch.tensor([-1.5, math.inf])):
        value = kl_penalty(logprobs, reference, estimator, mask=mask)
        alone = kl_penalty(logprobs[:1], reference[:1], estimator)
        assert value.tolist() == [alone.item(), 0.0]
        assert torch.autograd.grad(value.sum(), logprobs)[0].tolist() == [
            torch.autograd.grad(alone.sum(), logprobs)[0][0].item(),
            0.0,
        ]
        assert kl_in_reward(logprobs, reference, mask, estimator).item() == alone.item()


def test_estimators_are_those_of_the_recipe() -> None:
    assert AlgorithmConfig.model_fields["kl_estimator"].annotation == KlEstimator
