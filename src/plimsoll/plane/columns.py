"""How a prompt and its response become columns of the plane."""

from collections.abc import Sequence

import torch
from torch import Tensor

from plimsoll.plane.local import LocalPlane
from plimsoll.types import DataRef


def sampled_mask(prompt_length: int, response_length: int, *, total_length: int | None = None) -> Tensor:
    """bool [L]: False for the prompt, True for each of the `response_length` tokens that the policy sampled.

    It comes from lengths alone, never from token values: a stop token that the policy sampled is trained, and nothing
    after it is, whatever ids stand there (a pad id may equal the stop id or be a token that the policy also samples).
    `total_length` (default prompt + response) is for rows that carry padding behind the response.
    """
    end = prompt_length + response_length
    length = end if total_length is None else total_length
    assert 0 <= prompt_length <= end <= length, f"prompt {prompt_length}, response {response_length}, total {length}"
    mask = torch.zeros(length, dtype=torch.bool)
    mask[prompt_length:end] = True
    return mask


def put_sample(
    plane: LocalPlane,
    ref: DataRef,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
) -> None:
    """Store token_ids, sampled and, for sampled responses, rollout_logprobs of one sample."""
    plane.put(
        ref,
        token_ids=torch.tensor([*prompt_ids, *response_ids], dtype=torch.int64),
        sampled=sampled_mask(len(prompt_ids), len(response_ids)),
    )
    if logprobs is not None:
        assert len(logprobs) == len(response_ids)
        plane.put(ref, rollout_logprobs=torch.tensor([0.0] * len(prompt_ids) + list(logprobs), dtype=torch.float32))
