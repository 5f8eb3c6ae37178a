"""What the driver reports of a step's rollout, counted by hand."""

import pytest

from plimsoll.advantage.keep import DropCounts, DropReason
from plimsoll.report import rollout_metrics
from plimsoll.rollout.collector import Collected
from plimsoll.types import DataRef, FinishReason, Group, GroupId, Prompt, Sample, SampleId, Score


def sample(
    row: int,
    index: int,
    value: float | None,
    *,
    penalty: float = 0.0,
    length: int = 2,
    status: str = "ok",
    masked: bool = False,
    cut: bool = False,
) -> Sample:
    sample_id = SampleId(group=GroupId(epoch=0, row=row), index=index)
    return Sample(
        id=sample_id,
        ref=DataRef(key=str(sample_id)),
        prompt_length=3,
        response_length=length,
        finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        version=0,
        score=Score(sample_id=sample_id, value=value, status=status),
        reward=None if value is None else value - penalty,
        masked=masked,
    )


def group(*samples: Sample) -> Group:
    row = samples[0].id.group.row
    return Group(id=samples[0].id.group, samples=samples, prompt=Prompt(row=row, token_ids=(1,), text="", messages=()))


def collected(*groups: Group, generate: float, score: float) -> Collected:
    tokens = sum(s.response_length for g in groups for s in g.samples)
    return Collected(groups=groups, num_tokens=tokens, generate_seconds=generate, score_seconds=score)


def test_metrics_of_two_rounds_of_which_two_groups_are_trained() -> None:
    kept = group(sample(0, 0, 1.0, length=4), sample(0, 1, 0.5, penalty=0.25, length=8, cut=True, masked=True))
    dropped = group(sample(1, 0, 1.0), sample(1, 1, None, status="error"))
    late = group(sample(2, 0, None, status="unscored", length=3), sample(2, 1, -1.0, length=5))
    lost = group(sample(3, 0, None, status="timeout"), sample(3, 1, None, status="unscored"))
    rounds = [
        collected(kept, dropped, generate=2.0, score=0.5),
        collected(late, lost, generate=1.0, score=0.25),
    ]
    drops = DropCounts(by_reason={DropReason.ERRORS: 2})
    assert rollout_metrics([kept, late], rounds, drops) == {
        "reward/mean": pytest.approx((1.0 + 0.25 - 1.0) / 3),
        "reward/max": 1.0,
        "reward/min": -1.0,
        "reward/score_mean": pytest.approx((1.0 + 0.5 - 1.0) / 3),
        "reward/unscored": 2.0,
        "reward/timeouts": 1.0,
        "reward/errors": 1.0,
        "response/length_mean": 5.0,
        "response/length_max": 8.0,
        "response/truncated_share": 1 / 4,
        "response/masked": 1.0,
        "rollout/rounds": 2.0,
        "rollout/groups": 4.0,
        "rollout/no_signal_groups": 2.0,
        "rollout/tokens": 28.0,
        "time/generate": 3.0,
        "time/reward": 0.75,
        "speed/tokens_per_second": pytest.approx(28 / 3),
    }


def test_a_step_without_a_single_score_has_no_reward() -> None:
    nothing = group(sample(0, 0, None, status="unscored"), sample(0, 1, None, status="unscored"))
    values = rollout_metrics([nothing], [collected(nothing, generate=0.0, score=0.0)], DropCounts())
    assert not {"reward/mean", "reward/max", "reward/min", "reward/score_mean"} & set(values)
    assert values["speed/tokens_per_second"] == 0.0
    assert values["reward/unscored"] == 2.0
