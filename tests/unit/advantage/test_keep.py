"""Which groups have signal, and the reason given for each that has not."""

import pytest

from plimsoll.advantage.keep import DropCounts, DropReason, drop_reason, keep
from plimsoll.types import FinishReason, GroupId
from tests.unit.advantage.samples import group, group_of, sample

ID = GroupId(epoch=0, row=0)
LENGTH = FinishReason.LENGTH


def test_dynamic_sampling_drops_groups_without_signal_and_counts_reasons() -> None:
    groups = [group(0, [1.0, 0.0]), group(1, [1.0, 1.0]), group(2, [0.0, 0.0]), group(3, [0.0, 0.5])]
    kept = keep(groups, dynamic=True)
    assert [g.id.row for g in kept.groups] == [0, 3]
    assert [g.id.row for g in kept.dropped] == [1, 2]
    assert kept.no_signal.by_reason == {DropReason.ALL_CORRECT: 1, DropReason.ALL_WRONG: 1}


def test_without_dynamic_sampling_everything_is_kept_and_still_counted() -> None:
    groups = [group(1, [1.0, 1.0]), group(0, [1.0, 0.0])]
    kept = keep(groups, dynamic=False)
    assert kept.groups == tuple(groups)
    assert kept.dropped == ()
    assert kept.no_signal.total == 1


def test_counts_of_three_rounds_with_constant_reward() -> None:
    rounds = [keep([group(row, [1.0, 1.0]) for row in range(4)], dynamic=True).no_signal for _ in range(3)]
    total = sum(rounds, DropCounts())
    assert total.total == 12
    assert total.describe() == "all-correct 12 groups"
    assert (total + DropCounts(by_reason={DropReason.ERRORS: 1})).describe() == "all-correct 12 groups, errors 1 group"
    assert DropCounts().describe() == ""


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 1.0], DropReason.ALL_CORRECT),
        ([0.3, 0.3], DropReason.ALL_CORRECT),
        ([0.0, 0.0], DropReason.ALL_WRONG),
        ([-1.0, -1.0], DropReason.ALL_WRONG),
        ([None, None], DropReason.UNSCORED),
        ([1.0, None], DropReason.UNSCORED),
        ([1.0], DropReason.SINGLETON),
        ([1.0, 0.0], None),
        ([1.0, 0.0, None], None),
        ([-1.0, -0.5], None),
    ],
)
def test_reason_by_rewards(rewards: list[float | None], reason: DropReason | None) -> None:
    assert drop_reason(group(0, rewards)) is reason


@pytest.mark.parametrize("status", ["error", "timeout"])
def test_failed_scoring_is_told_apart_from_unscored(status: str) -> None:
    failed = [sample(ID, 0, None, status=status), sample(ID, 1, 1.0)]
    assert drop_reason(group_of(0, failed)) is DropReason.ERRORS
    assert drop_reason(group_of(0, [*failed, sample(ID, 2, 0.0)])) is None


def test_all_cut_off_by_the_length_limit_is_told_apart_from_wrong() -> None:
    cut = [sample(ID, i, 0.0, finish_reason=LENGTH) for i in range(2)]
    assert drop_reason(group_of(0, cut)) is DropReason.TOO_LONG
    assert drop_reason(group_of(0, [*cut, sample(ID, 2, 0.0)])) is DropReason.ALL_WRONG
    right = [sample(ID, i, 1.0, finish_reason=LENGTH) for i in range(2)]
    assert drop_reason(group_of(0, right)) is DropReason.ALL_CORRECT


def test_masked_samples_count_in_the_statistics_but_cannot_carry_the_group() -> None:
    masked = [sample(ID, i, r, finish_reason=LENGTH, masked=True) for i, r in enumerate((0.0, 1.0))]
    assert drop_reason(group_of(0, masked)) is DropReason.TOO_LONG
    assert drop_reason(group_of(0, [masked[0], sample(ID, 1, 1.0)])) is None


def test_differing_rewards_without_a_sampled_token_have_nothing_to_train() -> None:
    empty = sample(ID, 0, 1.0, response_length=0)
    assert drop_reason(group_of(0, [empty, sample(ID, 1, 0.0, masked=True)])) is DropReason.EMPTY
    assert drop_reason(group_of(0, [empty, sample(ID, 1, 0.0)])) is None
