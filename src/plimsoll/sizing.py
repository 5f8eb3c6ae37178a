"""From recipe, data and machine to the numbers of plan.json."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from plimsoll.config.derived import RunPlan
from plimsoll.config.planned import MemoryPlan
from plimsoll.config.recipe import Recipe
from plimsoll.errors import RefusedError
from plimsoll.memory.plan.advice import refusal_error, refusal_lines
from plimsoll.memory.plan.capacity import machine as machine_of
from plimsoll.memory.plan.choose import plan as plan_memory
from plimsoll.memory.plan.constants import ALLOCATOR_SHARE, KV_SHARE
from plimsoll.memory.plan.job import ITEMSIZE, Job, Machine
from plimsoll.model.build import DTYPES, build_meta
from plimsoll.model.measure import sizes_of
from plimsoll.model.sizes import ModelSizes, read_sizes
from plimsoll.observe.run_folder import may_change
from plimsoll.rollout.kv import kv_bytes_per_token, plan_slots

Objective = Literal["policy", "supervised"]

_OWN_CONTEXT = 2 * 2**30
"""More than the CUDA context of a process takes: less than this in use besides torch's memory is no sign of others."""


@dataclass(slots=True, kw_only=True, frozen=True)
class DataSizes:
    """What the plan needs to know about the data."""

    batches_per_epoch: int
    longest_prompt: int  # tokens, training and held-out rows
    longest_sequence: int  # prompt and response
    num_eval: int  # held-out problems


def derive_plan(
    recipe: Recipe,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    sizes: DataSizes,
    *,
    job: Job,
    reference: str | None = None,
) -> RunPlan:
    """The plan of a new run. RefusedError when it does not fit, naming phases, bytes and what would help."""
    memory = fitting(job, machine(recipe))
    choices = memory.choices
    packing = recipe.model.packing
    if packing == "auto":
        packing = "packed" if choices.device == "cuda" and choices.compute_dtype == "bfloat16" else "padded"
    steps = total_steps(recipe, sizes)
    slot_tokens = sizes.longest_prompt + recipe.rollout.max_response_tokens
    plan = RunPlan(
        steps=steps,
        optimizer_steps=optimizer_steps(recipe, steps),
        device=choices.device,
        threads=recipe.train.threads or torch.get_num_threads(),
        compute_dtype=choices.compute_dtype,
        packing=packing,
        activation_checkpointing=choices.activation_checkpointing,
        token_budget=choices.token_budget,
        logprob_chunk=recipe.train.logprob_chunk,
        num_slots=1,
        slot_tokens=slot_tokens,
        kv_bytes=0,
        optimizer_state=choices.optimizer_state,
        reference_placement=choices.reference_placement,
        memory=memory,
        reference=reference,
        stop_token_ids=stop_ids(recipe, config, tokenizer),
    )
    return with_slots(plan, config, job)


def job_of(
    recipe: Recipe,
    config: PreTrainedConfig,
    sizes: DataSizes,
    *,
    objective: Objective,
    reference: PreTrainedConfig | None = None,
) -> Job:
    """What the memory plan is a function of, with the lengths that the data really has."""
    rollout = recipe.rollout
    return Job(
        recipe=recipe,
        sizes=model_sizes(config),
        reference=None if reference is None else model_sizes(reference),
        objective=objective,
        generates=objective == "policy" or sizes.num_eval > 0,
        longest_prompt=sizes.longest_prompt,
        longest_sequence=sizes.longest_sequence,
        num_sequences=max(
            recipe.data.prompts_per_step * rollout.samples_per_prompt if objective == "policy" else 0,
            sizes.num_eval * rollout.eval.samples,
            1,
        ),
    )


def model_sizes(config: PreTrainedConfig) -> ModelSizes:
    """By the rules of its family; of a family without rules, from the model built without memory."""
    try:
        return read_sizes(config.to_dict())
    except RefusedError:
        return sizes_of(build_meta(config, torch.float32))


