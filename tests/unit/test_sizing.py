"""What a plan makes of recipe, data and machine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config

from plimsoll import sizing
from plimsoll.config.derived import RunPlan
from plimsoll.data.tokenizer import load_tokenizer
from plimsoll.errors import RefusedError
from plimsoll.memory.plan.job import GIB, Machine
from plimsoll.sizing import (
    DataSizes,
    check_ids,
    check_resumed,
    clip_intervals,
    derive_plan,
    job_of,
    replan,
    stop_ids,
)
from tests.unit.config.recipes import MINIMAL, load

TOKENIZER = Path(__file__).parents[2] / "recipes" / "models" / "tiny"
TOKEN_BYTES = 3 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, head size, float32
SIZES = DataSizes(batches_per_epoch=5, longest_prompt=20, longest_sequence=276, num_eval=0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(TOKENIZER)


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def config(eos: int | list[int] | None = 1) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, eos_token_id=eos
    )


def plan(folder: Path, tokenizer: PreTrainedTokenizerBase, *overrides: str, sizes: DataSizes = SIZES) -> RunPlan:
    recipe = load(folder, MINIMAL, overrides)
    return derive_plan(recipe, config(), tokenizer, sizes, job=job_of(recipe, config(), sizes, objective="policy"))


def test_slots_are_what_the_work_can_use_or_what_the_memory_holds(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    small = ["data.prompts_per_step=4", "rollout.samples_per_prompt=3", "rollout.max_response_tokens=10"]
    slot_bytes = (20 + 10) * TOKEN_BYTES

    def slots(*overrides: str, num_eval: int = 0) -> int:
        sizes = DataSizes(batches_per_epoch=5, longest_prompt=20, longest_sequence=30, num_eval=num_eval)
        found = plan(tmp_path, tokenizer, *small, *overrides, sizes=sizes)
        assert found.slot_tokens == 30
        assert found.kv_bytes == found.num_slots * slot_bytes
        return found.num_slots

    assert slots() == 12
    assert slots(num_eval=11) == 12
    assert slots("rollout.eval.samples=2", "rollout.eval.temperature=1", num_eval=11) == 22
    assert slots(f"rollout.kv_memory={7 * slot_bytes}") == 7
    assert slots(f"rollout.kv_memory={7 * slot_bytes - 1}") == 6


def test_memory_for_no_sequence_is_refused_with_key_and_bytes(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    need = (20 + 256) * TOKEN_BYTES
    with pytest.raises(RefusedError) as error:
        plan(tmp_path, tokenizer, f"rollout.kv_memory={need - 1}")
    assert error.value.exit_code == 2
    assert "rollout.kv_memory" in str(error.value)
    assert f"{need - 1} bytes" in str(error.value)
    assert f"{need} bytes" in str(error.value)
    assert plan(tmp_path, tokenizer, f"rollout.kv_memory={need}").num_slots == 1


def test_the_budget_holds_the_longest_sequence_unless_it_is_given(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    long = DataSizes(batches_per_epoch=5, longest_prompt=4000, longest_sequence=5000, num_eval=0)
    assert plan(tmp_path, tokenizer).token_budget == 2048
    assert plan(tmp_path, tokenizer, sizes=long).token_budget == 5000
    assert plan(tmp_path, tokenizer, "train.token_budget=100", sizes=long).token_budget == 100


def test_stop_ids_are_those_of_tokenizer_and_config_unless_they_are_given(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert tokenizer.eos_token_id == 1
    recipe = load(tmp_path, MINIMAL)
    assert stop_ids(recipe, config(1), tokenizer) == (1,)
    assert stop_ids(recipe, config([9, 1, 4]), tokenizer) == (1, 4, 9)
    assert stop_ids(recipe, config(0), tokenizer) == (0, 1)
    assert stop_ids(recipe, config(None), tokenizer) == (1,)
    assert plan(tmp_path, tokenizer).stop_token_ids == (1,)
    assert plan(tmp_path, tokenizer, "rollout.stop_token_ids=[7, 3]").stop_token_ids == (7, 3)
    assert plan(tmp_path, tokenizer, "rollout.stop_token_ids=[]").stop_token_ids == ()


def test_without_any_end_of_sequence_id_the_setting_is_asked_for(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    tokenizer.eos_token = None
    with pytest.raises(RefusedError, match=r"rollout\.stop_token_ids"):
        stop_ids(load(tmp_path, MINIMAL), config(None), tokenizer)


def test_ids_without_an_embedding_are_refused_before_the_model_is_built() -> None:
    check_ids(10, 9, (9,))
    with pytest.raises(RefusedError, match=r"model\.tokenizer: it gives token id 10, and the model has 10 embeddings"):
        check_ids(10, 10, (1,))
    with pytest.raises(RefusedError, match=r"rollout\.stop_token_ids: 12"):
        check_ids(10, 9, (1, 12))


def test_a_resumed_plan_must_serve_the_rows_of_today(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    recipe, made = load(tmp_path, MINIMAL), plan(tmp_path, tokenizer)
    check_resumed(recipe, made, SIZES)
    longer = replace(SIZES, longest_prompt=SIZES.longest_prompt + 1)
    with pytest.raises(RefusedError, match=r"data\.eval: its longest prompt has 21 tokens.* slots of 276 tokens"):
        check_resumed(recipe, made, longer)


def test_steps_come_from_the_recipe_or_from_epochs_over_the_data(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    by_epochs = plan(tmp_path, tokenizer, "train.epochs=3", "train.mini_batches_per_step=2")
    assert (by_epochs.steps, by_epochs.optimizer_steps) == (15, 30)
    by_steps = plan(tmp_path, tokenizer, "train.steps=4", "train.epochs_per_rollout=3")
    assert (by_steps.steps, by_steps.optimizer_steps) == (4, 12)


def test_auto_settings_on_a_cpu(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    found = plan(tmp_path, tokenizer)
    assert (found.device, found.compute_dtype, found.packing) == ("cpu", "float32", "padded")
    assert (found.activation_checkpointing, found.threads) == ("none", torch.get_num_threads())
    wide = plan(tmp_path, tokenizer, "model.dtype=float64")
    assert wide.compute_dtype == "float64"
    assert wide.kv_bytes / wide.num_slots == 2 * found.kv_bytes / found.num_slots
    given = plan(tmp_path, tokenizer, "model.packing=single", "train.activation_checkpointing=full", "train.threads=3")
    assert (given.packing, given.activation_checkpointing, given.threads) == ("single", "full", 3)


def test_intervals_longer_than_the_run_are_cut_and_said_once_each(tmp_path: Path) -> None:
    overrides = ["data.eval=task:add", "train.eval_every=100", "checkpoint.every=50"]
    recipe = load(tmp_path, MINIMAL, overrides)
    cut = clip_intervals(recipe, steps=2)
    assert (cut.eval_every, cut.checkpoint_every) == (2, 2)
    assert [note.split("`")[1] for note in cut.notes] == [
        "train.eval_every=100",
        "checkpoint.every=50",
    ]
    kept = clip_intervals(recipe, steps=100)
    assert (kept.eval_every, kept.checkpoint_every, kept.notes) == (100, 50, ())
    off = clip_intervals(load(tmp_path), steps=2)
    assert (off.eval_every, off.checkpoint_every, off.notes) == (None, None, ())


def test_a_run_of_the_cpu_is_planned_for_the_cpu_where_there_is_a_gpu(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, made = load(tmp_path, MINIMAL), plan(tmp_path, tokenizer)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    again = replan(made, job_of(recipe, config(), SIZES, objective="policy"))
    assert again.memory is not None
    assert again.memory.choices.device == "cpu"


def test_what_is_built_stays_where_it_is_when_a_measurement_changes_the_plan(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan with less room needed would take the moments back to the device, where the worker does not have them."""
    recipe, made = load(tmp_path, MINIMAL), plan(tmp_path, tokenizer)
    gpu = Machine(device="cuda", device_bytes=80 * GIB, host_bytes=80 * GIB, ranks=1, ranks_per_node=1)
    monkeypatch.setattr(sizing, "machine", lambda *_: gpu)
    built = made.model_copy(update={"device": "cuda", "optimizer_state": "streamed", "reference_placement": "arena"})
    job = job_of(recipe, config(), SIZES, objective="policy", reference=config())
    free, kept = replan(built, job), replan(built, job, built=True)
    assert (free.optimizer_state, free.reference_placement) == ("device", "device")
    for found in (kept, kept.memory and kept.memory.choices):
        assert found is not None
        assert (found.optimizer_state, found.reference_placement) == ("streamed", "arena")


