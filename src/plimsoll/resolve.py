"""What a recipe's `model` section means on this disk: folders, resolved once, before anything is built."""

import json
from dataclasses import dataclass
from pathlib import Path

from plimsoll.checkpoint.locate import CHECKPOINTS, locate_model
from plimsoll.checkpoint.state import TrainingState, read_state
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import MODEL
from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.observe.console import Console
from plimsoll.observe.run_folder import PLAN, TOKENIZER
from plimsoll.weights.tensors import check_whole


@dataclass(slots=True, kw_only=True, frozen=True)
class Resumed:
    """What a resumed run goes on from."""

    plan: RunPlan | None  # None: the run was ended before it had one
    checkpoint: Path | None  # the newest complete one; None: it starts again from its first step
    state: TrainingState | None  # of that checkpoint


@dataclass(slots=True, kw_only=True, frozen=True)
class Sources:
    """Where weights, config and tokenizer are read from."""

    recipe: Recipe  # `model.path` and `model.reference` are Hugging Face folders here, never runs
    config: Path  # config.json, or a folder that holds one
    tokenizer: Path


def find_resumed(run: Path, console: Console) -> Resumed:
    """Look for the newest complete checkpoint, saying what was passed over."""
    recorded = run / PLAN
    plan = RunPlan.model_validate(json.loads(recorded.read_bytes())) if recorded.is_file() else None
    scan = CheckpointStore(run / CHECKPOINTS, keep=None).scan()
    for skipped in scan.skipped:
        console.note(f"passed over {skipped.path}: {skipped.reason}")
    if scan.checkpoint is None:
        console.note("no complete checkpoint yet: the run starts again from its first step")
        return Resumed(plan=plan, checkpoint=None, state=None)
    path = scan.checkpoint.path
    console.note(f"resuming from {path}")
    return Resumed(plan=plan, checkpoint=path, state=read_state(path))


def resolve_sources(recipe: Recipe, run: Path, resumed: Resumed | None) -> Sources:
    """RefusedError when a folder is missing.

    A resumed run takes its weights from its own checkpoint and its tokenizer from its own folder, whatever has become
    of the folders that it began with. A reference in use is still read from where it was: the plan has the folder.
    """
    model = recipe.model
    update: dict[str, str | None] = {}
    policy = None  # the folder of `model.path`; located once, because a run's checkpoint is hashed for it
    if resumed and resumed.checkpoint:
        config = resumed.checkpoint / MODEL
        update |= {"path": str(config), "init": "pretrained"}
    elif model.init == "random":
        assert model.config is not None, "checked with the recipe"
        config = Path(model.config)
    else:
        assert model.path is not None, "checked with the recipe"
        config = policy = _weights(model.path, "model.path")
        update["path"] = str(config)
    update["reference"] = _reference(recipe, resumed, policy)
    tokenizer = Path(model.tokenizer) if model.tokenizer else config if config.is_dir() else config.parent
    if resumed and (run / TOKENIZER).is_dir():
        tokenizer = run / TOKENIZER
    return Sources(
        recipe=recipe.model_copy(update={"model": model.model_copy(update=update)}), config=config, tokenizer=tokenizer
    )


def _reference(recipe: Recipe, resumed: Resumed | None, policy: Path | None) -> str | None:
    """The folder of the reference; None without a KL. A run named as reference means the checkpoint it had at first."""
    model = recipe.model
    named = model.reference or model.path
    if recipe.algorithm.kl_coefficient == 0 or named is None:
        return None
    if resumed and resumed.plan and resumed.plan.reference:
        if not Path(resumed.plan.reference).is_dir():
            raise RefusedError(
                f"model.reference: {resumed.plan.reference}, the reference that this run began with, is gone; put it "
                "back, or start a new run (name=OTHER)"
            )
        return resumed.plan.reference
    if model.reference is None and policy is not None:
        return str(policy)
    return str(_weights(named, "model.reference" if model.reference else "model.path"))


def _weights(named: str, setting: str) -> Path:
    """The Hugging Face folder that `named` means. Broken files are refused here, before the run folder is touched."""
    folder = locate_model(named, setting=setting).model
    try:
        for path in sorted(folder.glob("*.safetensors")):
            check_whole(path)
    except CheckpointError as error:
        raise RefusedError(f"{setting}: {error}") from error
    return folder
