"""Advantages: one estimator a file; which groups carry a signal; from a number a sample to a column.

`expand` alone imports torch, so that the driver and the reward processes can import the rest.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from plimsoll.advantage.group import GroupAdvantages, group_advantages
from plimsoll.types import Group, SampleId


class Estimator(Protocol):
    """From rewards to one advantage a sample."""

    def __call__(
        self,
        groups: Sequence[Group],
        rewards: Mapping[SampleId, float],
        *,
        normalize_std: bool,
    ) -> GroupAdvantages:
        """`rewards` leaves out the samples that were not scored."""
        ...


ESTIMATORS: dict[str, Estimator] = {
    "group": group_advantages,
}
