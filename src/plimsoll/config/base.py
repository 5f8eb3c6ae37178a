"""What all sections share: frozen, unknown keys refused, every field documented by the string below it."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every section of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())
