"""Where the config.json of a model is that a launch script names by a path elsewhere, or by its name at a hub."""

from collections.abc import Iterator
from pathlib import Path

from plimsoll.errors import RefusedError

SHIPPED = Path("recipes") / "models"
"""Small config.json of well-known models, beside the recipes. An installed package has none."""


def find_config(named: str | None, script: Path, given: str | None, key: str) -> Path:
    """The folder or file to read sizes from: `given` (model.config of the user), the folder itself, or the shipped
    config whose name ends what the script names. RefusedError: none of these; `key` is verl's name of the setting."""
    if given is not None:
        return Path(given)
    if named is None:
        raise RefusedError(
            f"the script sets no `{key}`, or to what only a running shell knows: name the model's config.json in "
            "`model.config=PATH` after the script"
        )
    folder = Path(named).expanduser()
    if (folder / "config.json").is_file():
        return folder
    last = folder.name.lower()
    for models in _shipped(script):
        for found in sorted(models.iterdir()):
            if found.name.lower() == last and (found / "config.json").is_file():
                return _short(found)
    raise RefusedError(
        f"`{key}={named}` is not a folder here and no config.json of {folder.name} comes with the recipes: name one in "
        "`model.config=PATH` after the script; it is all that a plan needs of a model"
    )


def _shipped(script: Path) -> Iterator[Path]:
    """Folders of shipped configs: above the script, above here, and of the repository that this file lies in."""
    here, script = Path.cwd(), script.resolve()
    for folder in (*script.parents, here, *here.parents, Path(__file__).resolve().parents[3]):
        if (folder / SHIPPED).is_dir():
            yield folder / SHIPPED


def _short(path: Path) -> Path:
    """Relative to here where that is no way up: recipes are read from the folder in which a run is started."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