def machine(recipe: Recipe, device: Literal["cpu", "cuda"] | None = None) -> Machine:
    """What this process may use. Of a GPU that others use too, what they leave. `device`: where the run computes; None:
    on a GPU if there is one."""
    found = machine_of(recipe, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.device == "cpu":
        return found
    free, total = torch.cuda.mem_get_info()
    taken = total - free - torch.cuda.memory_reserved()  # by others, and by this process's context
    return replace(found, device_bytes=min(found.device_bytes, total - max(taken - _OWN_CONTEXT, 0)))


def fitting(job: Job, machine: Machine, *, resumed: bool = False) -> MemoryPlan:
    """The memory plan. RefusedError: it does not fit. `resumed`: no setting is advised that the run must keep."""
    memory = plan_memory(job, machine)
    if memory.fits:
        return memory
    if not resumed:
        raise refusal_error(memory)
    advice = tuple(each for each in memory.advice if all(may_change(item.partition("=")[0]) for item in each.set))
    if advice or not memory.advice:
        raise refusal_error(memory.model_copy(update={"advice": advice}))
    raise RefusedError(
        [
            *refusal_lines(memory),
            "No setting that a resumed run may change makes it fit: resume it where there is more memory, or start a "
            "new run from its weights (name=OTHER model.path=RUN)",
        ]
    )


def with_slots(plan: RunPlan, config: PreTrainedConfig, job: Job) -> RunPlan:
    """`plan` with the engine's sequences: what its KV cache holds, and no more than the work can use.

    RefusedError when it cannot hold a single one.
    """
    assert plan.memory is not None
    if not job.generates:
        return plan
    slot_bytes = plan.slot_tokens * kv_bytes_per_token(config, DTYPES[plan.compute_dtype])
    slots = plan_slots(kv_memory=plan.memory.choices.kv_bytes, slot_bytes=slot_bytes, num_sequences=job.num_sequences)
    kv_bytes = slots * slot_bytes if job.recipe.rollout.engine == "native" else plan.memory.choices.kv_bytes
    return plan.model_copy(update={"num_slots": slots, "kv_bytes": kv_bytes})


def replan(plan: RunPlan, job: Job, *, built: bool = False) -> RunPlan:
    """The memory of a run whose numbers are settled: for the machine as it is now, or with what was measured.

    `built`: optimizer and reference are where the plan has put them, and stay there. RefusedError when they do not fit.
    """
    recipe = job.recipe
    train: dict[str, Any] = {
        "token_budget": plan.token_budget,
        "activation_checkpointing": plan.activation_checkpointing,
    }
    model: dict[str, Any] = {}
    if built:
        train["optimizer_state"], model["reference_placement"] = plan.optimizer_state, plan.reference_placement
    settled = recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update=train),
            "model": recipe.model.model_copy(update=model),
            "rollout": recipe.rollout.model_copy(update={"kv_memory": plan.kv_bytes} if plan.kv_bytes else {}),
        }
    )
    have = machine(recipe, plan.device)
    if built and plan.memory is not None:
        # What is free by now is less by what this run itself has taken.
        rows, host = plan.memory.phases, plan.memory.host
        have = replace(
            have,
            device_bytes=max(have.device_bytes, rows[0].capacity_bytes),
            host_bytes=max(have.host_bytes, host.capacity_bytes),
        )
    memory = fitting(replace(job, recipe=settled), have, resumed=not built)
    return plan.model_copy(
        update={
            "optimizer_state": memory.choices.optimizer_state,
            "reference_placement": memory.choices.reference_placement,
            "memory": memory,
        }
    )


def check_resumed(recipe: Recipe, plan: RunPlan, sizes: DataSizes) -> None:
    """RefusedError when a run's own plan does not serve it any more: longer rows, another kind of device."""
    longest = sizes.longest_prompt + recipe.rollout.max_response_tokens
    if longest > plan.slot_tokens:
        raise RefusedError(
            f"data.eval: its longest prompt has {sizes.longest_prompt} tokens, and with rollout.max_response_tokens="
            f"{recipe.rollout.max_response_tokens} does not fit into the run's slots of {plan.slot_tokens} tokens; "
            "take shorter rows, or start a new run (name=OTHER model.path=RUN)"
        )
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise RefusedError("the run is one of a GPU, and there is none here: resume it on a GPU")


def check_ids(vocab_size: int, largest_id: int, stop_token_ids: Sequence[int]) -> None:
    """RefusedError when tokens are used that the model has no embedding for: on a GPU that is an opaque error."""
    if largest_id >= vocab_size:
        raise RefusedError(
            f"model.tokenizer: it gives token id {largest_id}, and the model has {vocab_size} embeddings; "
            "name the tokenizer of this model"
        )
    if max(stop_token_ids, default=0) >= vocab_size:
        raise RefusedError(
            f"rollout.stop_token_ids: {max(stop_token_ids)} is not among the {vocab_size} ids of the model"
        )


