"""What a run holds while it runs, and what both loops do with it: phases, evaluation, rows of metrics, checkpoints."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from plimsoll.checkpoint.rng import capture_rng
from plimsoll.checkpoint.saving import TrainingSaver
from plimsoll.checkpoint.state import TrainingState, library_versions
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import MODEL, OPTIMIZER
from plimsoll.cluster.inline import InlineGroup
from plimsoll.cluster.signals import InterruptGuard
from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.data.order import PromptStream
from plimsoll.generation import Generation
from plimsoll.memory.enter import Memory
from plimsoll.memory.phases import Phase
from plimsoll.observe.console import Console
from plimsoll.observe.metrics import JsonlWriter, read_jsonl
from plimsoll.observe.profile import Profiler
from plimsoll.observe.report.writer import ReportWriter
from plimsoll.observe.rollouts import RolloutWriter
from plimsoll.observe.run_folder import RunFolder
from plimsoll.observe.sinks import Sinks
from plimsoll.plane.local import LocalPlane
from plimsoll.rollout.generate import GenerationStopped
from plimsoll.sizing import Intervals
from plimsoll.types import Group
from plimsoll.update.state import StateFolders
from plimsoll.update.worker import PolicyWorker
from plimsoll.weights.write import ShardWriter

_ON_CONSOLE = {
    "reward": "reward/mean",
    "loss": "loss",
    "len": "response/length_mean",
    "entropy": "actor/entropy",
    "kl": "actor/kl_ref",
    "grad": "train/grad_norm",
    "accuracy": "eval/accuracy",
    "tok/s": "speed/tokens_per_second",
}
"""Console's name of a metric → its key in metrics.jsonl."""


def _on_console(values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[key] for name, key in _ON_CONSOLE.items() if key in values}


def due(step: int, every: int | None, *, last: bool) -> bool:
    """Whether something that happens every so many steps, or at the end, happens after this one."""
    return last or (every is not None and step % every == 0)


