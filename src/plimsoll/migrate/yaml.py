"""A recipe as YAML that a person would write: sections in the order of the schema, no quotes that are not needed."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from plimsoll.config.recipe import Recipe

_PLAIN = re.compile(r"[A-Za-z_/.~][\w./~+-]*(?::[\w./-]+)*")
_WORDS = re.compile(r"(?i)null|true|false|yes|no|on|off|~|\.inf|\.nan")


def recipe_yaml(recipe: Mapping[str, Any]) -> str:
    """The file, with a newline at its end."""
    order = list(Recipe.model_fields)
    ordered = {key: recipe[key] for key in sorted(recipe, key=order.index)}
    return "\n".join(_lines(ordered, 0)) + "\n"


def _lines(section: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield f"{'  ' * depth}{key}:"
            yield from _lines(cast(Mapping[str, Any], value), depth + 1)
        else:
            yield f"{'  ' * depth}{key}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and not _WORDS.fullmatch(value):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return f"{value:.1f}"
    return json.dumps(value, ensure_ascii=False)
