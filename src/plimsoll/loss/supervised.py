"""Supervised loss: cross-entropy of the target tokens."""

import torch
from torch import Tensor


def supervised_loss(logprobs: Tensor, mask: Tensor, *, num_loss_tokens: int) -> Tensor:
    """This micro-batch's share of the mini-batch's loss: -Σ logprobs over the mask / num_loss_tokens, a scalar.

    `logprobs` [T] (at temperature 1), `mask` bool [T], `num_loss_tokens` of the whole mini-batch over all ranks: the
    shares of all micro-batches add up to the mean over target tokens, however the mini-batch was cut.
    """
    return -torch.where(mask, logprobs, logprobs.new_zeros(())).sum() / max(num_loss_tokens, 1)
