"""Truncated importance sampling between the engine that sampled and the trainer that learns.

Engine and trainer compute the same policy with different kernels, so that samples come from exp(rollout_logprobs) while
the loss believes exp(old_logprobs). The weight min(old / rollout, cap) corrects the expectation, truncation bounds its
variance (Ionides 2008, "Truncated importance sampling"; for RL engines Yao et al. 2025, "Your efficient RL framework
secretly brings you off-policy RL training").
"""

import math
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from plimsoll.loss.tally import Tally, floats, largest, vector

ImportanceMode = Literal["none", "token", "sequence"]
"""As `algorithm.importance_correction`."""

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio inside exp in the metrics, so that one absurd token leaves them finite."""


@dataclass(slots=True, kw_only=True, frozen=True)
class MismatchStats(Tally):
    """sums: tokens, |diff|, k1, k3, |probability diff|, truncated tokens, weight, weight². maxima: |diff|, weight.

    diff = old_logprobs - rollout_logprobs at a sampled token.
    """

    def metrics(self) -> dict[str, float]:
        """Means over the sampled tokens of everything that was merged; neutral values when there were none.

        `mismatch/kl`, `mismatch/kl_k3`: k1 and k3 estimates of KL(rollout ‖ trainer). `mismatch/perplexity_ratio`:
        trainer's perplexity of the samples over the engine's. `mismatch/effective_share`: (Σw)² / (n Σw²), the share
        of tokens that the weights leave effective. `mismatch/truncated`: share of tokens whose weight met the cap.
        """
        num_tokens, diff, k1, k3, prob_diff, truncated, weight, weight_square = floats(self.sums)
        diff_max, weight_max = floats(self.maxima)
        n = max(num_tokens, 1.0)
        return {
            "mismatch/logprob_diff_mean": diff / n,
            "mismatch/logprob_diff_max": diff_max,
            "mismatch/prob_diff_mean": prob_diff / n,
            "mismatch/kl": k1 / n,
            "mismatch/kl_k3": k3 / n,
            "mismatch/perplexity_ratio": math.exp(min(max(k1 / n, -MAX_LOG_RATIO), MAX_LOG_RATIO)),
            "mismatch/truncated": truncated / n,
            "mismatch/weight_mean": weight / n if num_tokens else 1.0,
            "mismatch/weight_max": weight_max if num_tokens else 1.0,
            "mismatch/effective_share": weight**2 / (n * weight_square) if weight_square else 1.0,
        }


def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    sequence_index: Tensor,
    *,
    mode: ImportanceMode,
    cap: float,
) -> tuple[Tensor, MismatchStats]:
    """Weight of each token [T], outside the graph and 1 where `mask` (bool) is False, and the mismatch to report.

    `sequence_index` int64 [T]: the sequence of the micro-batch that each token is of.

        none      1
        token     min(exp(old - rollout), cap)
        sequence  min(exp(Σ over the sequence's sampled tokens (old - rollout)), cap), the same for all its tokens

    When old log-probs are not recomputed (a single on-policy update), the trainer's own log-probs of the forward pass
    are the old ones: pass `logprobs.detach()`.
    """
    old, rollout = old_logprobs.detach(), rollout_logprobs.detach()
    diff = torch.where(mask, old - rollout, old.new_zeros(()))
    ratio, truncated = _truncated_ratio(diff, sequence_index, mode, cap)
    weights = torch.where(mask, ratio, ratio.new_ones(()))
    bounded = diff.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    prob_diff = torch.where(mask, old.exp() - rollout.exp(), old.new_zeros(()))
    counted = torch.where(mask, weights, weights.new_zeros(()))
    wide = torch.float64
    stats = MismatchStats(
        sums=vector(
            mask.sum(),
            diff.abs().sum(dtype=wide),
            -diff.sum(dtype=wide),
            (torch.expm1(bounded) - bounded).sum(dtype=wide),
            prob_diff.abs().sum(dtype=wide),
            (truncated & mask).sum(),
            counted.sum(dtype=wide),
            counted.square().sum(dtype=wide),
        ),
        maxima=vector(largest(diff.abs()), largest(counted)),
    )
    return weights, stats


def _truncated_ratio(diff: Tensor, sequence_index: Tensor, mode: ImportanceMode, cap: float) -> tuple[Tensor, Tensor]:
    """Truncated weight of each token and whether the cap was met, both [T]. `diff` is 0 where not sampled."""
    match mode:
        case "none":
            return torch.ones_like(diff), torch.zeros_like(diff, dtype=torch.bool)
        case "token":
            log_weight = diff
        case "sequence":
            num_sequences = int(sequence_index.max()) + 1 if len(diff) else 0
            log_weight_S = diff.new_zeros(num_sequences).index_add_(0, sequence_index, diff)
            log_weight = log_weight_S[sequence_index]
        case _:
            assert_never(mode)
    truncated = log_weight > math.log(cap)
    # cut before exp: the exp of a long sequence's sum may be inf
    return log_weight.clamp(max=math.log(cap)).exp().clamp(max=cap), truncated
