"""From a value a token to the loss of a mini-batch, with one global denominator.

Micro-batches only sum: the values returned for the micro-batches of a mini-batch (on all ranks) add up to its loss,
however it was cut, as long as no sequence is split.
"""

from typing import Literal, assert_never

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
"""As `algorithm.aggregation`."""


def aggregate(
    values: Tensor,
    mask: Tensor,
    sequence_index: Tensor,
    mode: Aggregation,
    *,
    num_loss_tokens: int,
    num_loss_sequences: int,
    max_response_tokens: int,
) -> Tensor:
    """This micro-batch's share of the mini-batch's loss, a scalar.

    `values` and `mask` (bool) are [T]; `sequence_index` int64 [T] says which sequence of the micro-batch each token is
    of. `num_loss_tokens` and `num_loss_sequences` are those of the whole mini-batch, over all ranks.

        token_mean     Σ values / num_loss_tokens                               (DAPO, arXiv:2503.14476 eq. 8)
        sequence_mean  Σ_sequences mean over its tokens / num_loss_sequences    (GRPO, arXiv:2402.03300 eq. 3)
        sequence_sum   Σ values / (num_loss_sequences · max_response_tokens)    (Dr. GRPO, arXiv:2503.20783)

    A mini-batch without loss tokens has loss 0 and gradient 0 (the update skips it).
    """
    values = torch.where(mask, values, values.new_zeros(()))
    match mode:
        case "token_mean":
            return values.sum() / max(num_loss_tokens, 1)
        case "sequence_mean":
            return (values / _own_length(mask, sequence_index, values.dtype)).sum() / max(num_loss_sequences, 1)
        case "sequence_sum":
            return values.sum() / (max(num_loss_sequences, 1) * max_response_tokens)
        case _:
            assert_never(mode)


def _own_length(mask: Tensor, sequence_index: Tensor, dtype: torch.dtype) -> Tensor:
    """For each token, how many tokens of its own sequence are in the mask [T]; at least 1."""
    if not len(mask):
        return mask.new_ones(0, dtype=dtype)
    num_sequences = int(sequence_index.max()) + 1
    lengths_S = torch.zeros(num_sequences, dtype=dtype, device=mask.device)
    lengths_S.index_add_(0, sequence_index, mask.to(dtype))
    return lengths_S.clamp_(min=1)[sequence_index]
