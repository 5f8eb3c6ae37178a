"""Do the files that a recipe names exist? Asked before anything heavy is imported."""

import re
from collections.abc import Iterator
from pathlib import Path

from plimsoll.config.extras import how_to_install, installed
from plimsoll.config.recipe import Recipe
from plimsoll.config.source import read_file
from plimsoll.errors import RecipeError

GGUF_LIBRARIES = ("gguf", "accelerate")
"""What transformers reads GGUF files with."""


def check_files(recipe: Recipe, recipe_file: Path, *, command: str = "train", resume: bool = False) -> None:
    """RecipeError names every key whose file or folder is missing. `recipe_file`: the recipe as the user named it, so
    that a missing run can be answered with the command that makes it. `command`: train, sft or eval. `resume`: weights
    and tokenizer come from the run itself."""
    causes = [*_sources(recipe, command), *(_sinks(recipe) if command != "eval" else ())]
    if command == "train" or (command == "sft" and recipe.data.eval is not None):
        causes += _engine(recipe)
    if command != "eval" and not resume:
        causes += _models(recipe, recipe_file, command)
        causes += _own_folder(recipe)
    if causes:
        raise RecipeError(causes)


def _engine(recipe: Recipe) -> Iterator[str]:
    """The engine's library, looked for without importing it: that alone takes a quarter of a minute."""
    if recipe.rollout.engine == "vllm" and not installed("vllm"):
        yield (
            f"`rollout.engine=vllm` needs vLLM, which is not installed: {how_to_install('vllm')}; or set "
            "`rollout.engine=native`, for small models"
        )


def _sinks(recipe: Recipe) -> Iterator[str]:
    """Libraries of sinks, looked for without importing them."""
    observe = recipe.observe
    if observe.tensorboard and not installed("tensorboard"):
        yield f"`observe.tensorboard=true` needs TensorBoard, which is not installed: {how_to_install('tensorboard')}"
    if observe.wandb != "off" and not installed("wandb"):
        yield f"`observe.wandb={observe.wandb}` needs wandb, which is not installed: {how_to_install('wandb')}"


def _models(recipe: Recipe, recipe_file: Path, command: str) -> Iterator[str]:
    model = recipe.model
    if model.init == "pretrained" and model.path is not None:
        if Path(model.path).is_dir() or Path(model.path).suffix == ".gguf":
            yield from _gguf("model.path", Path(model.path))
        else:
            yield f"`model.path={model.path}` is not a folder; {_how_to_make(recipe, model.path, recipe_file)}"
    if model.init == "random" and model.config is not None and not _holds_config(Path(model.config)):
        yield (
            f"`model.config={model.config}` is no config.json and no folder that holds one; name one in `model.config`"
        )
    if model.tokenizer is not None and not Path(model.tokenizer).is_dir():
        yield f"`model.tokenizer={model.tokenizer}` is not a folder; name the folder of tokenizer.json"
    if command == "train" and recipe.algorithm.kl_coefficient > 0 and model.reference is not None:
        if Path(model.reference).is_dir() or Path(model.reference).suffix == ".gguf":
            yield from _gguf("model.reference", Path(model.reference))
        else:
            yield (
                f"`model.reference={model.reference}` is not a folder; name a Hugging Face folder in "
                "`model.reference`, or set `algorithm.kl_coefficient=0`"
            )


def _gguf(key: str, path: Path) -> Iterator[str]:
    """What is wrong with a GGUF file, or with a folder that holds one instead of a Hugging Face model."""
    files = gguf_files(path) if path.is_dir() else [path]
    if not path.exists():
        yield f"`{key}={path}` does not exist; name a .gguf file or a Hugging Face folder in `{key}`"
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        yield f"`{key}={path}` holds {len(files)} GGUF files ({names}); name one of them in `{key}`"
    missing = [library for library in GGUF_LIBRARIES if not installed(library)]
    if files and missing:
        yield (
            f"`{key}={path}`: reading GGUF needs {' and '.join(missing)}, not installed here: {how_to_install('gguf')}"
        )


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder; none where it holds a Hugging Face model, or is no folder."""
    return sorted(folder.glob("*.gguf")) if folder.is_dir() and not (folder / "config.json").is_file() else []


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
                command = "sft" if is_supervised(other) else "train"
                return f"it is the run of {other}: make it with `plimsoll {command} {other}`"
    return "name a Hugging Face folder, or the folder of a run, in `model.path`"


def is_supervised(recipe_file: Path) -> bool:
    """A recipe does not say which command it is for, train or sft; the name of its file does."""
    return "sft" in re.split(r"[^a-z0-9]+", recipe_file.stem.lower())


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
