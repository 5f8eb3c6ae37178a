"""YAML file + overrides → one frozen, complete `Recipe`, or every problem of both in one list.

In this order: read the file; lay overrides over it; rename aliases; check keys and the shape of sections against the
schema; fill in the algorithm's preset; validate the values. Nothing here imports torch or transformers.
"""

import difflib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from plimsoll.config.aliases import ALIASES
from plimsoll.config.presets import PRESETS
from plimsoll.config.recipe import Recipe
from plimsoll.config.schema import JSON_WORDS, Leaf, join, leaves, sections, shown
from plimsoll.config.source import COMMAND_LINE, Setting, as_text_keys, parse_overrides, read_file
from plimsoll.config.suggest import nearest
from plimsoll.errors import RecipeError


@dataclass(slots=True, kw_only=True, frozen=True)
class Loaded:
    """A valid recipe and what is worth saying about how it was written."""

    recipe: Recipe
    notes: tuple[str, ...]


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge and validate; notes (aliases in use) go to stderr. RecipeError holds every cause."""
    loaded = load(path, overrides)
    for note in loaded.notes:
        print(f"plimsoll: {note}", file=sys.stderr)
    return loaded.recipe


def load(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    presets: Mapping[str, Mapping[str, Any]] = PRESETS,
    aliases: Mapping[str, str] = ALIASES,
) -> Loaded:
    """Like `load_recipe`, but returns the notes. RecipeError holds every cause."""
    settings, causes = parse_overrides(overrides)
    reader = _Reader(file=str(path), aliases=aliases, causes=causes)
    settings = reader.rename_settings(settings)
    values = reader.lay_over(reader.rename_file(read_file(path)), settings)
    clean = reader.check_section("", values)
    _merge_preset(clean, presets, causes)
    recipe = _validate(clean, causes)
    if recipe is None or causes:
        raise RecipeError(causes)
    return Loaded(recipe=recipe, notes=tuple(reader.notes))


class _Reader:
    """One load: collects causes and notes, and remembers which keys came from the command line."""

    def __init__(self, *, file: str, aliases: Mapping[str, str], causes: list[str]) -> None:
        self.file = file
        self.aliases = aliases
        self.causes = causes
        self.notes: list[str] = []
        self.overridden: set[str] = set()

    def origin(self, key: str) -> str:
        """Where a key was written."""
        return COMMAND_LINE if key in self.overridden else f"in {self.file}"

    # Aliases are resolved file and command line apart, so that an override beats the file under either name.

    def rename_settings(self, settings: Sequence[Setting]) -> list[Setting]:
        """Overrides under the names that the keys have now."""
        typed = {".".join(setting.path) for setting in settings}
        return [
            Setting(path=tuple(self._renamed(".".join(s.path), typed, COMMAND_LINE).split(".")), value=s.value)
            for s in settings
        ]

    def rename_file(self, values: dict[str, Any]) -> dict[str, Any]:
        """The file's values under the names that the keys have now."""
        for alias, key in self.aliases.items():
            parent, _, name = alias.rpartition(".")
            section = _find(values, parent)
            if section is not None and name in section:
                typed = {alias, key} if _has(values, key) else {alias}
                target = self._renamed(alias, typed, f"in {self.file}")
                value = section[name]
                values = _without(values, alias.split("."))
                if len(typed) == 1:
                    values = _with(values, target.split("."), value)
        return values

    def _renamed(self, typed_key: str, typed: set[str], where: str) -> str:
        key = self.aliases.get(typed_key)
        if key is None:
            return typed_key
        if key in typed:
            self.causes.append(f"`{typed_key}` and `{key}` are one setting and both are set {where}: keep `{key}`")
        else:
            self.notes.append(f"`{typed_key}` is another name of `{key}` and will go away: write `{key}` {where}")
        return key

    def lay_over(self, values: dict[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
        """Overrides over the file, leaf by leaf; a mapping given for a section is laid over it too."""
        for setting in settings:
            for path, value in _leaf_settings(setting):
                self.overridden.update(".".join(path[: depth + 1]) for depth in range(len(path)))
                values = _with(values, path, value)
        return values

    def check_section(self, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The part of `values` that the schema knows; the rest becomes causes."""
        clean: dict[str, Any] = {}
        for name, value in values.items():
            key = join(section, name)
            if name not in sections()[section].model_fields:  # not `key`: `train.steps:` is one key in YAML
                self._unknown(section, name)
            elif key in sections():
                clean[name] = self._check_subsection(key, value)
            else:
                clean[name] = value
        for name in sections():  # a section left out is one with nothing set
            parent, _, last = name.rpartition(".")
            if name and parent == section:
                clean.setdefault(last, {})
        return clean

    def _check_subsection(self, key: str, value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return self.check_section(key, as_text_keys(cast(Mapping[Any, Any], value)))
        example = next(leaf for leaf in leaves() if leaf.startswith(f"{key}."))
        self.causes.append(
            f"`{key}` is a section and takes keys such as `{example}`, not {shown(value)} ({self.origin(key)}); "
            "leave it out to use the defaults"
        )
        return {}

    def _unknown(self, section: str, name: str) -> None:
        key = join(section, name)
        place = f"in section `{section}`" if section else "at the top level of a recipe"
        near = nearest(section, name)
        if near:
            advice = f"did you mean {' or '.join(f'`{candidate}`' for candidate in near)}?"
        else:
            known = [join(section, field) for field in sections()[section].model_fields]
            advice = f"it knows {', '.join(f'`{candidate}`' for candidate in known)}"
        self.causes.append(f"unknown key `{key}` {place} ({self.origin(key)}): {advice}")


def _leaf_settings(setting: Setting) -> list[tuple[tuple[str, ...], Any]]:
    """`train={steps: 2, epochs: 1}` is two settings; a free-form mapping such as data.task is one value."""
    key = ".".join(setting.path)
    if key not in sections() or not isinstance(setting.value, dict):
        return [(setting.path, setting.value)]
    inner = as_text_keys(cast(Mapping[Any, Any], setting.value))
    nested = (_leaf_settings(Setting(path=(*setting.path, name), value=value)) for name, value in inner.items())
    return [pair for pairs in nested for pair in pairs]


def _with(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of `values` with `value` at `path`. What stands in the way and is not a mapping is replaced when it is
    null and kept otherwise: it is wrong by itself and is reported."""
    head, *rest = path
    if not rest:
        return {**values, head: value}
    inner = values.get(head)
    if inner is not None and not isinstance(inner, dict):
        return dict(values)
    inner = as_text_keys(cast(Mapping[Any, Any], inner or {}))
    return {**values, head: _with(inner, rest, value)}


def _without(values: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    head, *rest = path
    if not rest:
        return {name: value for name, value in values.items() if name != head}
    return {**values, head: _without(values[head], rest)}


def _find(values: Mapping[str, Any], section: str) -> Mapping[str, Any] | None:
    """The mapping of a section as written, None where there is none."""
    found: Any = values
    for part in section.split(".") if section else []:
        if not isinstance(found, dict) or part not in found:
            return None
        found = cast(Any, found[part])
    return cast(Mapping[str, Any], found) if isinstance(found, dict) else None


def _has(values: Mapping[str, Any], key: str) -> bool:
    parent, _, name = key.rpartition(".")
    section = _find(values, parent)
    return section is not None and name in section


def _merge_preset(clean: dict[str, Any], presets: Mapping[str, Mapping[str, Any]], causes: list[str]) -> None:
    """Fill `algorithm` from its preset. An explicit leaf wins."""
    info = leaves()["algorithm.name"].info
    name: Any = clean["algorithm"].get("name", info.default)
    known = name in cast(Any, info.annotation).__args__ if isinstance(name, str) else False
    if known and name not in presets:
        causes.append(
            f"`algorithm.name`: {name} is not in this version; set `algorithm.name` to {_or(sorted(presets))}"
        )
    # With a name that has no preset the other leaves are still checked, on any preset.
    preset = presets[name] if known and name in presets else next(iter(presets.values()))
    clean["algorithm"] = {**preset, **clean["algorithm"]}


def _validate(clean: Mapping[str, Any], causes: list[str]) -> Recipe | None:
    """Pydantic decides what is valid; the words are ours, one cause a key."""
    problems: dict[str, str] = {}
    for leaf, value in _values(clean):
        if _not_a_number(leaf, value):
            problems[leaf.key] = _not_valid(leaf, leaf.key, value, f"it takes {leaf.accepts}")
    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(clean)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_context=False):
            key, problem = _problem(item)
            problems.setdefault(key, problem)
    causes.extend(problems.values())
    return recipe


def _values(clean: Mapping[str, Any]) -> Iterator[tuple[Leaf, Any]]:
    """Every leaf with what was given for it, the entries of tables leaf by leaf."""
    for leaf in leaves().values():
        section = _find(clean, leaf.section)
        value = None if section is None else section.get(leaf.name)
        yield leaf, value
        if leaf.entry is not None and isinstance(value, dict):
            for name, entry in cast(Mapping[Any, Any], value).items():
                if isinstance(entry, dict):
                    given = as_text_keys(cast(Mapping[Any, Any], entry))
                    yield from ((inner, given.get(field)) for field, inner in leaf.of_entry(str(name)).items())


def _not_a_number(leaf: Leaf, value: Any) -> bool:
    """What pydantic lets pass: `true` for 1, and infinity."""
    wrong_bool = isinstance(value, bool) and bool not in leaf.kinds
    return wrong_bool or (isinstance(value, float) and not math.isfinite(value))


def _problem(item: ErrorDetails) -> tuple[str, str]:
    """The key that one of pydantic's complaints is about, and our words for it.

    Its location goes on into lists, union members and the entries of tables.
    """
    location = [str(part) for part in item["loc"]]
    depth = next(depth for depth in range(1, len(location) + 1) if ".".join(location[:depth]) in leaves())
    leaf, rest = leaves()[".".join(location[:depth])], location[depth:]
    if leaf.entry is not None and rest:
        key = join(leaf.key, rest[0])
        if len(rest) == 1 or rest[1] == "[key]":
            of = "a text as name and " if rest[1:] else ""
            return key, _not_valid(leaf, key, item["input"], f"an entry of `{leaf.key}` takes {of}{leaf.fields}")
        if rest[1] not in leaf.of_entry(rest[0]):
            return join(key, rest[1]), _unknown_field(leaf, rest[0], rest[1])
        leaf, rest = leaf.of_entry(rest[0])[rest[1]], rest[2:]
    if item["type"] == "missing":
        return leaf.key, f"`{leaf.key}` is required{_within(leaf)}: {_sentence(leaf)}"
    if not (leaf.free_form and rest):
        return leaf.key, _not_valid(leaf, leaf.key, item["input"], f"it takes {leaf.accepts}")
    key = join(leaf.key, rest[0])
    takes = f"the keys of `{leaf.key}` are text" if rest[1:] == ["[key]"] else f"in `{leaf.key}` {JSON_WORDS}"
    return key, _not_valid(leaf, key, item["input"], takes)


def _not_valid(leaf: Leaf, key: str, value: Any, takes: str) -> str:
    return f"`{key}={shown(value)}` is not valid{_within(leaf)}: {takes}"


def _within(leaf: Leaf) -> str:
    """A key of an entry is named by the user; this names one that the schema knows."""
    return f" in an entry of `{leaf.table}`" if leaf.table else ""


def _unknown_field(table: Leaf, name: str, field: str) -> str:
    key = join(join(table.key, name), field)
    near = difflib.get_close_matches(field, table.of_entry(name), 1)
    if near:
        return (
            f"unknown key `{key}` in an entry of `{table.key}`: did you mean `{join(join(table.key, name), near[0])}`?"
        )
    return f"unknown key `{key}`: an entry of `{table.key}` takes {table.fields}"


def _sentence(leaf: Leaf) -> str:
    assert leaf.info.description, f"{leaf.key} has no description"
    return " ".join(leaf.info.description.split())


def _or(names: Sequence[str]) -> str:
    return " or ".join(f"`{name}`" for name in names)
