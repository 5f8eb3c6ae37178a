"""The loss written out a second time, the slow way: one unpacked row at a time, whole logits, a Python loop a token.

Shares no line with the package: rows go through a plain model of transformers, autograd does the rest.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plimsoll.plane.local import LocalPlane
from plimsoll.types import Sample


@dataclass
class Row:
    ids: list[int]
    first: int  # index of the first sampled token
    rollout: list[float]
    advantage: float
    old: list[float] | None


def rows_of(plane: LocalPlane, samples: list[Sample]) -> list[Row]:
    rows: list[Row] = []
    for sample in samples:
        first = sample.prompt_length
        old = plane.get(sample.ref, "old_logprobs").tolist() if plane.has(sample.ref, "old_logprobs") else None
        rows.append(
            Row(
                ids=plane.get(sample.ref, "token_ids").tolist(),
                first=first,
                rollout=plane.get(sample.ref, "rollout_logprobs").tolist(),
                advantage=float(plane.get(sample.ref, "advantages")[first]),
                old=old,
            )
        )
    return rows


def distributions(model: PreTrainedModel, ids: list[int], temperature: float) -> Tensor:
    """log p(next | ids[:i + 1]) at row i, [L, V]."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)


def policy_loss(
    model: PreTrainedModel,
    frozen: PreTrainedModel | None,
    rows: list[Row],
    options: Any,  # AlgorithmConfig
    *,
    temperature: float,
    max_response: int,
) -> Tensor:
    """The loss of one optimizer step over all rows together."""
    num_tokens = sum(len(row.ids) - row.first for row in rows)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        logp = distributions(model, row.ids, temperature)
        ref = None
        if frozen is not None:
            with torch.no_grad():
                ref = distributions(frozen, row.ids, temperature)
        terms = [_token(i, row, logp, ref, options) for i in range(row.first, len(row.ids))]
        match options.aggregation:
            case "token_mean":
                total = total + sum(terms) / num_tokens
            case "sequence_mean":
                total = total + sum(terms) / len(terms) / len(rows)
            case "sequence_sum":
                total = total + sum(terms) / (len(rows) * max_response)
    return total


def _token(i: int, row: Row, logp: Tensor, ref: Tensor | None, options: Any) -> Tensor:
    current = logp[i - 1, row.ids[i]]
    old = float(current.detach()) if row.old is None else row.old[i]
    ratio = torch.exp(current - old)
    a = row.advantage
    r = float(ratio.detach())
    clipped = min(max(r, 1 - options.clip_low), 1 + options.clip_high)
    value = -ratio * a
    if clipped != r and -clipped * a > -r * a:  # inside the bounds both are the same number, and the gradient stays
        value = 0.0 * ratio - clipped * a
    if options.dual_clip is not None and a < 0 and float(value.detach()) > -options.dual_clip * a:
        value = 0.0 * ratio - options.dual_clip * a
    value = value * _weight(i, row, logp, options)
    if ref is not None and options.kl_in == "loss":
        d = current - ref[i - 1, row.ids[i]]
        value = value + options.kl_coefficient * {"k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[options.kl_estimator]
    p = logp[i - 1].exp()
    return value + options.entropy_coefficient * (p * logp[i - 1]).sum()


def _weight(i: int, row: Row, logp: Tensor, options: Any) -> float:
    def log_weight(j: int) -> float:
        trainer = float(logp[j - 1, row.ids[j]].detach()) if row.old is None else row.old[j]
        return trainer - row.rollout[j]

    match options.importance_correction:
        case "token":
            return min(math.exp(log_weight(i)), options.importance_cap)
        case "sequence":
            return min(math.exp(sum(log_weight(j) for j in range(row.first, len(row.ids)))), options.importance_cap)
        case _:
            return 1.0
