"""Output of `plimsoll plan` that pages show: what the command prints today.

A block begins with `$ plimsoll plan …`. Behind it stands all of the output, or some of its sections (they are separated
by empty lines), with `…` for what was left out.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

from plimsoll.cli import main

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs" / "memory.md", ROOT / "README.md")
COMMAND = "python tools/refresh_plan_examples.py"

_BLOCK = re.compile(r"^```\n(\$ plimsoll plan .*?)^```$", re.M | re.S)
_OMITTED = "…"


def refreshed(page: str) -> str:
    """The page with its examples as they are printed today. Runs in the top folder of the repository."""
    return _BLOCK.sub(lambda block: f"```\n{''.join(_examples(block[1]))}```", page)


def _examples(block: str) -> Iterator[str]:
    """Of each command, itself and its lines."""
    for example in re.split(r"^(?=\$ )", block, flags=re.M)[1:]:
        command, _, shown = example.partition("\n")
        printed = _sections(_output(command.removeprefix("$ plimsoll ").split()))
        yield f"{command}\n"
        yield from (f"{line}\n" for line in _like(shown.rstrip("\n").split("\n"), printed))


def _output(arguments: list[str]) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main(arguments)
    assert code in (0, 2), arguments
    return text.getvalue()


def _sections(text: str) -> list[list[str]]:
    return [section.split("\n") for section in text.rstrip("\n").split("\n\n")]


def _like(shown: list[str], printed: list[list[str]]) -> Iterator[str]:
    """Those of the printed sections that are shown, found by the first words of their first line."""
    if _OMITTED not in shown:
        yield from "\n\n".join("\n".join(section) for section in printed).split("\n")
        return
    parts: list[list[str]] = [[]]
    for line in shown:
        if line == _OMITTED:
            parts.append([])
        else:
            parts[-1].append(line)
    for number, part in enumerate(parts):
        if number:
            yield _OMITTED
        if part:
            heads = [section[0] for section in _sections("\n".join(part))]
            found = [_section(head, printed) for head in heads]
            yield from "\n\n".join("\n".join(section) for section in found).split("\n")


def _section(head: str, printed: list[list[str]]) -> list[str]:
    same = [section for section in printed if section[0].split()[:2] == head.split()[:2]]
    assert same, f"no section of the output begins like {head!r}"
    return same[0]
