"""Group-relative advantages (GRPO, arXiv:2402.03300 §4.1.2; without std: Dr. GRPO, arXiv:2503.20783)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from plimsoll.types import Group, GroupId, SampleId

EPSILON = 1e-6
"""Added to the standard deviation."""

SPREAD_NOISE = 1e-9
"""Rewards of a group that differ by no more than this, relative to the largest (at least 1), are equal: shaping
computes 0.1 + 0.2 here and 0.3 there, and such noise is no reason to keep a group as one with signal."""


class SignalKind(StrEnum):
    """What a group's rewards can teach."""

    SIGNAL = "signal"
    ALL_EQUAL = "all_equal"
    SINGLETON = "singleton"  # one scored sample: nothing to compare it with
    UNSCORED = "unscored"  # no scored sample


@dataclass(slots=True, kw_only=True, frozen=True)
class GroupSignal:
    """What the rewards of one group say."""

    group: GroupId
    kind: SignalKind
    num_scored: int
    mean: float | None  # of the scored rewards; None when UNSCORED


@dataclass(slots=True, kw_only=True, frozen=True)
class GroupAdvantages:
    """Advantages of a batch and how its groups came out."""

    values: Mapping[SampleId, float]  # every scored sample; exactly 0.0 in a group without signal
    signals: tuple[GroupSignal, ...]  # a group each, in order of first appearance
    num_no_signal: int  # groups of at least two scored samples, all equal
    num_singleton: int  # groups with one scored sample
    num_unscored_groups: int  # groups with none
    num_unscored_samples: int  # samples without a reward: in no group and in no loss


def group_signal(group: GroupId, rewards: Sequence[float]) -> GroupSignal:
    """What the scored rewards of one group can teach."""
    assert all(math.isfinite(reward) for reward in rewards), f"group {group}: rewards {rewards} passed the reward stage"
    if not rewards:
        return GroupSignal(group=group, kind=SignalKind.UNSCORED, num_scored=0, mean=None)
    if len(rewards) == 1:
        kind = SignalKind.SINGLETON
    else:
        noise = SPREAD_NOISE * max(1.0, *(abs(reward) for reward in rewards))
        kind = SignalKind.SIGNAL if max(rewards) - min(rewards) > noise else SignalKind.ALL_EQUAL
    return GroupSignal(
        group=group,
        kind=kind,
        num_scored=len(rewards),
        mean=math.fsum(rewards) / len(rewards),
    )


def group_advantages(
    groups: Sequence[Group], rewards: Mapping[SampleId, float], *, normalize_std: bool
) -> GroupAdvantages:
    """(reward - mean) / (std + 1e-6) within each group, std with n - 1; without `normalize_std` reward - mean.

    Samples belong to the group that their id names: neither the order of samples, nor their number, nor how they are
    spread over `groups` matters. `rewards` leaves out samples that were not scored: they are in no statistic and get no
    advantage. A sample counts with its scalar reward even when it has no response token or is masked from the loss.
    A group without signal and a singleton get exactly 0.0 and are counted.
    """
    members: dict[GroupId, list[SampleId]] = {}
    num_samples = 0
    for sample in (sample for group in groups for sample in group.samples):
        num_samples += 1
        scored = members.setdefault(sample.id.group, [])
        if sample.id in rewards:
            scored.append(sample.id)
    values: dict[SampleId, float] = {}
    signals: list[GroupSignal] = []
    for group_id, sample_ids in members.items():
        assert len(set(sample_ids)) == len(sample_ids), f"group {group_id} holds a sample twice"
        own = [rewards[sample_id] for sample_id in sample_ids]
        signals.append(group_signal(group_id, own))
        informative = signals[-1].kind is SignalKind.SIGNAL
        advantages = _normalised(own, normalize_std=normalize_std) if informative else [0.0] * len(own)
        values.update(zip(sample_ids, advantages, strict=True))
    kinds = [signal.kind for signal in signals]
    return GroupAdvantages(
        values=values,
        signals=tuple(signals),
        num_no_signal=kinds.count(SignalKind.ALL_EQUAL),
        num_singleton=kinds.count(SignalKind.SINGLETON),
        num_unscored_groups=kinds.count(SignalKind.UNSCORED),
        num_unscored_samples=num_samples - len(values),
    )


def _normalised(rewards: Sequence[float], *, normalize_std: bool) -> list[float]:
    """Two passes with exact sums: at least two rewards that differ."""
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + EPSILON) for c in centred]
