"""From recipe, data and machine to the numbers of plan.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.errors import RefusedError
from plimsoll.memory.host import HostReader
from plimsoll.model.build import DTYPES
from plimsoll.rollout.kv import kv_bytes_per_token, plan_slots

KV_SHARE = 0.25
"""Share of the free memory that the KV cache may take when `rollout.kv_memory` is not set."""

TOKEN_BUDGET = {"cpu": 2048, "cuda": 16384}
"""Tokens of a micro-batch when `train.token_budget` is not set; padded attention on a CPU likes small ones."""


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
    reference: str | None = None,
) -> RunPlan:
    """The plan of a new run. RefusedError when the KV cache cannot hold a single sequence."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train, rollout = recipe.train, recipe.rollout
    compute_dtype = recipe.model.compute_dtype
    if compute_dtype == "auto":
        compute_dtype = "bfloat16" if device == "cuda" else recipe.model.dtype
    checkpointing = train.activation_checkpointing
    if checkpointing == "auto":
        checkpointing = "full" if device == "cuda" else "none"
    packing = recipe.model.packing
    if packing == "auto":
        packing = "packed" if device == "cuda" and compute_dtype == "bfloat16" else "padded"
    steps = total_steps(recipe, sizes)
    slot_tokens = sizes.longest_prompt + rollout.max_response_tokens
    slot_bytes = slot_tokens * kv_bytes_per_token(config, DTYPES[compute_dtype])
    num_sequences = max(
        recipe.data.prompts_per_step * rollout.samples_per_prompt, sizes.num_eval * rollout.eval.samples, 1
    )
    kv_memory = rollout.kv_memory if rollout.kv_memory is not None else int(KV_SHARE * free_memory(recipe, device))
    num_slots = plan_slots(kv_memory=int(kv_memory), slot_bytes=slot_bytes, num_sequences=num_sequences)
    return RunPlan(
        steps=steps,
        optimizer_steps=optimizer_steps(recipe, steps),
        device=device,
        threads=train.threads or torch.get_num_threads(),
        compute_dtype=compute_dtype,
        packing=packing,
        activation_checkpointing=checkpointing,
        token_budget=train.token_budget or max(TOKEN_BUDGET[device], sizes.longest_sequence),
        logprob_chunk=train.logprob_chunk,
        num_slots=num_slots,
        slot_tokens=slot_tokens,
        kv_bytes=num_slots * slot_bytes,
        reference=reference,
        stop_token_ids=stop_ids(recipe, config, tokenizer),
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


def free_memory(recipe: Recipe, device: str) -> int:
    """Bytes free where the KV cache will live, within the capacity that the recipe allows."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        allowed = recipe.memory.device_memory or total
        return min(free, int(allowed))
    reader = HostReader()
    limits = [psutil.virtual_memory().available, reader.limit, recipe.memory.host_memory]
    reader.close()
    return min(int(limit) for limit in limits if limit is not None)
