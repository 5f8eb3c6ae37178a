"""`plimsoll eval`: the held-out accuracy of a run or of any model folder, by the code that training uses."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from plimsoll.checkpoint.locate import locate_model
from plimsoll.config.recipe import Recipe
from plimsoll.data.load import load_dataset
from plimsoll.data.tokenizer import load_tokenizer
from plimsoll.model.build import DTYPES, build_meta, quiet_transformers, read_config
from plimsoll.model_cache import convert, is_convertible, open_model
from plimsoll.observe.console import Console, logging_to
from plimsoll.reward.pool import ScoringPool
from plimsoll.reward.resolve import check_sources, needs_answer
from plimsoll.rollout.evaluation import EvalResult, evaluate
from plimsoll.rollout.native import NativeEngine
from plimsoll.sizing import DataSizes, plan_evaluation
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.load import load_sharded


@dataclass(slots=True, kw_only=True, frozen=True)
class EvalSummary:
    """What `plimsoll eval` prints."""

    result: EvalResult
    model: Path

    def as_json(self) -> dict[str, Any]:
        """One object: accuracy, pass_at_k, n and a few more."""
        return {**self.result.as_json(), "model": str(self.model)}


def run(target: Path, recipe: Recipe) -> EvalSummary:
    """Evaluate a run's newest complete checkpoint, a checkpoint's folder, a Hugging Face folder or a GGUF file.

    Raises RefusedError when there is no model at `target`, DataError when the held-out rows cannot be used.
    """
    console = Console(recipe.observe.console)
    with logging_to(console):
        return _run(target, recipe, console)


def _run(target: Path, recipe: Recipe, console: Console) -> EvalSummary:
    quiet_transformers()
    with TemporaryDirectory(prefix="plimsoll-") as scratch:
        return _evaluate(_usable_folder(target, recipe, Path(scratch), console), target, recipe, console)


def _usable_folder(target: Path, recipe: Recipe, scratch: Path, console: Console) -> Path:
    """An evaluation has no folder to keep converted weights in: they are gone with `scratch`."""
    if not is_convertible(target):
        return locate_model(target).model
    companions = scratch / "companions"
    companions.mkdir()
    dtype = DTYPES[recipe.model.dtype]
    model = open_model("model", target, scratch, companions, dtype=dtype, reuse=False)
    convert([model], console.note, remedy="name another disk with TMPDIR=, or convert it once with `plimsoll export`")
    return model.folder


def _evaluate(model_folder: Path, target: Path, recipe: Recipe, console: Console) -> EvalSummary:
    tokenizer = load_tokenizer(Path(recipe.model.tokenizer) if recipe.model.tokenizer else model_folder)
    assert recipe.data.eval is not None, "checked with the recipe"
    need = "answer" if needs_answer(recipe.reward) else "prompt"
    rows = load_dataset(recipe.data.eval, recipe.data, tokenizer, split="eval", seed=recipe.seed, need=need)
    check_sources(recipe.reward, (prompt.data_source for prompt in rows.prompts))
    for line in rows.report.lines():
        console.note(line)
    longest = max(len(prompt.token_ids) for prompt in rows.prompts)
    with ScoringPool(recipe.reward) as scorer:
        sizes = DataSizes(
            batches_per_epoch=1, longest_prompt=longest, longest_sequence=longest, num_eval=len(rows.prompts)
        )
        plan = plan_evaluation(recipe, read_config(model_folder), tokenizer, sizes)
        torch.set_num_threads(plan.threads)
        with WeightFiles(model_folder) as files:
            # In the compute dtype from the start: casting afterwards would round the rotary frequencies too.
            lm = build_meta(model_folder, DTYPES[plan.compute_dtype], files=files)
            load_sharded(lm, files, device=torch.device(plan.device))
        engine = NativeEngine(
            lm,
            num_slots=plan.num_slots,
            slot_tokens=plan.slot_tokens,
            prefill_tokens=recipe.rollout.prefill_tokens,
        )
        result = evaluate(
            engine,
            scorer,
            rows.prompts,
            sampling=recipe.rollout.eval,
            max_tokens=recipe.rollout.max_response_tokens,
            stop_token_ids=plan.stop_token_ids,
            seed=recipe.seed,
            decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        )
    return EvalSummary(result=result, model=target if is_convertible(target) else model_folder)
