"""The RL loop: prompts → samples → rewards → advantages → update → next rollout."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.advantage.keep import DropCounts, keep
from plimsoll.assemble import open_session
from plimsoll.batch.pack import pack
from plimsoll.cluster.signals import InterruptGuard
from plimsoll.config.recipe import Recipe
from plimsoll.errors import SamplingError
from plimsoll.memory.phases import Phase
from plimsoll.report import rollout_metrics
from plimsoll.rollout.collector import Collected, Collector
from plimsoll.session import Session, due
from plimsoll.types import Group
from plimsoll.update.worker import PolicyWorker

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainSummary:
    """What `plimsoll train` prints. Accuracies are greedy, on the held-out rows; None without `data.eval`."""

    eval_before: float | None  # before the first step
    eval_after: float | None  # after the last
    steps: int
    run: str

    def as_json(self) -> dict[str, Any]:
        """One object."""
        return {
            "eval_before": self.eval_before,
            "eval_after": self.eval_after,
            "steps": self.steps,
            "run": self.run,
        }


@dataclass(slots=True, kw_only=True, frozen=True)
class Filled:
    """The groups of one step and how many rounds of generation it took to find them."""

    groups: tuple[Group, ...]
    rounds: tuple[Collected, ...]
    no_signal: DropCounts  # over all rounds


def run(recipe: Recipe, *, resume: bool, overwrite: bool) -> TrainSummary:
    """The whole command. Raises Interrupted, with a checkpoint kept, when the run is asked to stop."""
    with (
        InterruptGuard(recipe.checkpoint.grace) as guard,
        open_session(recipe, objective="policy", resume=resume, overwrite=overwrite) as session,
    ):
        train(session, guard)
        return TrainSummary(
            eval_before=session.accuracy_at(0),
            eval_after=session.accuracy_at(session.plan.steps),
            steps=session.plan.steps,
            run=str(session.folder.path),
        )


def train(s: Session, guard: InterruptGuard) -> None:
    """One iteration a step. Waits for the engine and the rewards in ROLLOUT; everything else runs here."""
    recipe, plan, policy = s.recipe, s.plan, s.policy
    s.sync()
    s.evaluate_start(guard)
    if guard.requested:
        guard.stop()
    for step in range(s.start_step + 1, plan.steps + 1):
        s.memory.begin_step(step)
        filled = rollout(s, step, guard)
        batch = pack(
            filled.groups,
            step=step,
            token_budget=plan.token_budget,
            mini_batches=recipe.train.mini_batches_per_step,
        )
        if policy.worker.needs_old:
            with s.enter(Phase.LOGPROB):
                policy.map(PolicyWorker.score, batch, old=True, reference=False)
        if policy.worker.needs_reference:
            with s.enter(Phase.REFERENCE):
                policy.map(PolicyWorker.score, batch, old=False, reference=True)
        advantages = policy.map(PolicyWorker.advantages, batch)[0]
        with s.enter(Phase.UPDATE):
            update = policy.map(PolicyWorker.update, batch)[0]
        s.plane.drop(sample.ref for group in filled.groups for sample in group.samples)
        s.sync()
        last, evaluate = step == plan.steps, s.evaluation_due(step)
        accuracy = s.evaluate(guard) if evaluate else {}
        s.note_failures(filled.groups)
        # The row comes before the checkpoint: a run resumed from step N must find the rows up to N.
        s.rollouts.write(step, filled.groups)
        s.report(
            step,
            {
                **rollout_metrics(filled.groups, filled.rounds, filled.no_signal),
                **advantages.values,
                **update.values,
                **accuracy,
            },
        )
        if due(step, s.intervals.checkpoint_every, last=last) or guard.requested:
            s.save(step, guard)
            if guard.requested and not (last and (accuracy or not evaluate)):
                s.note_saved(step)
                guard.stop()


def rollout(s: Session, step: int, guard: InterruptGuard) -> Filled:
    """The groups of the step. When dynamic sampling gives up, what was trained so far is saved first."""
    s.sync()  # nothing to do, unless a phase since the last sync has taken the engine's weights away
    try:
        with s.enter(Phase.ROLLOUT):
            return fill(s, step)
    except SamplingError:
        try:
            s.save(step - 1, guard, ends=True)
        except Exception as second:  # why the run ends is the first error
            logger.error("the checkpoint of step %d could not be saved: %s", step - 1, second)
        raise


def fill(s: Session, step: int) -> Filled:
    """Sample until the step has its groups.

    Without dynamic sampling that is one round. With it, groups without signal are replaced by further prompts, in as
    many rounds as `algorithm.dynamic_max_rounds` allows. Groups beyond the wanted number are not trained on: their
    prompts go back to the front of the stream, so that they are sampled again, on policy, in the next step. So do all
    that had a signal when the rounds are used up: SamplingError.
    """
    assert s.generation is not None
    dynamic, most = s.recipe.algorithm.dynamic_sampling, s.recipe.algorithm.dynamic_max_rounds
    draws = s.stream.next_batch()
    wanted = len(draws)
    kept: list[Group] = []
    rounds: list[Collected] = []
    no_signal = DropCounts()
    while True:
        rounds.append(_round(s.generation.collector, draws))
        result = keep(rounds[-1].groups, dynamic=dynamic)
        kept += result.groups
        no_signal += result.no_signal
        _forget(s, result.dropped)
        if not dynamic or len(kept) >= wanted:
            break
        if len(rounds) == most:
            _give_back(s, kept)
            raise SamplingError(
                f"step {step}: {len(kept)} of {wanted} groups with a signal after {most} rounds of generation "
                f"(algorithm.dynamic_max_rounds); without signal: {no_signal.describe()}. Mostly "
                f"{no_signal.advice()}; or raise algorithm.dynamic_max_rounds, or set algorithm.dynamic_sampling=false"
            )
        logger.info("step %d: %d of %d groups after round %d", step, len(kept), wanted, len(rounds))
        draws = s.stream.draw(_next_round(wanted - len(kept), len(kept) / sum(len(r.groups) for r in rounds), wanted))
    _give_back(s, kept[wanted:])
    return Filled(groups=tuple(kept[:wanted]), rounds=tuple(rounds), no_signal=no_signal)


def _round(collector: Collector, draws: Sequence[Any]) -> Collected:
    collector.start(draws)
    return collector.result()


def _next_round(missing: int, kept_share: float, wanted: int) -> int:
    """Prompts of the next round: a quarter more than the share of kept groups so far asks for, at most a whole batch.

    A round takes as long as its longest response, so a second small one costs more than prompts that are given back.
    """
    return wanted if kept_share == 0 else min(wanted, math.ceil(1.25 * missing / kept_share))


def _give_back(s: Session, groups: Sequence[Group]) -> None:
    s.stream.give_back([group.id for group in groups])
    _forget(s, groups)


def _forget(s: Session, groups: Sequence[Group]) -> None:
    s.plane.drop(sample.ref for group in groups for sample in group.samples)
