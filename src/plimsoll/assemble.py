"""Builds a session, in one order, and takes it down in the other.

Order: data → plan → run folder → an engine of its own → trainer → calibration → scoring processes and our engine →
position. Data and plan come before the folder, so that a recipe of which either is refused leaves an earlier run's
folder as it was.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from plimsoll import calibrate
from plimsoll.checkpoint.rng import restore_rng, seed_rng
from plimsoll.checkpoint.saving import TrainingSaver
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import read_training_checkpoint
from plimsoll.cluster.inline import InlineGroup
from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.data.order import CursorState
from plimsoll.data.tokenizer import load_tokenizer
from plimsoll.engines import PARTS, EngineSide, NativeSide, VllmSide, build_vllm, check_engine
from plimsoll.generation import Generation
from plimsoll.jsonl import write_json
from plimsoll.memory import names
from plimsoll.memory.allocator import AllocatorPolicy, TorchAllocator
from plimsoll.memory.device import device_reader
from plimsoll.memory.enter import Memory
from plimsoll.memory.malloc import return_freed_memory
from plimsoll.memory.phases import Phase
from plimsoll.memory.plan.job import Job
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.release import release_device_cache
from plimsoll.memory.resident import Resident
from plimsoll.memory.schedule import Schedule
from plimsoll.memory.snapshot import recorded_allocations
from plimsoll.memory.warnings import ResidualGate
from plimsoll.model.build import DTYPES, build_meta, quiet_transformers, read_config
from plimsoll.observe.console import Console, logging_to
from plimsoll.observe.metrics import JsonlWriter
from plimsoll.observe.profile import Profiler
from plimsoll.observe.report.writer import ReportWriter
from plimsoll.observe.rollouts import RolloutWriter
from plimsoll.observe.run_folder import RunFolder
from plimsoll.observe.sinks import Sinks, open_sinks
from plimsoll.parallel.mesh import close_process_group, ensure_process_group
from plimsoll.plane.local import LocalPlane
from plimsoll.prepare import Rows, keep_tokenizer, load_rows, plan_run
from plimsoll.resolve import Resumed, Sources, find_resumed, resolve_sources
from plimsoll.reward.pool import ScoringPool
from plimsoll.session import Session
from plimsoll.sizing import Objective, budget_note, clip_intervals, replan
from plimsoll.update.worker import Counters, PolicyWorker
from plimsoll.weights.registered import registered_bytes


class Owner(Protocol):
    """Whoever holds memory."""

    def residents(self) -> Sequence[Resident]:
        """What it holds now."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class _Built:
    """What came into being in the load."""

    plan: RunPlan
    worker: PolicyWorker
    generation: Generation | None
    vllm: VllmSide | None

    def owners(self) -> list[Owner]:
        """Of residents."""
        return [self.worker, *([self.generation] if self.generation else [])]


@contextmanager
def open_session(recipe: Recipe, *, objective: Objective, resume: bool, overwrite: bool) -> Generator[Session]:
    """A session ready for its first step, or for the step after the newest complete checkpoint."""
    with ExitStack() as stack:
        console = stack.enter_context(Console(recipe.observe.console))
        stack.enter_context(logging_to(console))
        quiet_transformers()
        run_root = Path(recipe.run_root)
        RunFolder.check(run_root, recipe.name, resume=resume, overwrite=overwrite)
        run = run_root / recipe.name
        resumed = find_resumed(run, console) if resume else None
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="plimsoll-")))
        sources = resolve_sources(recipe, run, resumed, scratch)
        tokenizer = load_tokenizer(sources.tokenizer)
        rows = load_rows(recipe, tokenizer, objective)
        plan, job = plan_run(recipe, sources, tokenizer, rows, resumed, objective)
        check_engine(job, plan)
        sources.check_weights()
        folder = stack.enter_context(RunFolder.prepare(run_root, recipe.name, resume=resume, overwrite=overwrite))
        if resumed and resumed.state:  # before anything is written: other rows are refused here
            rows.stream.restore(CursorState.from_json(resumed.state.cursor))
        folder.record_recipe(recipe)
        if not folder.tokenizer.is_dir():
            # Checkpoints take these files from here: the folder they come from may go, a checkpoint by retention.
            keep_tokenizer(folder.tokenizer, sources)
        sources.convert_weights(folder.path, console)
        for dataset in (rows.train, rows.held_out):
            for line in dataset.report.lines() if dataset else ():
                console.note(line)
        opening = _Opening(
            recipe=recipe,
            objective=objective,
            sources=sources,
            tokenizer=tokenizer,
            rows=rows,
            plan=plan,
            job=job,
            folder=folder,
            console=console,
            resumed=resumed,
        )
        yield opening.build(stack)


