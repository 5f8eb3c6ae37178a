"""Every key of a recipe as a Markdown page, generated from the models: docs/configuration.md."""

import re
from collections import defaultdict

from plimsoll.config.base import Section
from plimsoll.config.presets import PRESETS
from plimsoll.config.schema import Leaf, leaves, sections, shown

COMMAND = "make configuration-reference"
"""What writes the page anew."""

ENTRY = "NAME"
"""Stands for the user's own name in the keys of a table of sections, `reward.parts.NAME.weight`."""

HEAD = f"""\
<!-- Generated from src/plimsoll/config/ by `{COMMAND}`; edit the docstrings there, not this page. -->

# Configuration

A recipe is one YAML file. Every key below may stand in it, and every key can be given on the command line as
`section.key=value`, which wins over the file:

```
plimsoll train my.yaml train.learning_rate=2e-6 data.eval=null rollout.stop_token_ids=[2,7]
```

A value is written as in YAML. A key that is not below is refused, with the nearest one named; so is a value that its
key does not take. `recipe.json` in the run folder holds the whole recipe with every default filled in.
`plimsoll train --help` prints the same keys on the terminal.
"""

_CODE = re.compile(r"`([a-z][a-z_0-9.]*)`")


def configuration_markdown() -> str:
    """The whole page. Anchors: one a section (its heading) and one a key (`train-learning_rate`)."""
    blocks = [HEAD, _contents()]
    for name, section in sections().items():
        blocks.append(f"## {name or 'Top level'}\n\n{_sentence(section)}\n")
        blocks.append(_table([_row(leaf) for leaf in leaves().values() if leaf.section == name]))
        blocks += [_entries(table) for table in _tables(name)]
    return "\n".join(blocks)


def known_keys() -> frozenset[str]:
    """Every dotted key of a recipe, sections and the keys inside tables of sections (with `NAME`) included."""
    nested = [leaf.key for name in sections() for table in _tables(name) for leaf in table.of_entry(ENTRY).values()]
    return frozenset([*leaves(), *(name for name in sections() if name), *nested])


def anchor(key: str) -> str:
    """Anchor of a key on the page."""
    return key.replace(".", "-")


def _contents() -> str:
    links = [f"[{name or 'top level'}](#{_slug(name or 'Top level')})" for name in sections()]
    return f"Sections: {' · '.join(links)}\n"


def _slug(heading: str) -> str:
    """As GitHub and Python-Markdown make it of these headings."""
    return heading.lower().replace(".", "").replace(" ", "-")


def _sentence(section: type[Section]) -> str:
    # What pydantic would inherit from the base class is no description of this section.
    return " ".join((section.__doc__ or "").split())


def _table(rows: list[str]) -> str:
    return "\n".join(["| key | value | what it does |", "|---|---|---|", *rows]) + "\n"


def _row(leaf: Leaf) -> str:
    value = f"{leaf.accepts}<br>{_default(leaf)}"
    cells = (f'<a id="{anchor(leaf.key)}"></a>`{leaf.key}`', value, _linked(leaf))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _linked(leaf: Leaf) -> str:
    """The description, each key of the recipe in it a link to its row."""

    def link(match: re.Match[str]) -> str:
        key = match[1]
        known = key in leaves() and key != leaf.key
        return f"[`{key}`](#{anchor(key)})" if known and "." in key else match[0]

    return _CODE.sub(link, " ".join((leaf.info.description or "").split()))


def _default(leaf: Leaf) -> str:
    if leaf.from_preset:
        names: dict[str, list[str]] = defaultdict(list)
        for name, preset in PRESETS.items():
            names[shown(preset[leaf.name])].append(name)
        return "preset: " + ", ".join(f"`{value}` ({', '.join(by)})" for value, by in names.items())
    if leaf.required:
        return "**required**"
    return f"default `{shown(leaf.info.get_default(call_default_factory=True, validated_data={}))}`"


def _tables(section: str) -> list[Leaf]:
    """Keys of the section that map names of the user to sections."""
    return [leaf for leaf in leaves().values() if leaf.section == section and leaf.entry is not None]


def _entries(table: Leaf) -> str:
    assert table.entry is not None
    rows = [_row(leaf) for leaf in table.of_entry(ENTRY).values()]
    return f"### {table.key}.{ENTRY}\n\n{_sentence(table.entry)}\n\n{_table(rows)}"
