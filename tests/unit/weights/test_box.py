"""Rectangular parts, against sets of indexes."""

from itertools import product

import pytest
import torch

from plimsoll.weights.box import Box

LENGTHS = ((0, 1), (0, 3), (1, 2), (2, 2), (3, 1))
BOXES = [Box(start=(a, c), shape=(b, d)) for (a, b), (c, d) in product(LENGTHS, LENGTHS)]


def indexes(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, a + n) for a, n in zip(box.start, box.shape, strict=True))))


def test_the_intersection_holds_the_common_indexes() -> None:
    for one, other in product(BOXES, BOXES):
        common = one.intersect(other)
        assert (indexes(common) if common else set()) == indexes(one) & indexes(other)


def test_a_part_counted_from_its_outer_box_picks_the_same_elements() -> None:
    full = torch.arange(20).reshape(4, 5)
    for inner, outer in product(BOXES, BOXES):
        if indexes(inner) <= indexes(outer):
            assert torch.equal(full[outer.slices][inner.within(outer).slices], full[inner.slices])


def test_a_part_outside_of_its_outer_box_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="is not inside"):
        Box(start=(0,), shape=(3,)).within(Box(start=(1,), shape=(3,)))


def test_a_scalar_is_a_box_of_one_element() -> None:
    scalar = Box.whole(())
    assert scalar.num_elements == 1
    assert scalar.intersect(Box.whole(())) == scalar
    assert torch.tensor(7)[scalar.slices] == 7


def test_an_empty_part_has_no_elements_and_meets_nothing() -> None:
    empty = Box(start=(1, 0), shape=(0, 5))
    assert empty.num_elements == 0
    assert empty.intersect(Box.whole((4, 5))) is None