@dataclass(slots=True, kw_only=True)
class Session:
    """Everything that one run holds on one device. Built by `assemble.open_session`."""

    recipe: Recipe
    plan: RunPlan
    folder: RunFolder
    console: Console
    metrics: JsonlWriter
    rollouts: RolloutWriter
    sinks: Sinks
    page: ReportWriter | None  # None: observe.report is off
    profiler: Profiler
    memory: Memory
    store: CheckpointStore
    saver: TrainingSaver
    plane: LocalPlane
    stream: PromptStream
    policy: InlineGroup[PolicyWorker]
    generation: Generation | None  # None: SFT without evaluation
    intervals: Intervals
    residual: Callable[[], None] | None = None  # looks at what a sleeping engine has left on the device
    responses: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])  # SFT targets by row
    failure_noted: bool = False
    start_step: int = 0  # finished steps; more than 0 after a resume

    @contextmanager
    def enter(self, phase: Phase) -> Generator[None]:
        """A phase of the step: shown on the console, recorded in the ledger."""
        if phase is Phase.UPDATE:
            self._before_update()
        self.console.phase(phase.value)
        # The profile outside: writing it is no part of the phase's time.
        with self.profiler.phase(self.memory.step, phase.value), self.memory.enter(phase):
            if self.residual is not None:
                self.residual()
            yield

    def sync(self) -> None:
        """Give the engine the policy's weights and version, unless it has them."""
        if self.generation is not None and self.generation.version != self.policy.worker.version:
            with self.enter(Phase.SYNC):
                self.generation.sync()

    def evaluate(self, guard: InterruptGuard) -> dict[str, float]:
        """Metrics of an evaluation with the policy's weights, where one is due; nothing when asked to stop.

        What an interrupt cuts off here is made up for by `evaluate_start` of the resumed run.
        """
        assert self.generation is not None, "ask `evaluation_due` first"
        if guard.requested:
            return {}
        self.sync()
        with self.enter(Phase.EVAL):
            try:
                return self.generation.evaluate(stop=lambda: guard.requested is not None).metrics()
            except GenerationStopped:
                return {}

    def evaluation_due(self, step: int) -> bool:
        """Whether `step` ends with an evaluation; 0 is the time before the first step."""
        if self.generation is None or not self.generation.eval_prompts:
            return False
        at_end = step in (0, self.plan.steps) and self.recipe.train.eval_at_ends
        return at_end or (step > 0 and due(step, self.intervals.eval_every, last=False))

    def evaluate_start(self, guard: InterruptGuard) -> None:
        """The evaluation of the step that the run starts from, unless its row has one."""
        step = self.start_step
        if not self.evaluation_due(step) or self.accuracy_at(step) is not None:
            return
        values = self.evaluate(guard)
        if values:
            times = self._times()
            self.metrics.replace_last({**self._row(step), "step": step, **values, **times})
            self._show(step, {**values, **times})

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """One row of metrics.jsonl, and whoever else shows it."""
        row = {**values, **self._times()}
        self.metrics.write({"step": step, **row})
        self._show(step, row)

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        self.console.step(step, _on_console(values))
        self.sinks.write(step, values)
        if self.page is not None:
            self.page.poke()

    def _times(self) -> dict[str, float]:
        return {f"time/{phase}": seconds for phase, seconds in self.memory.seconds_by_phase().items()}

    def accuracy_at(self, step: int) -> float | None:
        """Held-out accuracy as recorded for `step`; None: it was not measured."""
        return self._row(step).get("eval/accuracy")

    def _row(self, step: int) -> dict[str, Any]:
        rows = {row["step"]: row for row in read_jsonl(self.folder.metrics)}
        return rows.get(step, {})

    def note_failures(self, groups: Sequence[Group]) -> None:
        """Say once how the reward function fails, and when a step has no score at all."""
        samples = [sample for group in groups for sample in group.samples]
        failed = next((sample for sample in samples if sample.score.status in ("error", "timeout")), None)
        if failed is not None and not self.failure_noted:
            self.failure_noted = True
            self.console.note(
                f"reward.function failed for sample {failed.id} (more are only counted):\n{failed.score.detail}"
            )
        if samples and all(sample.reward is None for sample in samples):
            self.console.note("no response of this step was scored, so it trains nothing: look at reward.function")

    def note_saved(self, step: int) -> None:
        """What an interrupted run leaves; a save in the background is published first."""
        self._finish_saving()
        self.console.note(f"saved {self.store.path_of(step)}; go on with --resume")

    def save(self, step: int, guard: InterruptGuard, *, ends: bool = False) -> None:
        """Publish the checkpoint of `step`; one that is there and complete stays.

        With `checkpoint.background` it is published later: at an update that finds it written, or before the next save.
        `ends`: the run ends here, for a reason of its own; nothing is left to the background.
        """
        with guard.saving():
            self._finish_saving()
            if self.store.holds(step):
                return
            self.metrics.flush()  # a checkpoint without its rows would be worse than no checkpoint
            last = ends or step == self.plan.steps or guard.requested is not None
            with self.enter(Phase.SAVE):
                self.saver.save(
                    self._training_state(step),
                    self._state_writer,
                    background=self.recipe.checkpoint.background and not last,
                    estimate_bytes=self.checkpoint_bytes(),
                )
            if guard.requested:  # meanwhile: inside of the time that a save has to itself
                self._finish_saving()

    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: weights and two moments of the same size."""
        return 3 * self.policy.worker.model_bytes()

    def end_saving(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """At the end of the run: publish what is being written. A run that was told to stop at once drops it."""
        if error is None:
            self._finish_saving()
        elif isinstance(error, Exception):
            said = self.saver.salvage()  # raises nothing: why the run has failed is the error that counts
            if said is not None:
                self.console.note(said)
        else:
            self.saver.abort()

    def _before_update(self) -> None:
        """The update changes what a save in the background may still have to read."""
        if self.saver.saving is not None:
            with self.enter(Phase.SAVE):
                self.saver.wait_read()
                self.saver.publish_written()

    def _finish_saving(self) -> None:
        if self.saver.saving is not None:
            with self.enter(Phase.SAVE):
                self.saver.finish()

    def _state_writer(self, folder: Path) -> ShardWriter:
        folders = StateFolders(model=folder / MODEL, optimizer=folder / OPTIMIZER, tokenizer=self.folder.tokenizer)
        return self.policy.worker.state_writer(folders, budget_bytes=self.recipe.checkpoint.staging_memory)

    def _training_state(self, step: int) -> TrainingState:
        counters = self.policy.worker.counters()
        return TrainingState(
            step=step,
            policy_version=counters.version,
            optimizer_steps=counters.optimizer_steps,
            skipped_nonfinite=counters.skipped_nonfinite,
            skipped_empty=counters.skipped_empty,
            cursor=asdict(self.stream.state()),
            # Without the memory plan, which belongs to the machine: equal runs have equal checkpoints.
            plan=self.plan.model_dump(mode="json", exclude={"memory"}),
            rng=capture_rng(self.plan.device),
            libraries=library_versions(),
        )
