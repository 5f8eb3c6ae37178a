"""Dynamic sampling (DAPO, arXiv:2503.14476 §3.2): which groups are worth training on, and why the others are not."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from plimsoll.advantage.group import SignalKind, group_signal
from plimsoll.types import FinishReason, Group, Sample


class DropReason(StrEnum):
    """Why a group has nothing to learn from; the first that applies, in this order.

    Rewards need not be 0 or 1: what counts is whether all are equal, and whether they are positive.
    """

    ERRORS = "errors"  # fewer than two scored samples, and the reward function failed on at least one
    UNSCORED = "unscored"  # fewer than two scored samples: the reward function said None
    SINGLETON = "single-sample"  # the group has only one sample
    TOO_LONG = "too-long"  # all scored samples hit the length limit (and are equal), or all are masked for it
    ALL_CORRECT = "all-correct"  # all rewards equal and positive: with 0/1 rewards, all 1
    ALL_WRONG = "all-wrong"  # all rewards equal, zero or negative
    EMPTY = "empty"  # rewards differ, but no sample in the loss has a sampled token


@dataclass(slots=True, kw_only=True, frozen=True)
class DropCounts:
    """Groups without signal by reason. Rounds of one step are added up."""

    by_reason: Mapping[DropReason, int] = field(default_factory=dict[DropReason, int])

    def __add__(self, other: Self) -> "DropCounts":
        return DropCounts(by_reason=dict(Counter(self.by_reason) + Counter(other.by_reason)))

    @property
    def total(self) -> int:
        """Groups, all reasons together."""
        return sum(self.by_reason.values())

    def advice(self) -> str:
        """What to change, by the most frequent reason."""
        most = max(self.by_reason, key=lambda reason: self.by_reason[reason], default=DropReason.ALL_WRONG)
        return {
            DropReason.TOO_LONG: "responses hit rollout.max_response_tokens: raise it",
            DropReason.ALL_CORRECT: "the problems are too easy: take others, or raise rollout.samples_per_prompt",
            DropReason.ALL_WRONG: "the problems are too hard, or reward.function never pays: look at RUN/rollouts, "
            "warm the model up, or raise rollout.samples_per_prompt",
            DropReason.ERRORS: "reward.function fails: look at reward.timeout and at its traceback",
            DropReason.UNSCORED: "reward.function says None: it should score these responses",
        }.get(most, "raise rollout.samples_per_prompt")

    def describe(self) -> str:
        """For people: "all-correct 12 groups, errors 1 group"; most frequent first."""
        ranked = sorted(self.by_reason.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{reason} {count} group{'s' if count > 1 else ''}" for reason, count in ranked if count)


@dataclass(slots=True, kw_only=True, frozen=True)
class Kept:
    """Groups to train on, in the order given, and those without signal."""

    groups: tuple[Group, ...]
    dropped: tuple[Group, ...]  # empty when `dynamic` is off
    no_signal: DropCounts  # of the groups given, whether they were dropped or not


def keep(groups: Sequence[Group], *, dynamic: bool) -> Kept:
    """Split groups into those with signal and the others; with `dynamic` False all are kept, and only counted.

    A group has signal when the rewards of its scored samples differ and at least one sample that the loss may use has a
    sampled token. The reward is the shaped one, because that is what the advantage is made of.
    """
    reasons = [(group, drop_reason(group)) for group in groups]
    counts = Counter(reason for _, reason in reasons if reason is not None)
    return Kept(
        groups=tuple(group for group, reason in reasons if reason is None or not dynamic),
        dropped=tuple(group for group, reason in reasons if reason is not None and dynamic),
        no_signal=DropCounts(by_reason=dict(counts)),
    )


def drop_reason(group: Group) -> DropReason | None:
    """Why the group has nothing to learn from; None: it has signal."""
    scored = [sample for sample in group.samples if sample.reward is not None]
    signal = group_signal(group.id, [sample.reward for sample in scored if sample.reward is not None])
    if signal.kind in (SignalKind.UNSCORED, SignalKind.SINGLETON):
        return _too_few(group)
    if all(sample.masked for sample in scored):
        return DropReason.TOO_LONG
    if signal.kind is SignalKind.ALL_EQUAL:
        assert signal.mean is not None
        if signal.mean > 0:
            return DropReason.ALL_CORRECT
        cut_off = all(sample.finish_reason is FinishReason.LENGTH for sample in scored)
        return DropReason.TOO_LONG if cut_off else DropReason.ALL_WRONG
    return None if any(_in_loss(sample) for sample in scored) else DropReason.EMPTY


def _too_few(group: Group) -> DropReason:
    if len(group.samples) == 1 and group.samples[0].reward is not None:
        return DropReason.SINGLETON
    failed = any(sample.score.status in ("timeout", "error") for sample in group.samples)
    return DropReason.ERRORS if failed else DropReason.UNSCORED


def _in_loss(sample: Sample) -> bool:
    return not sample.masked and sample.response_length > 0
