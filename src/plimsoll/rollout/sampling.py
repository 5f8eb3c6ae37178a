"""From logits to tokens: temperature, truncation, one draw a row by inverse CDF.

Shapes: S rows (sequences), V vocabulary.

The cumulative distribution is summed in integers. Probabilities become counts of 2^50, and integer sums do not depend
on the order of summation, which on a GPU is not fixed: the same logits give the same token in every batch shape, and a
token of probability zero has count zero and is never drawn. A floating-point scan promises neither.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_COUNTS = 2.0**50
_CHUNK = 1 << 24
"""Elements of [rows, V] whose float64 and int64 copies exist at the same time (128 MiB each)."""


@dataclass(slots=True, kw_only=True, frozen=True)
class RowParams:
    """Sampling parameters of the rows, on the model's device, and what the host knows about them."""

    temperature: Tensor  # [S] float32; 1 where greedy
    greedy: Tensor  # [S] bool
    top_k: Tensor  # [S] int64; V where off
    top_p: Tensor  # [S] float64; 2 where off, which no cumulative sum reaches
    any_greedy: bool
    all_greedy: bool
    any_truncated: bool

    @staticmethod
    def build(
        temperature: NDArray[np.float32], top_k: NDArray[np.int64], top_p: NDArray[np.float64], device: torch.device
    ) -> "RowParams":
        """From columns of `SamplingParams` (temperature 0: greedy; top_k 0 and top_p 1: off), each of shape [S]."""
        greedy = temperature == 0
        return RowParams(
            temperature=torch.from_numpy(np.where(greedy, np.float32(1), temperature)).to(device, non_blocking=True),
            greedy=torch.from_numpy(greedy).to(device, non_blocking=True),
            top_k=torch.from_numpy(np.where(top_k > 0, top_k, np.iinfo(np.int64).max)).to(device, non_blocking=True),
            top_p=torch.from_numpy(np.where(top_p < 1, top_p, 2.0)).to(device, non_blocking=True),
            any_greedy=bool(greedy.any()),
            all_greedy=bool(greedy.all()),
            any_truncated=bool(((top_k > 0) | (top_p < 1)).any()),
        )

    def rows(self, start: int, stop: int) -> "RowParams":
        """Rows start ≤ row < stop; what the host knows stays that of all rows."""
        return RowParams(
            temperature=self.temperature[start:stop],
            greedy=self.greedy[start:stop],
            top_k=self.top_k[start:stop],
            top_p=self.top_p[start:stop],
            any_greedy=self.any_greedy,
            all_greedy=self.all_greedy,
            any_truncated=self.any_truncated,
        )


def sample(logits: Tensor, params: RowParams, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token for each row of logits [S, V] with uniform [S] (float64, in (0, 1)).

    Returns (token ids [S] int64, log-probabilities [S] float32) without touching the host. The log-probability is that
    of the distribution drawn from: after temperature, top-k and top-p. A greedy row is certain, so its value is 0.
    A row with a NaN or without any finite logit has log-probability NaN; the caller must look.
    """
    rows = max(1, _CHUNK // logits.shape[1])
    if logits.shape[0] <= rows:
        return _sample(logits, params, uniform)
    parts = [
        _sample(logits[i : i + rows], params.rows(i, i + rows), uniform[i : i + rows])
        for i in range(0, logits.shape[0], rows)
    ]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _sample(logits: Tensor, params: RowParams, uniform: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    if params.all_greedy:
        best, tokens = logits.max(dim=-1)
        return tokens, best - best  # 0, or NaN where the logits are not finite
    scaled = logits / params.temperature[:, None]
    if params.any_truncated:
        scaled = truncate(scaled, params.top_k, params.top_p)
    logprobs = scaled.log_softmax(dim=-1)
    cumulative = (logprobs.exp().double() * _COUNTS).long().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # floor(uniform * total) < total, so the first entry above the target exists and is a step of the distribution.
    # The clamps only act on rows that are not finite, whose log-probability says so.
    target = torch.minimum((uniform[:, None] * total).long(), total - 1)
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(0, logits.shape[1] - 1)
    chosen = logprobs.gather(1, tokens)[:, 0]
    tokens = tokens[:, 0]
    if params.any_greedy:
        best, first = logits.max(dim=-1)
        tokens = torch.where(params.greedy, first, tokens)
        chosen = torch.where(params.greedy, best - best, chosen)
    return tokens, chosen


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside the k most likely tokens, then outside the nucleus of what is left (Holtzman et al., 2020).

    logits [S, V] after temperature; top_k [S] (large: off), top_p [S] (2: off). The nucleus is the smallest set of most
    likely tokens whose probability reaches top_p; the token that crosses the line is in. Among equal logits the smaller
    id comes first, so that exactly k tokens are left.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], float("-inf"))
    probs = ordered.double().softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (rank > 0), float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ordered)
