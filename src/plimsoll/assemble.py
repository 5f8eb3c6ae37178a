"""Builds a session, in one order, and takes it down in the other.

Order: data → run folder → plan → trainer → scoring processes and engine → position. Data comes before the folder, so
that a recipe whose data is refused leaves an earlier run's folder as it was.
"""

import json
import logging
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from plimsoll.checkpoint.locate import CHECKPOINTS, locate_model
from plimsoll.checkpoint.rng import restore_rng
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import TrainingCheckpoint, read_training_checkpoint
from plimsoll.cluster.inline import InlineGroup
from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.data.chat import response_token_ids
from plimsoll.data.dataset import Dataset
from plimsoll.data.load import load_dataset
from plimsoll.data.order import CursorState, PromptStream
from plimsoll.data.tokenizer import load_tokenizer
from plimsoll.generation import Generation
from plimsoll.jsonl import write_json
from plimsoll.memory.device import device_reader
from plimsoll.memory.enter import Memory
from plimsoll.memory.phases import Phase
from plimsoll.memory.resident import Resident
from plimsoll.model.build import quiet_transformers, read_config
from plimsoll.observe.console import Console, setup_logging
from plimsoll.observe.metrics import JsonlWriter
from plimsoll.observe.rollouts import RolloutWriter
from plimsoll.observe.run_folder import RunFolder
from plimsoll.parallel.mesh import close_process_group
from plimsoll.plane.local import LocalPlane
from plimsoll.reward.pool import ScoringPool
from plimsoll.session import Session
from plimsoll.sizing import DataSizes, clip_intervals, derive_plan, optimizer_steps, total_steps
from plimsoll.update.worker import Counters, PolicyWorker

logger = logging.getLogger(__name__)

Objective = Literal["policy", "supervised"]


@dataclass(slots=True, kw_only=True, frozen=True)
class Sources:
    """What the recipe's `model` section means on this disk, resolved once."""

    recipe: Recipe  # `model.path` and `model.reference` are Hugging Face folders here, never runs
    config: Path  # config.json, or a folder that holds one
    tokenizer: Path


@dataclass(slots=True, kw_only=True, frozen=True)
class Rows:
    """Everything that is read from the data before the run folder is touched."""

    train: Dataset
    held_out: Dataset | None
    responses: dict[int, tuple[int, ...]]  # SFT targets by row
    stream: PromptStream
    sizes: DataSizes


def resolve_sources(recipe: Recipe, found: TrainingCheckpoint | None) -> Sources:
    """RefusedError when a folder is missing.

    A resumed run takes weights and tokenizer from its own checkpoint, whatever has become of the folder that it began
    with; only a reference that is in use is still read from there.
    """
    model = recipe.model
    reference = None
    if recipe.algorithm.kl_coefficient > 0 and (model.reference or model.path):
        reference = str(locate_model(model.reference or model.path or "", setting="model.reference").model)
    if found:
        update = {"path": str(found.model_folder), "init": "pretrained", "reference": reference}
        config = found.model_folder
    elif model.init == "random":
        assert model.config is not None, "checked with the recipe"
        update = {"reference": reference}
        config = Path(model.config)
    else:
        assert model.path is not None, "checked with the recipe"
        config = locate_model(model.path, setting="model.path").model
        update = {"path": str(config), "reference": reference}
    folder = config if config.is_dir() else config.parent
    return Sources(
        recipe=recipe.model_copy(update={"model": model.model_copy(update=update)}),
        config=config,
        tokenizer=Path(model.tokenizer) if model.tokenizer and not found else folder,
    )


def load_rows(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, objective: Objective) -> Rows:
    """Training and held-out rows. DataError or RecipeError when they cannot be used."""
    data = recipe.data
    need = "answer" if objective == "policy" else "response"
    train = load_dataset(data.train, data, tokenizer, split="train", seed=recipe.seed, need=need)
    held_out = None
    if data.eval is not None:
        held_out = load_dataset(data.eval, data, tokenizer, split="eval", seed=recipe.seed, need="answer")
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
    return Rows(train=train, held_out=held_out, responses=responses, stream=stream, sizes=sizes)


def _newest(run: Path, console: Console) -> TrainingCheckpoint | None:
    """The newest complete checkpoint, saying what was passed over; None: start again from the beginning."""
    scan = CheckpointStore(run / CHECKPOINTS, keep=None).scan()
    for skipped in scan.skipped:
        console.note(f"passed over {skipped.path}: {skipped.reason}")
    if scan.checkpoint is None:
        console.note("no complete checkpoint yet: the run starts again from its first step")
        return None
    console.note(f"resuming from {scan.checkpoint.path}")
    return read_training_checkpoint(scan.checkpoint.path)


