"""Builds a session, in one order, and takes it down in the other.

Order: data → plan → run folder → trainer → scoring processes and engine → position. Data and plan come before the
folder, so that a recipe of which either is refused leaves an earlier run's folder as it was.
"""

import itertools
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from plimsoll.checkpoint.rng import restore_rng, seed_rng
from plimsoll.checkpoint.saving import TrainingSaver
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import read_training_checkpoint
from plimsoll.cluster.inline import InlineGroup
from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.data.chat import response_token_ids
from plimsoll.data.dataset import Dataset
from plimsoll.data.load import load_dataset
from plimsoll.data.order import CursorState, PromptStream
from plimsoll.data.tokenizer import load_tokenizer
from plimsoll.errors import RefusedError
from plimsoll.generation import Generation
from plimsoll.jsonl import write_json
from plimsoll.memory.device import device_reader
from plimsoll.memory.enter import Memory
from plimsoll.memory.phases import Phase
from plimsoll.memory.resident import Resident
from plimsoll.memory.snapshot import recorded_allocations
from plimsoll.model.build import quiet_transformers, read_config
from plimsoll.observe.console import Console, logging_to
from plimsoll.observe.metrics import JsonlWriter
from plimsoll.observe.profile import Profiler
from plimsoll.observe.report.writer import ReportWriter
from plimsoll.observe.rollouts import RolloutWriter
from plimsoll.observe.run_folder import RunFolder
from plimsoll.observe.sinks import Sinks, open_sinks
from plimsoll.parallel.mesh import close_process_group
from plimsoll.plane.local import LocalPlane
from plimsoll.resolve import Resumed, Sources, find_resumed, resolve_sources
from plimsoll.reward.pool import ScoringPool
from plimsoll.reward.resolve import check_sources, needs_answer
from plimsoll.session import Session
from plimsoll.sizing import (
    DataSizes,
    budget_note,
    check_ids,
    check_resumed,
    clip_intervals,
    derive_plan,
    optimizer_steps,
    total_steps,
)
from plimsoll.update.worker import Counters, PolicyWorker
from plimsoll.weights.export import copy_companions
from plimsoll.weights.registered import registered_bytes

Objective = Literal["policy", "supervised"]


@dataclass(slots=True, kw_only=True, frozen=True)
class Rows:
    """Everything that is read from the data before the run folder is touched."""

    train: Dataset
    held_out: Dataset | None
    responses: dict[int, tuple[int, ...]]  # SFT targets by row
    stream: PromptStream
    sizes: DataSizes
    largest_id: int  # of prompts and targets


def load_rows(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, objective: Objective) -> Rows:
    """Training and held-out rows. DataError or RecipeError when they cannot be used."""
    data = recipe.data
    scored_by = "answer"
    # Asked only where rewards are: the question imports the function in a process of its own.
    if (objective == "policy" or data.eval is not None) and not needs_answer(recipe.reward):
        scored_by = "prompt"  # TRL's functions take whatever columns they name; the other signatures want an answer
    need = scored_by if objective == "policy" else "response"
    train = load_dataset(data.train, data, tokenizer, split="train", seed=recipe.seed, need=need)
    held_out = None
    if data.eval is not None:
        held_out = load_dataset(data.eval, data, tokenizer, split="eval", seed=recipe.seed, need=scored_by)
    scored = [source for source in (train if objective == "policy" else None, held_out) if source]
    check_sources(recipe.reward, (prompt.data_source for source in scored for prompt in source.prompts))
    prompt_lengths = [len(prompt.token_ids) for prompt in train.prompts]
    responses: dict[int, tuple[int, ...]] = {}
    longest_sequence = max(prompt_lengths) + recipe.rollout.max_response_tokens
    if objective == "supervised":
        targets = response_token_ids(tokenizer, [prompt.response or "" for prompt in train.prompts])
        responses = {prompt.row: ids for prompt, ids in zip(train.prompts, targets, strict=True)}
        longest_sequence = max(length + len(ids) for length, ids in zip(prompt_lengths, targets, strict=True))
    stream = PromptStream(
        train, batch_size=data.prompts_per_step, shuffle=data.shuffle, drop_last=data.drop_last, seed=recipe.seed
    )
    held_out_lengths = [len(prompt.token_ids) for prompt in held_out.prompts] if held_out else []
    sizes = DataSizes(
        batches_per_epoch=stream.batches_per_epoch,
        longest_prompt=max(prompt_lengths + held_out_lengths),
        longest_sequence=longest_sequence,
        num_eval=len(held_out_lengths),
    )
    every = (ids for source in (train, held_out) if source for ids in (prompt.token_ids for prompt in source.prompts))
    largest_id = max(max(ids) for ids in itertools.chain(every, responses.values()))
    return Rows(train=train, held_out=held_out, responses=responses, stream=stream, sizes=sizes, largest_id=largest_id)


