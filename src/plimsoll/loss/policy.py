"""Clipped policy loss a token: PPO (arXiv:1707.06347 eq. 7) with two clip bounds (DAPO, arXiv:2503.14476 eq. 10) and
dual clip (arXiv:1912.09729 eq. 5)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plimsoll.loss.tally import Tally, floats, largest, vector

MAX_LOG_RATIO = 20.0
"""|log-ratio| is cut here before exp (exp(20) = 4.9e8), so that one absurd token gives a finite loss. Outside the bound
the token has gradient 0; bf16 noise or one optimizer step stay far inside."""


@dataclass(slots=True, kw_only=True, frozen=True)
class PolicyStats(Tally):
    """sums: tokens, clipped low, clipped high, dual-clipped, ratio, approximate KL. maxima: ratio."""

    def metrics(self) -> dict[str, float]:
        """Means over the sampled tokens of everything that was merged; all 0 when there were none.

        `clipped_low`, `clipped_high`, `dual_clipped`: share of tokens whose gradient a bound has set to 0.
        `approx_kl`: mean of (r - 1) - log r, the k3 estimate of KL(old ‖ new).
        """
        num_tokens, low, high, dual, ratio, approx_kl = floats(self.sums)
        n = max(num_tokens, 1.0)
        return {
            "actor/clipped_low": low / n,
            "actor/clipped_high": high / n,
            "actor/dual_clipped": dual / n,
            "actor/ratio_mean": ratio / n,
            "actor/ratio_max": self.maxima.item(),
            "actor/approx_kl": approx_kl / n,
        }


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, PolicyStats]:
    """Loss of each token [T] (0 where `mask` is False) and what to report about it. All columns are [T], mask is bool.

        r    = exp(logprobs - old_logprobs)
        loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        loss = min(loss, -dual_clip A)                                  where A < 0, with dual clip
        loss = weights · loss                                           importance weights, outside the gradient

    Only `logprobs` has a gradient. When each batch gets a single on-policy update, old log-probs are not recomputed:
    pass `logprobs.detach()`; the ratio is exactly 1 and the gradient is -A · weight · ∇logprobs.
    A NaN at a sampled token stays a NaN: the update must see it and skip the step.
    """
    zero = logprobs.new_zeros(())
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), zero)
    # the difference may already be NaN where not sampled; `where` stops its value here and its gradient in backward
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = torch.where(mask, advantages.detach(), zero)
    ratio = log_ratio.exp()
    values = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    negative, positive = advantages < 0, advantages > 0
    dual = torch.zeros_like(mask)
    if dual_clip is not None:
        dual = negative & (ratio > dual_clip)
        values = torch.where(dual, -dual_clip * advantages, values)
    if weights is not None:
        values = values * torch.where(mask, weights.detach(), zero)
    low, high = negative & (ratio < 1 - clip_low), positive & (ratio > 1 + clip_high)
    masked_ratio = torch.where(mask, ratio.detach(), zero)
    stats = PolicyStats(
        sums=vector(
            mask.sum(),
            low.sum(),
            high.sum(),
            dual.sum(),
            masked_ratio.sum(dtype=torch.float64),
            (torch.expm1(log_ratio.detach()) - log_ratio.detach()).sum(dtype=torch.float64),
        ),
        maxima=vector(largest(masked_ratio)),
    )
    return values, stats
