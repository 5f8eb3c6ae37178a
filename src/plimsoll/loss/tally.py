"""Sums and maxima over tokens that micro-batches and ranks add up before anything is divided."""

from dataclasses import dataclass, replace
from typing import Self, cast

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True, frozen=True)
class Tally:
    """Base. Two vectors, so that adding up needs no device sync and ranks need one reduction each.

    `merge` over micro-batches; over ranks a sum of `sums` and a maximum of `maxima`; only then `metrics()` of the
    subclass, which names the entries.
    """

    sums: Tensor  # [entries of the subclass] float64, added
    maxima: Tensor  # [entries of the subclass] float64, each >= 0, compared

    def merge(self, other: Self) -> Self:
        """Both together: sums added, maxima compared."""
        return replace(
            self,
            sums=self.sums + other.sums,
            maxima=torch.maximum(self.maxima, other.maxima),
        )


def vector(*scalars: Tensor) -> Tensor:
    """0-d tensors → one float64 vector, outside the graph."""
    return torch.stack([scalar.detach().to(torch.float64) for scalar in scalars])


def largest(values_T: Tensor) -> Tensor:
    """Maximum of non-negative values, 0 when there are none."""
    return values_T.amax() if values_T.numel() else values_T.new_zeros(())


def floats(entries: Tensor) -> list[float]:
    """The entries of a vector as Python numbers, with one device sync."""
    return cast(list[float], entries.tolist())  # pyright: ignore[reportUnknownMemberType]
