"""Reading a recipe file and the overrides of the command line into plain values; no meaning yet.

YAML 1.2 by ruamel.yaml: `1e-4` is a number and a key written twice is an error. (PyYAML follows YAML 1.1, where
`1e-4` is text, and keeps the last of two equal keys in silence.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from plimsoll.config.schema import leaves
from plimsoll.errors import RecipeError

COMMAND_LINE = "on the command line"


@dataclass(slots=True, kw_only=True, frozen=True)
class Setting:
    """One override, split at its dots."""

    path: tuple[str, ...]
    value: Any


def read_file(path: Path) -> dict[str, Any]:
    """The mapping that the file holds; keys are text. RecipeError when there is none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file; name a recipe, a YAML file with at least `name` and `data`") from None
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path}: byte {error.start} is not UTF-8; save the recipe as UTF-8 (its keys start with `name`)"
        ) from None
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; name a recipe, a YAML file with at least `name`") from None
    try:
        document = _parse(text)
    except YAMLError as error:
        place = f"{path}, {_place(error)}" if _place(error) else str(path)
        raise RecipeError(
            f"{place}: not valid YAML: {_problem(error)}; a recipe is `name: …` and sections such as `train:`"
        ) from None
    if not isinstance(document, dict):
        kind = "is empty" if document is None else f"holds {type(document).__name__} and not keys with values"
        raise RecipeError(f"{path}: {kind}; a recipe has at least `name`, `model` and `data.train`")
    return as_text_keys(cast(Mapping[Any, Any], document))


def as_text_keys(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    """A copy of one level whose keys are text (YAML allows `1:` and `true:` as keys)."""
    return {str(key): value for key, value in mapping.items()}


def parse_overrides(arguments: Sequence[str]) -> tuple[list[Setting], list[str]]:
    """Settings and the causes of those that cannot be read. Values are YAML scalars or flow collections."""
    settings: list[Setting] = []
    causes: list[str] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            causes.append(f"{argument!r} is not `section.key=value`; for example `train.steps=2`")
        elif not text.strip():
            causes.append(f"`{argument}` has no value; write `{key}=null` for none; for example `train.steps=2`")
        else:
            _parse_value(path, text, settings, causes)
    return settings, causes


def _parse_value(path: tuple[str, ...], text: str, settings: list[Setting], causes: list[str]) -> None:
    """Text leaves take what was typed as it is, so that `name=2024` and `data.system_prompt=Answer: yes` need no
    second pair of quotes; `null` and a value in quotes mean what they mean in YAML."""
    key = ".".join(path)
    text_leaf = key in leaves() and leaves()[key].text_only
    try:
        value = _parse(text)
    except YAMLError as error:
        if not text_leaf:
            causes.append(
                f"`{key}={text}`: the value is not valid YAML: {_problem(error)}; for example `train.steps=2`"
            )
            return
        value = text
    if text_leaf and not isinstance(value, str) and value is not None:
        value = text
    settings.append(Setting(path=path, value=value))


def _parse(text: str) -> Any:
    # A new parser each time: after an error ruamel's keeps state of the broken document.
    return YAML(typ="safe", pure=True).load(text)  # pyright: ignore[reportUnknownMemberType]


def _place(error: YAMLError) -> str:
    if isinstance(error, MarkedYAMLError):
        mark = cast(Any, error.problem_mark or error.context_mark)
        if mark is not None:
            return f"line {mark.line + 1}, column {mark.column + 1}"
    return ""


def _problem(error: YAMLError) -> str:
    # The full text of ruamel's errors quotes the file and advises its own programming interface.
    if isinstance(error, MarkedYAMLError):
        return str(cast(Any, error).problem or cast(Any, error).context)
    return str(error).splitlines()[0]
