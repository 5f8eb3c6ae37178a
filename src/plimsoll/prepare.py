"""What a run is made of before anything is built: rows, plan, tokenizer."""

import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.data.chat import response_token_ids
from plimsoll.data.dataset import Dataset
from plimsoll.data.load import load_dataset
from plimsoll.data.order import PromptStream
from plimsoll.errors import RefusedError
from plimsoll.memory.plan.job import Job
from plimsoll.model.build import read_config
from plimsoll.resolve import Resumed, Sources
from plimsoll.reward.resolve import check_sources, needs_answer
from plimsoll.sizing import (
    DataSizes,
    Objective,
    check_ids,
    check_resumed,
    derive_plan,
    job_of,
    optimizer_steps,
    replan,
    total_steps,
)
from plimsoll.weights.export import copy_companions


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


def plan_run(
    recipe: Recipe,
    sources: Sources,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    resumed: Resumed | None,
    objective: Objective,
) -> tuple[RunPlan, Job]:
    """The plan, and the work that its memory was planned for.

    A resumed run keeps its own numbers; its length may have changed, and its memory is planned for this machine.

    RefusedError: it cannot be planned, or does not fit.
    """
    config = read_config(sources.config)
    job = job_of(recipe, config, rows.sizes, objective=objective, reference=_reference_config(sources, objective))
    if resumed is None or resumed.plan is None:
        plan = derive_plan(recipe, config, tokenizer, rows.sizes, job=job, reference=sources.recipe.model.reference)
    else:
        steps = total_steps(recipe, rows.sizes)
        update = {"steps": steps, "optimizer_steps": optimizer_steps(recipe, steps)}
        plan = resumed.plan.model_copy(update=update)
        check_resumed(recipe, plan, rows.sizes)
        if resumed.state and resumed.state.step > steps:
            raise RefusedError(
                f"train.steps={steps}: the run has done {resumed.state.step} steps already; set train.steps to more"
            )
        plan = replan(plan, job)
    check_ids(int(config.get_text_config().vocab_size), rows.largest_id, plan.stop_token_ids)
    return plan, job


def _reference_config(sources: Sources, objective: Objective) -> PreTrainedConfig | None:
    """Of the frozen reference; None: there is none. One from random weights has the policy's."""
    if objective == "supervised" or sources.recipe.algorithm.kl_coefficient == 0:
        return None
    folder = sources.recipe.model.reference
    named = Path(folder) if folder is not None else None
    return read_config(named if named is not None and named.is_dir() else sources.config)


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