def total_steps(recipe: Recipe, sizes: DataSizes) -> int:
    """`train.steps`, or as many as `train.epochs` over the data make."""
    return recipe.train.steps or recipe.train.epochs * sizes.batches_per_epoch


def optimizer_steps(recipe: Recipe, steps: int) -> int:
    """Optimizer steps of the run, which the learning-rate schedule spans."""
    return steps * recipe.train.mini_batches_per_step * recipe.train.epochs_per_rollout


@dataclass(slots=True, kw_only=True, frozen=True)
class Intervals:
    """Intervals that fit into a run, and what to say about those that did not."""

    eval_every: int | None  # steps
    checkpoint_every: int | None  # steps
    notes: tuple[str, ...]


def budget_note(plan: RunPlan, longest_sequence: int) -> str | None:
    """What to say when the budget is below what a micro-batch must hold."""
    if longest_sequence <= plan.token_budget:
        return None
    return (
        f"`train.token_budget={plan.token_budget}` is below the longest sequence ({longest_sequence} tokens): a longer "
        "sequence is a micro-batch of its own"
    )


def clip_intervals(recipe: Recipe, *, steps: int) -> Intervals:
    """Intervals longer than the run are cut to it, so that every recipe also runs with `train.steps=2`."""
    notes: list[str] = []

    def clip(key: str, value: int | None) -> int | None:
        if value is None or value <= steps:
            return value
        notes.append(f"`{key}={value}` is longer than the run and taken as {steps} steps")
        return steps

    return Intervals(
        eval_every=clip("train.eval_every", recipe.train.eval_every),
        checkpoint_every=clip("checkpoint.every", recipe.checkpoint.every),
        notes=tuple(notes),
    )


def stop_ids(recipe: Recipe, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """`rollout.stop_token_ids`, or the end-of-sequence ids of the tokenizer and the model's config, ascending.

    RefusedError when nobody names one.
    """
    if recipe.rollout.stop_token_ids is not None:
        return recipe.rollout.stop_token_ids
    found: set[int] = set()
    # eos_token_id: one id, a list of ids (the models with several ends of turn) or None.
    named: list[Any] = [tokenizer.eos_token_id, config.get_text_config().eos_token_id]
    for ids in named:
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    if not found:
        raise RefusedError(
            "neither the tokenizer nor the model's config names an end-of-sequence id: set rollout.stop_token_ids "
            "(to [] if every response shall run to rollout.max_response_tokens)"
        )
    return tuple(sorted(found))


@dataclass(slots=True, kw_only=True, frozen=True)
class EvaluationPlan:
    """What an evaluation without a trainer needs to know."""

    device: Literal["cpu", "cuda"]
    threads: int
    compute_dtype: str
    num_slots: int
    slot_tokens: int
    stop_token_ids: tuple[int, ...]


def plan_evaluation(
    recipe: Recipe, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, sizes: DataSizes
) -> EvaluationPlan:
    """The engine alone: weights and KV cache. RefusedError when the cache cannot hold a single sequence."""
    have = machine(recipe)
    dtype = recipe.model.compute_dtype
    if dtype == "auto":
        dtype = "bfloat16" if have.device == "cuda" else recipe.model.dtype
    room = have.device_bytes
    if have.device == "cuda":
        weights = model_sizes(config).parameter_bytes(ITEMSIZE[dtype])
        room = int((1 - ALLOCATOR_SHARE) * room) - weights - _OWN_CONTEXT
    asked = recipe.rollout.kv_memory
    slot_tokens = sizes.longest_prompt + recipe.rollout.max_response_tokens
    return EvaluationPlan(
        device=have.device,
        threads=recipe.train.threads or torch.get_num_threads(),
        compute_dtype=dtype,
        num_slots=plan_slots(
            kv_memory=int(KV_SHARE * room) if asked is None else int(asked),
            slot_bytes=slot_tokens * kv_bytes_per_token(config, DTYPES[dtype]),
            num_sequences=max(sizes.num_eval * recipe.rollout.eval.samples, 1),
        ),
        slot_tokens=slot_tokens,
        stop_token_ids=stop_ids(recipe, config, tokenizer),
    )