@dataclass(slots=True, kw_only=True, frozen=True)
class _Opening:
    """What is known before anything heavy is built, and how the heavy things are built from it."""

    recipe: Recipe
    objective: Objective
    sources: Sources
    tokenizer: PreTrainedTokenizerBase
    rows: Rows
    plan: RunPlan
    job: Job  # what its memory was planned for
    folder: RunFolder
    console: Console
    resumed: Resumed | None

    def build(self, stack: ExitStack) -> Session:
        recipe, folder = self.recipe, self.folder
        state = self.resumed.state if self.resumed else None  # None: from the first step
        store = CheckpointStore(folder.checkpoints, keep=recipe.checkpoint.keep, say=self.console.note)
        torch.set_num_threads(self.plan.threads)
        seed_rng(recipe.seed)
        owners: list[Owner] = []
        memory = self._memory(stack, owners)
        metrics = JsonlWriter(folder.metrics)
        stack.callback(metrics.close)
        rollouts = RolloutWriter(folder.rollouts, recipe.observe.rollout_samples)
        start_step = state.step if state else 0
        sinks = self._sinks(stack, start_step)  # before anything heavy: one that cannot start is refused
        if folder.resumed:
            # Step 0 has a row of its own (the evaluation before the first step), which a run that starts there redoes.
            for history in (metrics, memory, rollouts):
                history.truncate(start_step or -1)
        memory.begin_step(start_step)
        plane = LocalPlane()
        saver = TrainingSaver(store)
        with memory.enter(Phase.LOAD):
            built = self._load(stack, memory, plane)
            owners.extend(built.owners())
        plan, worker, generation = built.plan, built.worker, built.generation
        _settle(memory, plan, worker, generation, saver)
        write_json(folder.plan, plan.model_dump(mode="json"))
        if state:
            restore_rng(state.rng, plan.device)
        intervals = clip_intervals(recipe, steps=plan.steps)
        self._say(*intervals.notes, budget_note(plan, self.rows.sizes.longest_sequence))
        session = Session(
            recipe=recipe,
            plan=plan,
            folder=folder,
            console=self.console,
            metrics=metrics,
            rollouts=rollouts,
            sinks=sinks,
            page=self._page(stack),
            profiler=self._profiler(plan, start_step),
            memory=memory,
            store=store,
            saver=saver,
            plane=plane,
            stream=self.rows.stream,
            policy=InlineGroup(worker),
            generation=generation,
            intervals=intervals,
            residual=self._residual(memory, built.vllm),
            responses=self.rows.responses,
            start_step=start_step,
        )
        stack.push(session.end_saving)
        store.check_space(session.checkpoint_bytes())
        self.console.start(plan.steps, recipe.name, first_step=start_step)
        return session

    def _load(self, stack: ExitStack, memory: Memory, plane: LocalPlane) -> _Built:
        """Everything heavy, and the plan with what was measured of it."""
        stack.callback(close_process_group)
        vllm = self._vllm(stack, self.plan)
        memory.recorder.engine = vllm.memory if vllm is not None else None
        worker = self._worker(stack, self.plan, plane)
        plan, job = self._calibrated(self.plan, worker)
        generation = self._generation(stack, plan, plane, self._side(plan, worker, vllm))
        built = _Built(plan=plan, worker=worker, generation=generation, vllm=vllm)
        built = replace(built, plan=self._as_built(built, job, memory))
        memory.recorder.plan = built.plan.memory  # the load's own row is held against it too
        return built

    def _memory(self, stack: ExitStack, owners: list[Owner]) -> Memory:
        """`owners` is filled once they are built."""
        device = torch.device(self.plan.device)
        release: Callable[[], None] = partial(release_device_cache, device)
        if device.type == "cpu" and self.job.is_large:
            return_freed_memory()
        elif device.type == "cpu":
            # Giving memory back costs time (an update of the quickstart nearly twice its own), and here it is little.
            release = _keep

        def residents() -> list[Resident]:
            return [resident for owner in owners for resident in owner.residents()]

        recorder = Recorder(
            self.folder.memory,
            rank=0,
            device=device_reader(device),
            residents=residents,
            interval=self.recipe.observe.memory_interval,
            registered=registered_bytes,
            plan=self.plan.memory,
        )
        memory = Memory(
            recorder,
            residents=residents,
            schedule=Schedule(),
            release=release,
        )
        stack.callback(memory.close)
        return memory

    def _say(self, *notes: str | None) -> None:
        for note in notes:
            if note:
                self.console.note(note)

    def _sinks(self, stack: ExitStack, start_step: int) -> Sinks:
        recipe = self.recipe.model_dump(mode="json")
        opened = open_sinks(
            self.recipe.observe, self.folder.path, recipe, start_step=start_step, resumed=self.folder.resumed
        )
        return stack.enter_context(Sinks(opened, self.console.note))

    def _page(self, stack: ExitStack) -> ReportWriter | None:
        observe = self.recipe.observe
        if not observe.report:
            return None
        page = ReportWriter(self.folder.path, observe.report_interval, say=self.console.note)
        stack.callback(page.close)
        return page

    def _profiler(self, plan: RunPlan, start_step: int) -> Profiler:
        never = [step for step in self.recipe.observe.profile_steps if not start_step <= step <= plan.steps]
        if never:
            self.console.note(
                f"observe.profile_steps: {never} are not profiled; this run goes from step {start_step} to {plan.steps}"
            )
        record = recorded_allocations if torch.device(plan.device).type == "cuda" else None
        return Profiler(self.recipe.observe, self.folder.path / "profile", record, self.console.note)

    def _worker(self, stack: ExitStack, plan: RunPlan, plane: LocalPlane) -> PolicyWorker:
        """A checkpoint's model/ holds the master weights bitwise, so building from it restores them."""
        worker = PolicyWorker(self.sources.recipe, plan, plane, objective=self.objective)
        stack.callback(worker.close)
        if self.resumed and self.resumed.checkpoint:
            checkpoint = read_training_checkpoint(self.resumed.checkpoint)
            counters = Counters(
                version=checkpoint.state.policy_version,
                optimizer_steps=checkpoint.state.optimizer_steps,
                skipped_nonfinite=checkpoint.state.skipped_nonfinite,
                skipped_empty=checkpoint.state.skipped_empty,
            )
            worker.load_state(checkpoint.optimizer, counters)
        return worker

    def _calibrated(self, plan: RunPlan, worker: PolicyWorker) -> tuple[RunPlan, Job]:
        """The plan with measured activations, and what it was made for. RefusedError: with those it does not fit."""
        plan = plan.model_copy(update={"packing": worker.policy.packing})  # the probe may have changed it
        if not self.job.calibration_wanted(plan.device):
            return plan, self.job
        key = calibrate.key_of(self.job, plan)
        known = calibrate.remembered(key)
        measured = known
        if not known:
            measured = calibrate.measure(worker, self.job, plan, device_reader(worker.device))
            calibrate.remember(key, measured)
        job = replace(self.job, measured=measured, calibrates=not known)
        return replan(plan, job, built=True), job

    def _as_built(self, built: _Built, job: Job, memory: Memory) -> RunPlan:
        """The plan with the fixed parts as the device shows them. RefusedError: with those it does not fit."""
        plan = built.plan
        load = plan.memory.phase(Phase.LOAD) if plan.memory is not None else None
        assert load is not None
        residents = [resident for owner in built.owners() for resident in owner.residents()]
        takes = built.vllm.takes if built.vllm is not None else {}
        parts = calibrate.fixed_parts(memory.recorder.holdings(), residents, takes, load.residents)
        return replan(plan, replace(job, measured={**job.measured, **parts}), built=True) if parts else plan

    def _vllm(self, stack: ExitStack, plan: RunPlan) -> VllmSide | None:
        """vLLM, where the recipe asks for it: before the trainer, whose memory it does not know."""
        if self.recipe.rollout.engine != "vllm" or not self.job.generates:
            return None
        ensure_process_group(torch.device(plan.device))  # vLLM takes the groups that it finds
        policy = AllocatorPolicy(TorchAllocator() if plan.device == "cuda" else None)
        policy.start()
        config = read_config(self.sources.config)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="plimsoll-vllm-")))
        model = build_meta(config, DTYPES[plan.compute_dtype])
        return build_vllm(self.recipe, plan, config, model, folder, policy.guard_engine)

    def _residual(self, memory: Memory, vllm: VllmSide | None) -> Callable[[], None] | None:
        """Ends a run whose engine leaves more and more on the device while it sleeps."""
        if vllm is None:
            return None
        gate = ResidualGate(tolerance=int(self.recipe.memory.residual_tolerance))

        def check() -> None:
            if not any(vllm.engine.awake(part) for part in PARTS):
                gate.check(memory.step, memory.recorder.residual())

        return check

    def _side(self, plan: RunPlan, worker: PolicyWorker, vllm: VllmSide | None) -> EngineSide | None:
        """vLLM, which is there already, or our engine; None: nothing is generated."""
        if not self.job.generates:
            return None
        if vllm is None:
            return NativeSide(self.recipe, plan, worker)
        vllm.connect(worker)
        return vllm

    def _generation(
        self, stack: ExitStack, plan: RunPlan, plane: LocalPlane, side: EngineSide | None
    ) -> Generation | None:
        held_out = self.rows.held_out
        if side is None:
            return None
        tokenizer = self.tokenizer
        generation = Generation(
            self.recipe,
            plan,
            side=side,
            scorer=stack.enter_context(ScoringPool(self.recipe.reward)),
            plane=plane,
            decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
            eval_prompts=held_out.prompts if held_out else (),
        )
        stack.callback(generation.collector.close)
        self.console.note(generation.sampling_line())
        return generation


def _keep() -> None:
    """The C library's heap keeps what is freed."""


def _settle(
    memory: Memory,
    plan: RunPlan,
    worker: PolicyWorker,
    generation: Generation | None,
    saver: TrainingSaver,
) -> None:
    """From here on the plan says who is on the device, and what is more than now is growth."""
    assert plan.memory is not None

    def quiesce(phase: Phase, leaving: frozenset[str]) -> None:
        if leaving & {names.ACTOR_PARAMETERS, names.OPTIMIZER_STATE} and saver.saving is not None:
            saver.wait_read()  # a save in the background reads them where they are

    memory.adopt(
        Schedule.of(plan.memory, borrowed=generation.borrowed if generation is not None else frozenset()),
        policy_version=lambda: worker.version,
        quiesce=quiesce,
    )
    if generation is not None:
        memory.admit_staying(Phase.SYNC)  # the phase that comes first
    memory.recorder.take_baseline()