@contextmanager
def open_session(recipe: Recipe, *, objective: Objective, resume: bool, overwrite: bool) -> Generator[Session]:
    """A session ready for its first step, or for the step after the newest complete checkpoint."""
    with ExitStack() as stack:
        console = stack.enter_context(Console(recipe.observe.console))
        setup_logging(console)
        quiet_transformers()
        run_root = Path(recipe.run_root)
        RunFolder.check(run_root, recipe.name, resume=resume, overwrite=overwrite)
        found = _newest(run_root / recipe.name, console) if resume else None
        sources = resolve_sources(recipe, found)
        tokenizer = load_tokenizer(sources.tokenizer)
        rows = load_rows(recipe, tokenizer, objective)
        folder = stack.enter_context(RunFolder.prepare(run_root, recipe.name, resume=resume, overwrite=overwrite))
        folder.record_recipe(recipe)
        for dataset in (rows.train, rows.held_out):
            for line in dataset.report.lines() if dataset else ():
                console.note(line)
        opening = _Opening(
            recipe=recipe,
            objective=objective,
            sources=sources,
            tokenizer=tokenizer,
            rows=rows,
            folder=folder,
            console=console,
            found=found,
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
    folder: RunFolder
    console: Console
    found: TrainingCheckpoint | None  # None: from the first step

    def build(self, stack: ExitStack) -> Session:
        recipe, folder, found = self.recipe, self.folder, self.found
        store = CheckpointStore(folder.checkpoints, keep=recipe.checkpoint.keep, say=self.console.note)
        plan = self._plan()
        torch.set_num_threads(plan.threads)
        residents: list[Resident] = []
        memory = Memory(
            folder.memory,
            rank=0,
            device=device_reader(torch.device(plan.device)),
            residents=lambda: residents,
            interval=recipe.observe.memory_interval,
        )
        stack.callback(memory.close)
        metrics = JsonlWriter(folder.metrics)
        stack.callback(metrics.close)
        rollouts = RolloutWriter(folder.rollouts, recipe.observe.rollout_samples)
        start_step = found.state.step if found else 0
        if folder.resumed:
            # Step 0 has a row of its own (the evaluation before the first step): a run without a checkpoint redoes it.
            for history in (metrics, memory, rollouts):
                history.truncate(start_step if found else -1)
        memory.begin_step(start_step)
        plane = LocalPlane()
        stack.callback(close_process_group)
        with memory.enter(Phase.LOAD):
            worker = self._worker(plan, plane)
            generation = self._generation(stack, plan, plane, worker)
        residents.extend(worker.residents())
        residents.extend(generation.residents() if generation else ())
        plan = plan.model_copy(update={"packing": worker.policy.packing})  # the probe may have changed it
        write_json(folder.plan, plan.model_dump(mode="json"))
        if found:
            self.rows.stream.restore(CursorState.from_json(found.state.cursor))
            restore_rng(found.state.rng, plan.device)
        intervals = clip_intervals(recipe, steps=plan.steps)
        for note in intervals.notes:
            self.console.note(note)
        session = Session(
            recipe=recipe,
            plan=plan,
            folder=folder,
            tokenizer_folder=self.sources.tokenizer,
            console=self.console,
            metrics=metrics,
            rollouts=rollouts,
            memory=memory,
            store=store,
            plane=plane,
            stream=self.rows.stream,
            data_fingerprint=self.rows.train.fingerprint,
            policy=InlineGroup(worker),
            generation=generation,
            intervals=intervals,
            responses=self.rows.responses,
            start_step=start_step,
        )
        store.check_space(session.checkpoint_bytes())
        self.console.start(plan.steps, recipe.name, first_step=start_step)
        return session

    def _plan(self) -> RunPlan:
        """A resumed run keeps its own numbers; only its length may have changed."""
        sizes = self.rows.sizes
        if self.folder.resumed and self.folder.plan.is_file():
            plan = RunPlan.model_validate(json.loads(self.folder.plan.read_bytes()))
            steps = total_steps(self.recipe, sizes)
            return plan.model_copy(update={"steps": steps, "optimizer_steps": optimizer_steps(self.recipe, steps)})
        return derive_plan(self.recipe, read_config(self.sources.config), self.tokenizer, sizes)

    def _worker(self, plan: RunPlan, plane: LocalPlane) -> PolicyWorker:
        """A checkpoint's model/ holds the master weights bitwise, so building from it restores them."""
        worker = PolicyWorker(self.sources.recipe, plan, plane, objective=self.objective)
        if self.found:
            state = self.found.state
            counters = Counters(
                version=state.policy_version,
                optimizer_steps=state.optimizer_steps,
                skipped_nonfinite=state.skipped_nonfinite,
                skipped_empty=state.skipped_empty,
            )
            worker.load_optimizer_state(self.found.optimizer, counters)
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
        return generation
