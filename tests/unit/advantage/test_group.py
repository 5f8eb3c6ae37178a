"""Group advantages by hand, groups without signal, and identity by id."""

import math
import random
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest

from plimsoll.advantage.group import EPSILON, GroupAdvantages, SignalKind, group_advantages
from plimsoll.types import Group, GroupId, SampleId
from tests.unit.advantage.samples import group, group_of, rewards_of


def advantages(groups: list[Group], *, normalize_std: bool = True) -> GroupAdvantages:
    return group_advantages(groups, rewards_of(groups), normalize_std=normalize_std)


def values(result: GroupAdvantages, row: int) -> list[float]:
    return [v for k, v in sorted(result.values.items(), key=lambda item: item[0].index) if k.group.row == row]


def test_two_samples_by_hand() -> None:
    result = advantages([group(0, [1.0, 0.0])])
    expected = 0.5 / (math.sqrt(0.5) + EPSILON)
    assert values(result, 0) == [pytest.approx(expected, rel=1e-15), pytest.approx(-expected, rel=1e-15)]
    assert expected == pytest.approx(0.7071, abs=1e-4)
    assert values(advantages([group(0, [1.0, 0.0])], normalize_std=False), 0) == [0.5, -0.5]


def test_unequal_group_against_the_statistics_module() -> None:
    rewards = [0.3, -1.0, 2.5, 0.3, 0.0]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    result = advantages([group(0, rewards)])
    assert values(result, 0) == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards], rel=1e-12)
    assert result.signals[0].kind is SignalKind.SIGNAL
    assert result.num_no_signal == result.num_singleton == result.num_unscored_groups == 0


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.0, -0.7, 1e9, 1e-9])
@pytest.mark.parametrize("size", [2, 3, 7, 10])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero_and_are_counted(reward: float, size: int, normalize_std: bool) -> None:
    result = advantages([group(0, [reward] * size)], normalize_std=normalize_std)
    assert values(result, 0) == [0.0] * size
    assert result.num_no_signal == 1
    assert result.signals[0].kind is SignalKind.ALL_EQUAL
    assert result.signals[0].mean == pytest.approx(reward)


def test_rewards_that_differ_by_rounding_only_are_no_signal() -> None:
    assert 0.1 + 0.2 != 0.3
    assert values(advantages([group(0, [0.1 + 0.2, 0.3, 0.3])]), 0) == [0.0] * 3
    assert advantages([group(0, [0.3, 0.3 + 1e-6])]).num_no_signal == 0


def test_a_single_sample_gets_zero_and_is_counted() -> None:
    result = advantages([group(0, [2.0])])
    assert values(result, 0) == [0.0]
    assert (result.num_singleton, result.num_no_signal) == (1, 0)
    assert result.signals[0].kind is SignalKind.SINGLETON


def test_unscored_samples_are_in_no_statistic_and_get_no_advantage() -> None:
    result = advantages([group(0, [1.0, None, 0.0]), group(1, [None, 5.0]), group(2, [None, None])])
    assert values(result, 0) == values(advantages([group(0, [1.0, 0.0])]), 0)
    assert values(result, 1) == [0.0]
    assert values(result, 2) == []
    assert [signal.kind for signal in result.signals] == [
        SignalKind.SIGNAL,
        SignalKind.SINGLETON,
        SignalKind.UNSCORED,
    ]
    assert result.num_singleton == result.num_unscored_groups == 1
    assert result.num_unscored_samples == 4


def test_groups_go_by_id_however_samples_are_ordered_and_spread() -> None:
    first, second = group(0, [1.0, 0.0]), group(1, [1.0, 1.0, 0.0, 0.0])  # the first has lost two samples
    alone = {**advantages([first]).values, **advantages([second]).values}
    everything = [*first.samples, *second.samples]
    rewards = rewards_of([first, second])
    for seed in range(20):
        rng = random.Random(seed)
        rng.shuffle(everything)
        cut = rng.randint(0, len(everything))
        mixed = [group_of(0, everything[:cut]), group_of(1, everything[cut:])]
        assert group_advantages(mixed, rewards, normalize_std=True).values == alone


def test_the_same_row_in_another_epoch_is_another_group() -> None:
    first, again = group(0, [1.0, 0.0]), group(0, [0.0, 0.0])
    later = GroupId(epoch=1, row=0)
    moved = [replace(s, id=SampleId(group=later, index=s.id.index)) for s in again.samples]
    result = advantages([first, replace(again, id=later, samples=tuple(moved))])
    assert len(result.signals) == 2
    assert [result.values[s.id] for s in moved] == [0.0, 0.0]


def test_a_sample_listed_twice_is_our_own_mistake() -> None:
    twice = group(0, [1.0, 0.0])
    with pytest.raises(AssertionError, match="0:0 holds a sample twice"):
        advantages([twice, twice])


def test_grouping_and_filtering_import_no_torch() -> None:
    code = "import sys, plimsoll.advantage, plimsoll.advantage.keep; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
