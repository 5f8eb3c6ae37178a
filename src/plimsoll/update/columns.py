"""From the plane to one packed micro-batch, and back.

Only tokens that the policy sampled leave this file as columns, shape [N]: a loss that never sees another token cannot
read one. N counts the sampled tokens of the micro-batch, in the order of its samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plimsoll.model.rows import PackedRows, pack_rows
from plimsoll.plane.local import LocalPlane
from plimsoll.types import Sample


@dataclass(slots=True, kw_only=True, frozen=True)
class Columns:
    """Columns of one micro-batch at its sampled tokens, each [N]."""

    rollout_logprobs: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None  # None: the update is on-policy, the current log-probs are the old ones
    ref_logprobs: Tensor | None  # None: no reference


def read_rows(plane: LocalPlane, samples: Sequence[Sample], device: torch.device) -> PackedRows:
    """Token ids and mask of `samples`, packed."""
    return pack_rows(
        [plane.get(sample.ref, "token_ids") for sample in samples],
        [plane.get(sample.ref, "sampled") for sample in samples],
        device,
    )


def read_columns(plane: LocalPlane, samples: Sequence[Sample], like: Tensor, *, reference: bool) -> Columns:
    """The columns of the policy loss, in device and dtype of `like` (the log-probs); old ones if there are any."""
    sampled = torch.cat([plane.get(sample.ref, "sampled") for sample in samples])

    def column(name: str) -> Tensor:
        return torch.cat([plane.get(sample.ref, name) for sample in samples])[sampled].to(like)

    have_old = {plane.has(sample.ref, "old_logprobs") for sample in samples}
    assert len(have_old) == 1, "old log-probs were computed for a part of the micro-batch"
    return Columns(
        rollout_logprobs=column("rollout_logprobs"),
        advantages=column("advantages"),
        old_logprobs=column("old_logprobs") if have_old == {True} else None,
        ref_logprobs=column("ref_logprobs") if reference else None,
    )


def write_column(plane: LocalPlane, samples: Sequence[Sample], name: str, values: Tensor) -> None:
    """Spread `values` [N] into a column [L] a sample, 0 where not sampled."""
    masks = [plane.get(sample.ref, "sampled") for sample in samples]
    sizes = [int(mask.sum()) for mask in masks]
    parts = torch.split(values.detach().cpu(), sizes)
    for sample, mask, part in zip(samples, masks, parts, strict=True):
        column = torch.zeros(len(mask), dtype=part.dtype)
        column[mask] = part
        plane.put(sample.ref, **{name: column})
