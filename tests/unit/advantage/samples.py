"""Groups for tests, by rewards."""

from collections.abc import Sequence

from plimsoll.types import DataRef, FinishReason, Group, GroupId, Prompt, Sample, SampleId, Score


def sample(
    group: GroupId,
    index: int,
    reward: float | None,
    *,
    status: str | None = None,
    response_length: int = 3,
    finish_reason: FinishReason = FinishReason.STOP,
    masked: bool = False,
) -> Sample:
    """One sample; `reward` None is unscored unless `status` says otherwise."""
    sample_id = SampleId(group=group, index=index)
    status = status or ("unscored" if reward is None else "ok")
    return Sample(
        id=sample_id,
        ref=DataRef(key=str(sample_id)),
        prompt_length=2,
        response_length=response_length,
        finish_reason=finish_reason,
        version=0,
        score=Score(sample_id=sample_id, value=reward, status=status),
        reward=reward,
        masked=masked,
    )


def group_of(row: int, samples: Sequence[Sample]) -> Group:
    """A group that holds these samples."""
    prompt = Prompt(row=row, token_ids=(1, 2), text="", messages=())
    return Group(id=GroupId(epoch=0, row=row), samples=tuple(samples), prompt=prompt)


def group(row: int, rewards: Sequence[float | None]) -> Group:
    """A group of row `row` with one sample a reward."""
    group_id = GroupId(epoch=0, row=row)
    return group_of(row, [sample(group_id, index, reward) for index, reward in enumerate(rewards)])


def rewards_of(groups: Sequence[Group]) -> dict[SampleId, float]:
    """The rewards of the scored samples."""
    return {s.id: s.reward for g in groups for s in g.samples if s.reward is not None}