def test_a_resumed_run_is_not_advised_what_it_must_keep(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = ("train.token_budget=8192", "rollout.kv_memory=1MiB")
    made, recipe = plan(tmp_path, tokenizer, *fixed), load(tmp_path, MINIMAL, fixed)
    assert made.memory is not None
    job = job_of(recipe, config(), SIZES, objective="policy")
    needed = max(row.device_bytes for row in made.memory.phases)

    def causes(device_bytes: int, call: Callable[[], object]) -> tuple[str, ...]:
        small = Machine(device="cpu", device_bytes=device_bytes, host_bytes=80 * GIB, ranks=1, ranks_per_node=1)
        monkeypatch.setattr(sizing, "machine", lambda *_: small)
        with pytest.raises(RefusedError) as error:
            call()
        return error.value.causes

    new = causes(needed // 2, lambda: plan(tmp_path, tokenizer, *fixed))
    assert any("train.token_budget" in cause for cause in new)
    resumed = causes(needed // 2, lambda: replan(made, job))
    assert not any("token_budget" in cause or "kv_memory" in cause for cause in resumed)
    assert any("and has" in cause for cause in resumed)
    assert "resume it where there is more memory" in resumed[-1]
    assert not any("a resumed run" in cause for cause in causes(1, lambda: replan(made, job)))  # nothing helps anybody
