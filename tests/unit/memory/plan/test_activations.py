"""The formulas against what the layers of transformers hold."""

from dataclasses import replace

import pytest
import torch

from plimsoll.memory.plan.activations import Rows, layer_saved
from plimsoll.memory.plan.workspace import gradients_workspace, logprob_workspace, rows_of, saved_bytes
from plimsoll.model.sizes import read_sizes
from tests.unit.memory.plan import measured
from tests.unit.memory.plan.support import TINY, make_choices, make_job, make_recipe

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "gpt2", "mixtral", "qwen3_moe")
TOKENS = 512


def test_a_layer_by_hand() -> None:
    sizes = read_sizes(TINY)
    rows = Rows(tokens=10, itemsize=2)
    norms = 2 * 10 * (4 * 64 + 2 * 2 * 64 + 4)
    attention = 10 * (2 * (64 + 32 + 32 + 64) + 4 * 4)
    mlp = 10 * 4 * 2 * 128
    assert layer_saved(sizes, sizes.layers[0], rows) == norms + attention + mlp


def test_padding_is_a_term_of_its_own() -> None:
    sizes = read_sizes(TINY)
    packed, padded = (
        layer_saved(sizes, sizes.layers[0], Rows(tokens=100, itemsize=2, padding=share)) for share in (1.0, 1.5)
    )
    inside = 100 * (2 * (64 + 32 + 32 + 64) + 4 * 4)
    assert padded - packed == inside // 2 + 100 * 2 * 64  # and the output once more, without padding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_saved_for_backward(name: str, dtype: str) -> None:
    config = measured.family(name)
    sizes = read_sizes(config.to_dict())
    rows = measured.make_rows((TOKENS // 2, TOKENS // 2))
    for checkpointing in ("none", "selective", "full") if dtype == "bfloat16" else ("none",):
        policy = measured.make_policy(config, dtype_of(dtype), checkpointing)
        found = measured.saved_bytes(policy, rows)
        planned = saved_bytes(sizes, Rows(tokens=TOKENS, itemsize=dtype_of(dtype).itemsize), checkpointing)
        assert planned == pytest.approx(found, rel=0.05), checkpointing


def test_saved_for_backward_with_rows_of_unequal_length() -> None:
    lengths = (200, 100, 100, 80)
    config = measured.family("llama")
    policy = measured.make_policy(config, torch.bfloat16, "none")
    found = measured.saved_bytes(policy, measured.make_rows(lengths))
    tokens = sum(lengths)
    rows = Rows(tokens=tokens, itemsize=2, padding=len(lengths) * max(lengths) / tokens)
    assert saved_bytes(read_sizes(config.to_dict()), rows, "none") == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_peaks_of_forward_and_backward(name: str, checkpointing: str) -> None:
    config = measured.family(name)
    rows = measured.make_rows((TOKENS // 2, TOKENS // 2))
    policy = measured.make_policy(config, torch.bfloat16, checkpointing)
    recipe = make_recipe(
        train={"logprob_chunk": measured.CHUNK},
        model={"packing": "packed"},  # equal lengths: nothing is padded
        rollout={"max_response_tokens": TOKENS // 2, "samples_per_prompt": 2},
        data={"train": "x", "prompts_per_step": 4, "max_prompt_tokens": 1},  # four micro-batches
        algorithm={"entropy_coefficient": 1.0},
    )
    job = make_job(recipe, read_sizes(config.to_dict()), longest_sequence=TOKENS // 2)
    choices = make_choices(compute_dtype="bfloat16", activation_checkpointing=checkpointing, token_budget=TOKENS)
    assert rows_of(job, choices) == Rows(tokens=TOKENS, itemsize=2, longest=TOKENS // 2)
    alone = recipe.model_copy(update={"data": recipe.data.model_copy(update={"prompts_per_step": 1})})
    measured.step(policy, rows)  # FSDP2 has something to set up
    policy.zero_grad(set_to_none=True)
    first = measured.peak_bytes(lambda: measured.step(policy, rows))
    # Gradients are residents: they are there from the second micro-batch on, and made in the only one.
    gradients = sum(parameter.nbytes for parameter in policy.parameters())
    only = sum(gradients_workspace(replace(job, recipe=alone), choices).values())
    assert only + gradients == pytest.approx(first, rel=0.1)
    assert sum(gradients_workspace(job, choices).values()) == pytest.approx(
        measured.peak_bytes(lambda: measured.step(policy, rows)), rel=0.1
    )
    with torch.no_grad():
        forward = measured.peak_bytes(lambda: policy(rows, temperature=1.0))
    assert sum(logprob_workspace(job.sizes, job, choices).values()) == pytest.approx(forward, rel=0.1)


def dtype_of(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
