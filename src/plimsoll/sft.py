"""Supervised fine-tuning on the same worker: rows in, token-mean negative log-likelihood, checkpoints out."""

from dataclasses import dataclass
from typing import Any

from plimsoll.assemble import open_session
from plimsoll.batch.pack import pack
from plimsoll.cluster.signals import InterruptGuard
from plimsoll.config.recipe import Recipe
from plimsoll.memory.phases import Phase
from plimsoll.plane.columns import put_sample
from plimsoll.session import Session, due
from plimsoll.types import DataRef, FinishReason, Group, GroupId, Prompt, Sample, SampleId, Score, TrainBatch
from plimsoll.update.worker import PolicyWorker


@dataclass(slots=True, kw_only=True, frozen=True)
class SftSummary:
    """What `plimsoll sft` prints."""

    loss: float | None  # of the last step, nats a token
    steps: int
    run: str

    def as_json(self) -> dict[str, Any]:
        """One object."""
        return {"loss": self.loss, "steps": self.steps, "run": self.run}


def run(recipe: Recipe, *, resume: bool, overwrite: bool) -> SftSummary:
    """The whole command."""
    with (
        InterruptGuard(recipe.checkpoint.grace) as guard,
        open_session(recipe, objective="supervised", resume=resume, overwrite=overwrite) as session,
    ):
        return _train(session, guard)


def _train(session: Session, guard: InterruptGuard) -> SftSummary:
    plan = session.plan
    loss: float | None = None
    session.evaluate_start(guard)
    if guard.requested:
        guard.stop()
    for step in range(session.start_step + 1, plan.steps + 1):
        session.memory.begin_step(step)
        batch = _batch(session, session.stream.next_batch(), step)
        with session.enter(Phase.UPDATE):
            stats = session.policy.map(PolicyWorker.supervised, batch)[0]
        loss = stats.values["loss"]
        session.plane.drop(sample.ref for sample in batch.samples())
        last, evaluate = step == plan.steps, session.evaluation_due(step)
        accuracy = session.evaluate(guard) if evaluate else {}
        session.report(step, {**stats.values, **accuracy})
        if due(step, session.intervals.checkpoint_every, last=last) or guard.requested:
            session.save(step, guard)
            if guard.requested and not (last and (accuracy or not evaluate)):
                session.note_saved(step)
                guard.stop()
    return SftSummary(loss=loss, steps=plan.steps, run=str(session.folder.path))


def _batch(session: Session, rows: list[tuple[GroupId, Prompt]], step: int) -> TrainBatch:
    """Rows as groups of one given sample, so that packing and the worker need not know the difference."""
    groups = [Group(id=group, samples=(_given(session, group, prompt),), prompt=prompt) for group, prompt in rows]
    return pack(
        groups,
        step=step,
        token_budget=session.plan.token_budget,
        mini_batches=session.recipe.train.mini_batches_per_step,
    )


def _given(session: Session, group: GroupId, prompt: Prompt) -> Sample:
    sample_id = SampleId(group=group, index=0)
    ref = DataRef(key=str(sample_id))
    response = session.responses[prompt.row]
    put_sample(session.plane, ref, prompt.token_ids, response)
    return Sample(
        id=sample_id,
        ref=ref,
        prompt_length=len(prompt.token_ids),
        response_length=len(response),
        finish_reason=FinishReason.STOP,
        version=0,
        score=Score(sample_id=sample_id, value=0.0, status="ok"),
        reward=0.0,
    )
