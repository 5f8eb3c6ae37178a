"""Masks from lengths and columns from numbers, down to the loss of a sample without tokens."""

import pytest
import torch

from plimsoll.advantage.expand import expand_advantage
from plimsoll.advantage.group import group_advantages
from plimsoll.loss.aggregate import aggregate
from plimsoll.loss.policy import policy_loss
from plimsoll.plane.columns import sampled_mask
from plimsoll.types import GroupId
from tests.unit.advantage.samples import group_of, rewards_of, sample


@pytest.mark.parametrize(
    ("token_ids", "response_length", "expected"),
    [
        ([5, 6, 2, 2], 3, [1, 1, 1, 0]),  # pad = stop = 2; the sampled stop is trained, the pad is not
        ([5, 2, 2, 2], 1, [1, 0, 0, 0]),  # ended by length: a search for the stop id would find the pad
        ([5, 0, 0, 0], 1, [1, 0, 0, 0]),  # pad = 0, no stop
        ([5, 6, 2, 2], 0, [0, 0, 0, 0]),
    ],
)
def test_mask_of_a_padded_row_comes_from_the_length(
    token_ids: list[int], response_length: int, expected: list[int]
) -> None:
    mask = sampled_mask(0, response_length, total_length=len(token_ids))
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == expected


def test_prompt_is_not_sampled_and_the_response_is() -> None:
    assert sampled_mask(2, 3).int().tolist() == [0, 0, 1, 1, 1]
    assert sampled_mask(2, 0).int().tolist() == [0, 0]


def test_lengths_that_do_not_fit_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="total 4"):
        sampled_mask(2, 3, total_length=4)


def test_column_is_the_advantage_where_sampled_and_zero_elsewhere() -> None:
    column = expand_advantage(-1.5, torch.tensor([False, True, False, True]))
    assert column.dtype == torch.float32
    assert column.tolist() == [0.0, -1.5, 0.0, -1.5]


def test_an_empty_answer_counts_in_its_group_but_not_in_the_loss() -> None:
    group_id = GroupId(epoch=0, row=0)
    empty, other = sample(group_id, 0, 10.0, response_length=0), sample(group_id, 1, 0.0, response_length=3)
    groups = [group_of(0, [empty, other])]
    result = group_advantages(groups, rewards_of(groups), normalize_std=True)
    assert result.values[empty.id] == pytest.approx(0.7071, abs=1e-4)
    assert result.values[other.id] == pytest.approx(-0.7071, abs=1e-4)
    masks = [sampled_mask(s.prompt_length, s.response_length) for s in (empty, other)]
    columns = [expand_advantage(result.values[s.id], m) for s, m in zip((empty, other), masks, strict=True)]
    assert columns[0].tolist() == [0.0, 0.0]
    assert columns[1].tolist() == pytest.approx([0.0, 0.0, *[-0.7071] * 3], abs=1e-4)

    mask, advantages = torch.cat(masks), torch.cat(columns)
    logprobs = torch.full((len(mask),), -1.0).requires_grad_()
    per_token, _ = policy_loss(logprobs, logprobs.detach(), advantages, mask, clip_low=0.2, clip_high=0.2)
    loss = aggregate(
        per_token,
        mask,
        torch.tensor([0, 0, 1, 1, 1, 1, 1]),
        "sequence_mean",
        num_loss_tokens=3,
        num_loss_sequences=1,
        max_response_tokens=3,
    )
    assert loss.item() == pytest.approx(0.7071, abs=1e-4)
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert gradient[:4].tolist() == [0.0] * 4
    assert gradient[4:].tolist() == pytest.approx([0.7071 / 3] * 3, abs=1e-4)
