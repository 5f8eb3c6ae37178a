"""Small recipes as text, and the causes of a refused one."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from plimsoll.config.load import load_recipe
from plimsoll.config.recipe import Recipe
from plimsoll.errors import RecipeError

MINIMAL = """
name: small
model: {path: somewhere}
data: {train: "task:add"}
"""


def load(folder: Path, text: str = MINIMAL, overrides: Sequence[str] = ()) -> Recipe:
    """Write `text` to a file and load it."""
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path, overrides)


def causes_of(call: Callable[[], object]) -> tuple[str, ...]:
    """The causes of the RecipeError that `call` raises."""
    with pytest.raises(RecipeError) as caught:
        call()
    return caught.value.causes


def one_cause(call: Callable[[], object]) -> str:
    """The only cause of the RecipeError that `call` raises."""
    causes = causes_of(call)
    assert len(causes) == 1, causes
    return causes[0]
