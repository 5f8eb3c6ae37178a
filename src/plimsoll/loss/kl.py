"""KL against the reference: an estimate a token, its value, and what its gradient is worth.

With d = logprobs - ref_logprobs of a sampled token (Schulman, "Approximating KL divergence", 2020):

    estimator  value               mean          gradient in the loss             score term in the reward
    k1         d                   KL            0: ∇d is the score               ∇KL
    k2         d² / 2              KL to 2nd     d · ∇logprobs: its mean is ∇KL   not ∇KL
    k3         exp(-d) - 1 + d     KL, >= 0      (1 - exp(-d)) ∇logprobs: its     not ∇KL
                                                 mean is ∇KL(ref ‖ policy)

Samples come from the policy, so the gradient of a sample mean drops the score term E[k ∇logprobs] of ∇E[k]. Therefore:
in the loss k2 is the unbiased choice and k1 is none at all; in the reward k1 is. Both hold for samples of the current
policy; after an off-policy update they are off by the ratio. docs/algorithms.md has the numbers.
"""

from typing import Literal, assert_never

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
"""As `algorithm.kl_estimator`."""

MAX_EXPONENT = 20.0
"""k3 cuts -d here before exp: at d = -100 fp32 would give inf. Beyond the bound k3 is constant, with gradient 0."""


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: KlEstimator,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Estimate of KL(policy ‖ ref) at each token [T], differentiable in `logprobs`; 0 where `mask` (bool) is False.

    `mask` None: every token given was sampled.
    """
    difference = logprobs - ref_logprobs.detach()
    if mask is not None:
        difference = torch.where(mask, difference, difference.new_zeros(()))
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            bounded = difference.clamp(min=-MAX_EXPONENT)
            return torch.expm1(-bounded) + bounded
        case _:
            assert_never(estimator)


def kl_in_reward(old_logprobs: Tensor, ref_logprobs: Tensor, sampled: Tensor, estimator: KlEstimator) -> Tensor:
    """What `algorithm.kl_in: reward` takes off a sample's reward, before the coefficient: the sum over its sampled
    tokens, float64 0-d, outside the graph. Columns [L] of one sample."""
    with torch.no_grad():
        return kl_penalty(old_logprobs, ref_logprobs, estimator, mask=sampled).sum(dtype=torch.float64)
