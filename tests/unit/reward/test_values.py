import decimal
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from plimsoll.reward.values import NotARewardError, to_list, to_parts, to_reward


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (0, 0.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(2), 2.0),
        (torch.tensor(0.25), 0.25),
        (torch.tensor(True), 1.0),
        (None, None),
    ],
)
def test_accepted(value: object, expected: float | None) -> None:
    assert to_reward(value) == expected


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("1.0", "str"),
        ([1.0], "list"),
        ((1.0, 2.0), "tuple"),
        ({"reward": 1.0}, "dict"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (torch.tensor(float("nan")), "nan"),
        (torch.tensor([1.0]), "Tensor of 1 dimensions"),
        (np.array([1.0]), "ndarray of 1 dimensions"),
        (1j, "complex"),
        (decimal.Decimal(1), "Decimal"),
        (10**400, "too large"),
        (np.ndarray, "type"),
    ],
)
def test_rejected_by_name(value: object, name: str) -> None:
    with pytest.raises(NotARewardError, match=name):
        to_reward(value)


def test_a_list_of_rewards_is_a_list_a_tuple_or_an_array() -> None:
    assert to_list([1.0, None]) == [1.0, None]
    assert to_list((True, 0)) == [True, 0]
    assert to_list(np.array([1.0, 2.0])) == [1.0, 2.0]
    assert to_list(torch.tensor([1.0])) == [1.0]


def generator() -> Iterator[float]:
    yield 1.0


@pytest.mark.parametrize("values", [generator(), 1.0, "11", None, {0: 1.0}, torch.zeros(2, 2)])
def test_other_collections_are_rejected(values: object) -> None:
    with pytest.raises(NotARewardError, match="instead of a list"):
        to_list(values)


def test_parts_are_the_other_finite_numbers() -> None:
    assert to_parts({"score": 1.0, "acc": True, "length": 3, "pred": "x", "bad": float("nan"), "none": None}) == {
        "acc": 1.0,
        "length": 3.0,
    }
