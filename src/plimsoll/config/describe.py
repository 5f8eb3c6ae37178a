"""Every key of a recipe in words, generated from the models: what `plimsoll train --help` prints."""

import textwrap
from collections.abc import Mapping
from typing import Any

from plimsoll.config.presets import PRESETS
from plimsoll.config.schema import Leaf, leaves, sections, shown

WIDTH = 110


def describe_keys(presets: Mapping[str, Mapping[str, Any]] = PRESETS) -> str:
    """One paragraph a key: name, what it takes, default, description; under the section's own sentence."""
    lines: list[str] = []
    last = ""
    for key, leaf in leaves().items():
        if leaf.section != last:
            last = leaf.section
            # What pydantic would inherit from the base class is no description of this section.
            lines += ["", f"{last}: {(sections()[last].__doc__ or '').strip().splitlines()[0]}"]
        lines.append(f"  {key}  ({leaf.accepts}; {_default(leaf, presets)})")
        description = " ".join((leaf.info.description or "").split())
        lines += textwrap.wrap(description, width=WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines).lstrip("\n")


def _default(leaf: Leaf, presets: Mapping[str, Mapping[str, Any]]) -> str:
    if leaf.from_preset:
        values = ", ".join(f"{name}={shown(preset[leaf.name])}" for name, preset in presets.items())
        return f"set by the preset: {values}"
    if leaf.required:
        return "required"
    return f"default {shown(leaf.info.get_default(call_default_factory=True, validated_data={}))}"