def _plan(
    recipe: Recipe, sources: Sources, tokenizer: PreTrainedTokenizerBase, rows: Rows, resumed: Resumed | None
) -> RunPlan:
    """A resumed run keeps its own numbers; only its length may have changed. RefusedError: it cannot be planned."""
    config = read_config(sources.config)
    if resumed is None or resumed.plan is None:
        plan = derive_plan(recipe, config, tokenizer, rows.sizes, reference=sources.recipe.model.reference)
    else:
        steps = total_steps(recipe, rows.sizes)
        update = {"steps": steps, "optimizer_steps": optimizer_steps(recipe, steps)}
        plan = resumed.plan.model_copy(update=update)
        check_resumed(recipe, plan, rows.sizes)
        if resumed.state and resumed.state.step > steps:
            raise RefusedError(
                f"train.steps={steps}: the run has done {resumed.state.step} steps already; set train.steps to more"
            )
    check_ids(int(config.get_text_config().vocab_size), rows.largest_id, plan.stop_token_ids)
    return plan


def keep_tokenizer(folder: Path, sources: Sources) -> None:
    """Copy tokenizer, chat template and the model's generation config; of two of a name, the tokenizer's stays.

    The folder is there whole or not at all: a run killed here can be resumed.
    """
    partial = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    if sources.config.is_dir() and sources.config != sources.tokenizer:
        copy_companions(sources.config, partial)
    copy_companions(sources.tokenizer, partial)
    partial.rename(folder)


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
        plan = _plan(recipe, sources, tokenizer, rows, resumed)
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
    folder: RunFolder
    console: Console
    resumed: Resumed | None

    def build(self, stack: ExitStack) -> Session:
        recipe, folder = self.recipe, self.folder
        state = self.resumed.state if self.resumed else None  # None: from the first step
        store = CheckpointStore(folder.checkpoints, keep=recipe.checkpoint.keep, say=self.console.note)
        plan = self.plan
        torch.set_num_threads(plan.threads)
        seed_rng(recipe.seed)
        residents: list[Resident] = []
        memory = self._memory(stack, residents)
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
        stack.callback(close_process_group)
        with memory.enter(Phase.LOAD):
            worker = self._worker(stack, plan, plane)
            generation = self._generation(stack, plan, plane, worker)
        residents.extend(worker.residents())
        residents.extend(generation.residents() if generation else ())
        plan = plan.model_copy(update={"packing": worker.policy.packing})  # the probe may have changed it
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
            saver=TrainingSaver(store),
            plane=plane,
            stream=self.rows.stream,
            policy=InlineGroup(worker),
            generation=generation,
            intervals=intervals,
            responses=self.rows.responses,
            start_step=start_step,
        )
        stack.push(session.end_saving)
        store.check_space(session.checkpoint_bytes())
        self.console.start(plan.steps, recipe.name, first_step=start_step)
        return session

    def _memory(self, stack: ExitStack, residents: list[Resident]) -> Memory:
        """`residents` is filled once they are built."""
        memory = Memory(
            self.folder.memory,
            rank=0,
            device=device_reader(torch.device(self.plan.device)),
            residents=lambda: residents,
            interval=self.recipe.observe.memory_interval,
            registered=registered_bytes,
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

    def _generation(
        self, stack: ExitStack, plan: RunPlan, plane: LocalPlane, worker: PolicyWorker
    ) -> Generation | None:
        held_out = self.rows.held_out
        if self.objective == "supervised" and held_out is None:
            return None
        tokenizer = self.tokenizer
        generation = Generation(
            self.recipe,
            plan,
            source=worker,
            scorer=stack.enter_context(ScoringPool(self.recipe.reward)),
            plane=plane,
            decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
            eval_prompts=held_out.prompts if held_out else (),
        )
        stack.callback(generation.collector.close)
        self.console.note(generation.sampling_line())
        return generation
