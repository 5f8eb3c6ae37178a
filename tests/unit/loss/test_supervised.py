"""Supervised loss against torch's cross-entropy, whole and in parts."""

import math

import pytest
import torch

from plimsoll.loss.supervised import supervised_loss


def test_parts_add_up_to_cross_entropy_over_target_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 11, generator=generator, dtype=torch.float64)
    targets = torch.randint(11, (20,), generator=generator)
    mask = torch.rand(20, generator=generator) < 0.5
    logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
    n = int(mask.sum())
    parts = sum(supervised_loss(logprobs[a:b], mask[a:b], num_loss_tokens=n).item() for a, b in ((0, 6), (6, 20)))
    expected = torch.nn.functional.cross_entropy(logits[mask], targets[mask]).item()
    assert parts == pytest.approx(expected, abs=1e-14)


def test_positions_outside_the_mask_are_never_read() -> None:
    logprobs = torch.tensor([-1.0, math.nan, -math.inf], requires_grad=True)
    loss = supervised_loss(logprobs, torch.tensor([True, False, False]), num_loss_tokens=2)
    assert loss.item() == 0.5
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [-0.5, 0.0, 0.0]


def test_an_empty_batch_is_zero() -> None:
    assert supervised_loss(torch.zeros(0), torch.zeros(0, dtype=torch.bool), num_loss_tokens=0).item() == 0.0
