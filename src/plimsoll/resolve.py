"""What a recipe's `model` section means on this disk: folders, resolved once, before anything is built.

Weights that are no safetensors (GGUF, pytorch_model.bin) are looked into here, and converted into the run's folder once
data and plan are accepted: until then nothing is written.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from plimsoll.checkpoint.locate import CHECKPOINTS, locate_model
from plimsoll.checkpoint.state import TrainingState, read_state
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import MODEL
from plimsoll.config.derived import ADDED, RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.errors import RefusedError
from plimsoll.model.build import DTYPES, check_weights, read_config
from plimsoll.model_cache import CACHE, Converted, clear, convert, is_convertible, open_model
from plimsoll.observe.console import Console
from plimsoll.observe.run_folder import PLAN, TOKENIZER
from plimsoll.update.construct import blamed_on


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
    converted: tuple[Converted, ...]  # whose folders, named by `recipe`, are there after `convert_weights`
    unchecked: tuple[tuple[Path, str], ...]  # folders of weights, and the settings that name them

    def check_weights(self) -> None:
        """RefusedError, from headers alone: weights that do not fit their config.json. After the plan, which opens no
        file of weights."""
        for folder, setting in self.unchecked:
            with blamed_on(setting):
                check_weights(folder, DTYPES[self.recipe.model.dtype])

    def convert_weights(self, run: Path, console: Console) -> None:
        """Fill RUN/model_cache. RefusedError or CheckpointError: weights cannot be converted, or not be written."""
        if self.converted:
            model = self.recipe.model
            clear(run / CACHE, [Path(named) for named in (model.path, model.reference) if named is not None])
            convert(self.converted, console.note)


def find_resumed(run: Path, console: Console) -> Resumed:
    """Look for the newest complete checkpoint, saying what was passed over."""
    recorded = run / PLAN
    plan = None
    if recorded.is_file():
        # The memory plan is made anew in any case, and another version may have written other fields.
        plan = RunPlan.model_validate({**ADDED, **json.loads(recorded.read_bytes()), "memory": None})
    scan = CheckpointStore(run / CHECKPOINTS, keep=None).scan()
    for skipped in scan.skipped:
        console.note(f"passed over {skipped.path}: {skipped.reason}")
    if scan.checkpoint is None:
        console.note("no complete checkpoint yet: the run starts again from its first step")
        return Resumed(plan=plan, checkpoint=None, state=None)
    path = scan.checkpoint.path
    console.note(f"resuming from {path}")
    return Resumed(plan=plan, checkpoint=path, state=read_state(path))


def resolve_sources(recipe: Recipe, run: Path, resumed: Resumed | None, scratch: Path) -> Sources:
    """RefusedError when a folder is missing. `scratch`: a folder to write in that lives as long as the answer is used.

    A resumed run takes its weights from its own checkpoint and its tokenizer from its own folder, whatever has become
    of the folders that it began with. A reference in use is still read from where it was: the plan has the folder.
    """
    return _Resolving(recipe, run, resumed, scratch).sources()


class _Resolving:
    """Finds the folders of one recipe, each named model once."""

    def __init__(self, recipe: Recipe, run: Path, resumed: Resumed | None, scratch: Path) -> None:
        self.recipe = recipe
        self.run = run
        self.resumed = resumed
        self.scratch = scratch
        self.converted: dict[str, Converted] = {}  # by what the recipe names
        self.unchecked: list[tuple[Path, str]] = []

    def sources(self) -> Sources:
        model, resumed = self.recipe.model, self.resumed
        update: dict[str, str | None] = {}
        policy = None  # the folder of `model.path`; located once, because a run's checkpoint is hashed for it
        if resumed and resumed.checkpoint:
            config = resumed.checkpoint / MODEL
            update["path"] = str(config)  # read even with init=random, which then only says what the reference is
        elif model.init == "random":
            assert model.config is not None, "checked with the recipe"
            config = Path(model.config)
        else:
            assert model.path is not None, "checked with the recipe"
            policy = self.weights(model.path, "model.path")
            update["path"] = str(policy)
            config = self.converted[model.path].companions if model.path in self.converted else policy
        update["reference"] = self.reference(policy)
        tokenizer = Path(model.tokenizer) if model.tokenizer else config if config.is_dir() else config.parent
        if resumed and (self.run / TOKENIZER).is_dir():
            tokenizer = self.run / TOKENIZER
        return Sources(
            recipe=self.recipe.model_copy(update={"model": model.model_copy(update=update)}),
            config=config,
            tokenizer=tokenizer,
            converted=tuple(self.converted.values()),
            unchecked=tuple(self.unchecked),
        )

    def reference(self, policy: Path | None) -> str | None:
        """The folder of the reference; None without a KL. Of a run that is named, the checkpoint it had at first."""
        model = self.recipe.model
        named = model.reference or model.path
        if self.recipe.algorithm.kl_coefficient == 0 or named is None:
            return None
        setting = "model.reference" if model.reference else "model.path"
        if self.resumed and self.resumed.plan and self.resumed.plan.reference:
            return str(self.first_reference(Path(self.resumed.plan.reference), named, setting))
        if model.reference is None and policy is not None:
            return str(policy)
        return str(self.weights(named, setting))

    def first_reference(self, recorded: Path, named: str, setting: str) -> Path:
        """The reference that the run began with. A converted one lies in the run's folder, wherever that is now."""
        folder = recorded
        if recorded.parent.name == CACHE:
            folder = self.run / CACHE / recorded.name
            if not folder.is_dir() and is_convertible(Path(named)):
                folder = self.weights(named, setting)  # has the name again if it comes of the same files
        if folder.name != recorded.name or not (folder.is_dir() or named in self.converted):
            raise RefusedError(
                f"model.reference: {recorded}, the reference that this run began with, is gone; put it back, or start "
                "a new run (name=OTHER)"
            )
        return folder

    def weights(self, named: str, setting: str) -> Path:
        """The Hugging Face folder that `named` means. RefusedError: a broken config.json. Weights are not looked at."""
        path = Path(named)
        if named in self.converted:
            return self.converted[named].folder
        if is_convertible(path):
            scratch = self.scratch / str(len(self.converted))
            scratch.mkdir()
            self.converted[named] = open_model(
                setting,
                path,
                self.run / CACHE,
                scratch,
                dtype=DTYPES[self.recipe.model.dtype],
                reuse=self.resumed is not None,
            )
            return self.converted[named].folder
        folder = locate_model(named, setting=setting).model
        with blamed_on(setting):
            read_config(folder)
        self.unchecked.append((folder, setting))
        return folder
