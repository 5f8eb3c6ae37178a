"""Rectangular parts of tensors: a start and a length along every dim."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(slots=True, kw_only=True, frozen=True)
class Box:
    """Elements `start[d] … start[d] + shape[d] - 1` of every dim d. A scalar's box has no dims and one element."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All of a tensor of this shape."""
        return cls(start=(0,) * len(shape), shape=tuple(shape))

    @property
    def num_elements(self) -> int:
        """Product of the lengths; 1 for a scalar."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """For indexing a tensor."""
        return tuple(slice(begin, begin + length) for begin, length in zip(self.start, self.shape, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """The common part; None when there is none."""
        starts = tuple(map(max, self.start, other.start))
        ends = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        if any(length <= 0 for length in shape):
            return None
        return Box(start=starts, shape=shape)

    def within(self, outer: "Box") -> "Box":
        """The same elements, counted from the start of `outer`, which must contain them."""
        starts = tuple(a - b for a, b in zip(self.start, outer.start, strict=True))
        assert all(a >= 0 and a + n <= m for a, n, m in zip(starts, self.shape, outer.shape, strict=True)), (
            f"{self} is not inside {outer}"
        )
        return Box(start=starts, shape=self.shape)
