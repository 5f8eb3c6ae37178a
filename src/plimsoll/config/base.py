"""What all sections share: frozen, unknown keys refused, every field documented by the string below it."""

from pydantic import BaseModel, ConfigDict, JsonValue

Options = dict[str, JsonValue]
"""Keyword arguments of a user's function or of a generator: any JSON value (numbers, text, lists, mappings)."""


class Section(BaseModel):
    """Base of every section of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())
