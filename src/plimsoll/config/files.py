"""Do the files that a recipe names exist? Asked before anything heavy is imported."""

import re
from collections.abc import Iterator
from pathlib import Path

from plimsoll.config.extras import how_to_install, installed
from plimsoll.config.recipe import Recipe
from plimsoll.config.source import read_file
from plimsoll.errors import RecipeError


def check_files(recipe: Recipe, recipe_file: Path, *, command: str = "train", resume: bool = False) -> None:
    """RecipeError names every key whose file or folder is missing. `recipe_file`: the recipe as the user named it, so
    that a missing run can be answered with the command that makes it. `command`: train, sft or eval. `resume`: weights
    and tokenizer come from the run itself."""
    causes = [*_sources(recipe, command), *(_sinks(recipe) if command != "eval" else ())]
    if command != "eval" and not resume:
        causes += _models(recipe, recipe_file, command)
        causes += _own_folder(recipe)
    if causes:
        raise RecipeError(causes)


def _sinks(recipe: Recipe) -> Iterator[str]:
    """Libraries of sinks, looked for without importing them."""
    observe = recipe.observe
    if observe.tensorboard and not installed("tensorboard"):
        yield f"`observe.tensorboard=true` needs TensorBoard, which is not installed: {how_to_install('tensorboard')}"
    if observe.wandb != "off" and not installed("wandb"):
        yield f"`observe.wandb={observe.wandb}` needs wandb, which is not installed: {how_to_install('wandb')}"


def _models(recipe: Recipe, recipe_file: Path, command: str) -> Iterator[str]:
    model = recipe.model
    if model.init == "pretrained" and model.path is not None and (gguf := _gguf(model.path)):
        yield _convert("model.path", gguf)
    elif model.init == "pretrained" and model.path is not None and not Path(model.path).is_dir():
        yield f"`model.path={model.path}` is not a folder; {_how_to_make(recipe, model.path, recipe_file)}"
    if model.init == "random" and model.config is not None and not _holds_config(Path(model.config)):
        yield (
            f"`model.config={model.config}` is no config.json and no folder that holds one; name one in `model.config`"
        )
    if model.tokenizer is not None and not Path(model.tokenizer).is_dir():
        yield f"`model.tokenizer={model.tokenizer}` is not a folder; name the folder of tokenizer.json"
    reference_read = command == "train" and recipe.algorithm.kl_coefficient > 0
    if reference_read and model.reference is not None and (gguf := _gguf(model.reference)):
        yield _convert("model.reference", gguf)
    elif reference_read and model.reference is not None and not Path(model.reference).is_dir():
        yield (
            f"`model.reference={model.reference}` is not a folder; name a Hugging Face folder in `model.reference`, "
            "or set `algorithm.kl_coefficient=0`"
        )


def _gguf(named: str) -> Path | None:
    """The GGUF file that is named, or that a folder holds instead of a Hugging Face model."""
    path = Path(named)
    if path.suffix == ".gguf":
        return path
    return next(iter(gguf_files(path)), None)


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder; none where it holds a Hugging Face model, or is no folder."""
    return sorted(folder.glob("*.gguf")) if folder.is_dir() and not (folder / "config.json").is_file() else []


def _convert(key: str, file: Path) -> str:
    folder = file.with_suffix("")
    return (
        f"`{key}`: {file} is a GGUF file, and training starts from a Hugging Face folder; convert it once with "
        f"`plimsoll export {file} {folder}`, then set `{key}={folder}`"
    )


def _own_folder(recipe: Recipe) -> Iterator[str]:
    """A new run may not begin with what lies in its own folder: --overwrite would delete it first."""
    run = (Path(recipe.run_root) / recipe.name).resolve()
    model, data = recipe.model, recipe.data
    named = {
        "model.path": model.path,
        "model.config": model.config,
        "model.tokenizer": model.tokenizer,
        "model.reference": model.reference,
        "data.train": data.train,
        "data.eval": data.eval,
    }
    for key, value in named.items():
        if value is not None and Path(value).resolve().is_relative_to(run):
            yield f"`{key}={value}` lies in the folder of this very run, {run.name}; give the run another `name`"


def _holds_config(path: Path) -> bool:
    return path.is_file() or (path / "config.json").is_file()


def _how_to_make(recipe: Recipe, path: str, recipe_file: Path) -> str:
    """A missing run of a recipe that lies beside this one is made by that recipe."""
    if Path(path).parent == Path(recipe.run_root):
        for other in sorted(recipe_file.parent.glob("*.yaml")):
            if other != recipe_file and _name_of(other) == Path(path).name:
                return f"it is the run of {other}: make it with `plimsoll {_command_of(other)} {other}`"
    return "name a Hugging Face folder, or the folder of a run, in `model.path`"


def _command_of(recipe_file: Path) -> str:
    """A recipe does not say which command it is for; the name of its file does."""
    return "sft" if "sft" in re.split(r"[^a-z0-9]+", recipe_file.stem.lower()) else "train"


def _name_of(recipe_file: Path) -> str | None:
    try:
        return str(read_file(recipe_file).get("name"))
    except RecipeError:
        return None  # a file that is no recipe made no run


def _sources(recipe: Recipe, command: str) -> Iterator[str]:
    train = () if command == "eval" else (("data.train", recipe.data.train),)
    for key, source in (*train, ("data.eval", recipe.data.eval)):
        if source is None or source.startswith("task:"):
            continue
        if source.startswith("gym:"):
            if not installed("reasoning_gym"):
                yield f"`{key}={source}` needs reasoning-gym, which is not installed: {how_to_install('tasks')}"
        elif not Path(source).is_file():
            yield (
                f"`{key}={source}` is not a file; name a .jsonl or .parquet file, `task:NAME` or `gym:NAME`, in `{key}`"
            )
