"""The loss of one micro-batch: its share of the mini-batch's loss, so that shares only have to be added.

Σ over sampled tokens, aggregated:  importance weight · clipped policy loss  +  kl_coefficient · KL (kl_in: loss)
                                    - entropy_coefficient · entropy
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from plimsoll.config.algorithm import AlgorithmConfig
from plimsoll.loss.aggregate import aggregate
from plimsoll.loss.importance import MismatchStats, importance_weights
from plimsoll.loss.kl import kl_penalty
from plimsoll.loss.policy import PolicyStats, policy_loss
from plimsoll.types import MiniBatch
from plimsoll.update.columns import Columns


@dataclass(slots=True, kw_only=True, frozen=True)
class PolicyObjective:
    """One micro-batch. Sums are over its N sampled tokens, outside the graph."""

    loss: Tensor  # scalar, with graph
    policy: PolicyStats
    mismatch: MismatchStats
    entropy_sum: Tensor
    kl_sum: Tensor | None  # against the reference, by the recipe's estimator; None: no reference


def policy_objective(
    logprobs: Tensor,
    entropy: Tensor,
    columns: Columns,
    sequence_index: Tensor,
    mini: MiniBatch,
    config: AlgorithmConfig,
    max_response_tokens: int,
) -> PolicyObjective:
    """`logprobs`, `entropy`, `sequence_index` are [N]. Denominators come from `mini`, never from the micro-batch."""
    every = torch.ones_like(sequence_index, dtype=torch.bool)
    old = logprobs.detach() if columns.old_logprobs is None else columns.old_logprobs
    weights, mismatch = importance_weights(
        old,
        columns.rollout_logprobs,
        every,
        sequence_index,
        mode=config.importance_correction,
        cap=config.importance_cap,
    )
    values, policy = policy_loss(
        logprobs,
        old,
        columns.advantages,
        every,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        weights=weights,
    )
    kl = None if columns.ref_logprobs is None else kl_penalty(logprobs, columns.ref_logprobs, config.kl_estimator)
    if kl is not None and config.kl_in == "loss":
        values = values + config.kl_coefficient * kl
    if config.entropy_coefficient:
        values = values - config.entropy_coefficient * entropy
    loss = aggregate(
        values,
        every,
        sequence_index,
        config.aggregation,
        num_loss_tokens=mini.num_loss_tokens,
        num_loss_sequences=mini.num_loss_sequences,
        max_response_tokens=max_response_tokens,
    )
    return PolicyObjective(
        loss=loss,
        policy=policy,
        mismatch=mismatch,
        entropy_sum=entropy.detach().double().sum(),
        kl_sum=None if kl is None else kl.detach().double().sum(),
    )
