"""Which key did the user mean?"""

from difflib import SequenceMatcher

from plimsoll.config.aliases import ALIASES, KNOWN_ELSEWHERE
from plimsoll.config.schema import leaves, sections

CUTOFF = 0.6
"""Similarity (2·matches ÷ letters of both) below which a key is no help as a suggestion."""

OWN_SECTION_BONUS = 0.1
"""A key of the section that was typed wins over one that is only slightly nearer elsewhere."""


def nearest(section: str, name: str) -> list[str]:
    """Full keys that are near to `name` typed in `section`, best first; empty when nothing is near.

    A key of exactly that name in other sections comes first: it was right and stood in the wrong place.
    """
    known = {**sections(), **leaves()}
    if "." in name and name in known:
        return [name]  # `train.steps:` written as one YAML key
    exact = [leaf.key for leaf in leaves().values() if leaf.name == name]
    exact += [key for alias, key in ALIASES.items() if alias.rpartition(".")[2] == name]
    if exact:
        return exact[:3]
    if name.rpartition(".")[2] in KNOWN_ELSEWHERE:
        return [KNOWN_ELSEWHERE[name.rpartition(".")[2]]]
    ranked: list[tuple[float, str]] = []
    for key in known:
        if not key:
            continue
        parent, _, last = key.rpartition(".")
        score = _likeness(name, key if "." in name else last)
        if score >= CUTOFF:
            ranked.append((score + (OWN_SECTION_BONUS if parent == section else 0.0), key))
    ranked.sort(key=lambda pair: -pair[0])
    return [key for _, key in ranked[:1]]


def _likeness(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower()).ratio()
