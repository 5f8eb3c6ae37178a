"""docs/algorithms.md shows what the presets really are."""

import json
import re
from pathlib import Path
from typing import Any

from plimsoll.config.presets import PRESETS

DOCS = Path(__file__).parents[3] / "docs" / "algorithms.md"


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_the_table_of_presets_is_true() -> None:
    (body,) = re.findall(r"^## Presets$(.*?)(?=^## )", DOCS.read_text(encoding="utf-8"), flags=re.M | re.S)
    head, _, *rows = [re.findall(r"`([^`]+)`", line) for line in body.splitlines() if line.startswith("|")]
    table = {leaf: dict(zip(head, values, strict=True)) for leaf, *values in rows}
    leaves = {leaf for preset in PRESETS.values() for leaf in preset}
    assert table == {leaf: {name: shown(preset[leaf]) for name, preset in PRESETS.items()} for leaf in leaves}
