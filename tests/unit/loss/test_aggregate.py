"""Aggregation against brute force, for any cut of a mini-batch into micro-batches."""

import itertools
import random
from typing import get_args

import pytest
import torch
from torch import Tensor

from plimsoll.config.algorithm import AlgorithmConfig
from plimsoll.loss.aggregate import Aggregation, aggregate

MODES: tuple[Aggregation, ...] = get_args(Aggregation)
MAX_RESPONSE = 12


def sequences(seed: int) -> list[tuple[Tensor, Tensor]]:
    """(values, mask) of nine sequences; one has no loss token, one has a hole in its mask."""
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[Tensor, Tensor]] = []
    for length in (3, 7, 1, 12, 5, 2, 9, 4, 6):
        values = torch.randn(length, generator=generator, dtype=torch.float64)
        mask = torch.arange(length) >= length // 3
        found.append((values, mask))
    found[2][1][:] = False
    found[3][1][8] = False
    return found


def total(micro_batches: list[list[tuple[Tensor, Tensor]]], mode: Aggregation) -> float:
    """Sum over micro-batches, denominators of the whole."""
    everything = [sequence for micro in micro_batches for sequence in micro]
    num_tokens = sum(int(mask.sum()) for _, mask in everything)
    num_sequences = sum(bool(mask.any()) for _, mask in everything)
    parts = [
        aggregate(
            torch.cat([values for values, _ in micro]),
            torch.cat([mask for _, mask in micro]),
            torch.cat([torch.full((len(mask),), i) for i, (_, mask) in enumerate(micro)]),
            mode,
            num_loss_tokens=num_tokens,
            num_loss_sequences=num_sequences,
            max_response_tokens=MAX_RESPONSE,
        )
        for micro in micro_batches
    ]
    return sum(part.item() for part in parts)


def brute_force(everything: list[tuple[Tensor, Tensor]], mode: Aggregation) -> float:
    chosen = [[v for v, m in zip(values.tolist(), mask.tolist(), strict=True) if m] for values, mask in everything]
    chosen = [tokens for tokens in chosen if tokens]
    if mode == "token_mean":
        flat = [value for tokens in chosen for value in tokens]
        return sum(flat) / len(flat)
    if mode == "sequence_mean":
        return sum(sum(tokens) / len(tokens) for tokens in chosen) / len(chosen)
    return sum(sum(tokens) for tokens in chosen) / (len(chosen) * MAX_RESPONSE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(8))
def test_any_cut_into_micro_batches_gives_the_brute_force_result(mode: Aggregation, seed: int) -> None:
    rng = random.Random(seed)
    everything = sequences(seed)
    expected = brute_force(everything, mode)
    assert total([everything], mode) == pytest.approx(expected, abs=1e-14)
    rng.shuffle(everything)
    cuts = [0, *sorted(rng.sample(range(1, len(everything)), rng.randint(1, 8))), len(everything)]
    micro_batches = [everything[a:b] for a, b in itertools.pairwise(cuts)]
    assert total(micro_batches, mode) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_unsampled_values_reach_neither_loss_nor_gradient(mode: Aggregation) -> None:
    def loss(values: Tensor) -> tuple[Tensor, Tensor]:
        values = values.requires_grad_()
        result = aggregate(
            values,
            torch.tensor([True, True, False, False]),
            torch.tensor([0, 0, 0, 0]),
            mode,
            num_loss_tokens=2,
            num_loss_sequences=1,
            max_response_tokens=2,
        )
        return result.detach(), torch.autograd.grad(result, values)[0]

    # equal log-probs: the loss of a token is its advantage with the sign changed
    value, gradient = loss(-torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert value.item() == -1.0
    assert gradient.tolist() == [0.5, 0.5, 0.0, 0.0]
    for other in (10.0, float("nan"), float("inf")):
        value, gradient = loss(-torch.tensor([1.0, 1.0, other, other]))
        assert value.item() == -1.0
        assert gradient.tolist() == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_loss_tokens_is_zero_with_zero_gradient(mode: Aggregation) -> None:
    for length in (0, 3):
        values = torch.full((length,), float("nan"), requires_grad=True)
        result = aggregate(
            values,
            torch.zeros(length, dtype=torch.bool),
            torch.zeros(length, dtype=torch.int64),
            mode,
            num_loss_tokens=0,
            num_loss_sequences=0,
            max_response_tokens=4,
        )
        assert result.item() == 0.0
        assert torch.equal(torch.autograd.grad(result, values)[0], torch.zeros(length))


def test_modes_are_those_of_the_recipe() -> None:
    assert AlgorithmConfig.model_fields["aggregation"].annotation == Aggregation
