"""The schema seen from outside: its sections, its leaves, and what each accepts in words.

Error messages, `--help` and the suggestions all read the pydantic models through this file, so that none of them can
name a key that does not exist.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union

import annotated_types
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from plimsoll.config.base import Section
from plimsoll.config.presets import PRESETS
from plimsoll.config.recipe import Recipe

JSON_WORDS = "values are text, numbers, true, false, null, lists or mappings"
"""What options may hold."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Leaf:
    """One key that takes a value."""

    key: str  # dotted, as typed in an override
    section: str  # dotted; "" at the top level
    name: str  # last part of the key
    info: FieldInfo
    table: str = ""  # the leaf whose entry this is part of: `reward.parts` for `reward.parts.NAME.weight`

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The members of the annotation, None left out: `int | None` gives (int,)."""
        return tuple(kind for kind in _members(self.info.annotation) if kind is not type(None))

    @property
    def nullable(self) -> bool:
        """True when `null` is a value."""
        return type(None) in _members(self.info.annotation)

    @property
    def free_form(self) -> bool:
        """True for a mapping whose keys are not ours (options of a generator or a reward function)."""
        return any(typing.get_origin(kind) is dict for kind in self.kinds)

    @property
    def entry(self) -> type[Section] | None:
        """For a table (`reward.parts`, `reward.sources`): what each of its entries, named by the user, consists of."""
        return next((entry for kind in self.kinds if (entry := _entry(kind)) is not None), None)

    @property
    def fields(self) -> str:
        """The keys of an entry of a table, in words."""
        assert self.entry is not None
        return _fields(self.entry)

    def of_entry(self, name: str) -> Mapping[str, "Leaf"]:
        """The keys of one entry of a table: `reward.parts.NAME.weight` and so on, by their last part."""
        assert self.entry is not None
        section = join(self.key, name)
        return {
            field: Leaf(key=join(section, field), section=section, name=field, info=info, table=self.key)
            for field, info in self.entry.model_fields.items()
        }

    @property
    def text_only(self) -> bool:
        """True when every value but null is text."""
        return self.kinds == (str,) or all(typing.get_origin(kind) is Literal for kind in self.kinds)

    @property
    def required(self) -> bool:
        """No default here and none from a preset."""
        return self.info.is_required() and not self.from_preset

    @property
    def from_preset(self) -> bool:
        """True when `algorithm.name` sets the default."""
        return self.section == "algorithm" and any(self.name in preset for preset in PRESETS.values())

    @property
    def accepts(self) -> str:
        """What the key takes, in words."""
        words = " or ".join(_kind_words(kind) for kind in self.kinds)
        words += "".join(f", {bound}" for bound in _bounds(self.info))
        return f"{words}, or null" if self.nullable else words


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _kind_words(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Literal:
        values = [f"`{value}`" for value in typing.get_args(kind)]
        return f"one of {', '.join(values)}"
    if origin is tuple:
        item = typing.get_args(kind)[0]
        return "a list of integers" if item is int else f"a list of items, each {_kind_words(item)}"
    if origin is dict:
        entry = _entry(kind)
        if entry is not None:
            return f"a mapping from names to mappings with {_fields(entry)}"
        return f"a mapping; {JSON_WORDS}"
    words: Mapping[Any, str] = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        ByteSize: "a size such as 80GiB or a number of bytes",
    }
    return words[kind]


def _entry(kind: Any) -> type[Section] | None:
    value = typing.get_args(kind)[1] if typing.get_origin(kind) is dict else None
    return value if isinstance(value, type) and issubclass(value, Section) else None


def _fields(entry: type[Section]) -> str:
    *first, last = (f"`{name}`" for name in entry.model_fields)
    return f"{', '.join(first)} and {last}"


def _bounds(info: FieldInfo) -> list[str]:
    words: list[str] = []
    for item in info.metadata:
        match item:
            case annotated_types.Ge(ge=bound):
                words.append(f"at least {bound:g}")  # pyright: ignore[reportUnknownArgumentType]
            case annotated_types.Gt(gt=bound):
                words.append(f"above {bound:g}")  # pyright: ignore[reportUnknownArgumentType]
            case annotated_types.Le(le=bound):
                words.append(f"at most {bound:g}")  # pyright: ignore[reportUnknownArgumentType]
            case annotated_types.Lt(lt=bound):
                words.append(f"below {bound:g}")  # pyright: ignore[reportUnknownArgumentType]
            case annotated_types.MinLen():
                words.append("not empty")
            case _:
                words.append("letters, digits, `.`, `_`, `-`, the first a letter or a digit")
    return words


@cache
def sections() -> Mapping[str, type[Section]]:
    """Every section by its dotted name, the recipe itself as "", in the order of the schema."""
    found: dict[str, type[Section]] = {"": Recipe}
    pending = [""]
    while pending:
        name = pending.pop(0)
        for field, info in found[name].model_fields.items():
            kind = info.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                assert issubclass(kind, Section)
                found[join(name, field)] = kind
                pending.append(join(name, field))
    return found


@cache
def leaves() -> Mapping[str, Leaf]:
    """Every leaf by its dotted key, in the order of the schema."""
    found: dict[str, Leaf] = {}

    def visit(section: str) -> None:
        for name, info in sections()[section].model_fields.items():
            key = join(section, name)
            if key in sections():
                visit(key)
            else:
                found[key] = Leaf(key=key, section=section, name=name, info=info)

    visit("")
    return found


def join(section: str, name: str) -> str:
    """Dotted key."""
    return f"{section}.{name}" if section else name


def shown(value: Any) -> str:
    """A value as a user would write it, cut to a readable length."""
    match value:
        case None:
            text = "null"
        case bool():
            text = "true" if value else "false"
        case float():
            text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        case tuple():
            text = repr(list(value))  # pyright: ignore[reportUnknownArgumentType]
        case _:
            text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
