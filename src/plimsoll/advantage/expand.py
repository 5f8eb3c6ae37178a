"""From one number a sample to a column a token."""

import torch
from torch import Tensor


def expand_advantage(advantage: float, sampled: Tensor) -> Tensor:
    """float32 [L]: the sample's advantage at every sampled token, 0 elsewhere. `sampled` is bool [L]."""
    return torch.where(sampled, advantage, 0.0).to(torch.float32)
