"""What counts as a reward.

accepted   bool, int, float, numpy scalars, 0-d arrays and tensors; all must be finite
None       not scored
rejected   everything else, by the name of its type: text, lists, dicts, generators, NaN, infinity
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable


class NotARewardError(Exception):
    """A returned value that is not a reward; the message says what came."""


@runtime_checkable
class _Array(Protocol):
    """What numpy's and torch's arrays have in common; neither is imported for this."""

    @property
    def ndim(self) -> int: ...

    def item(self) -> Any: ...

    def tolist(self) -> Any: ...


def to_reward(value: object) -> float | None:
    """The value as a float; None stays None. Raises NotARewardError."""
    if value is None:
        return None
    if isinstance(value, _Array) and not isinstance(value, type) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise NotARewardError(f"returned {_name(value)}; a reward is one finite number, or None for not scored")
    try:
        number = float(value)
    except OverflowError as error:
        raise NotARewardError("returned an integer that is too large for a float") from error
    if not math.isfinite(number):
        raise NotARewardError(f"returned {number}; a reward is one finite number, or None for not scored")
    return number


def to_list(values: object) -> list[object]:
    """The values of a call for several responses: a list, a tuple or a 1-d array. Raises NotARewardError."""
    if isinstance(values, list | tuple):
        return list(cast("list[object] | tuple[object, ...]", values))
    if isinstance(values, _Array) and not isinstance(values, type) and values.ndim == 1:
        return list(values.tolist())
    raise NotARewardError(f"returned {_name(values)} instead of a list with one reward a response")


def to_parts(values: Mapping[Any, object]) -> dict[str, float]:
    """The finite numbers among the entries of a returned dict, its score aside."""
    parts: dict[str, float] = {}
    for key, value in values.items():
        if key == "score" or value is None:
            continue
        try:
            part = to_reward(value)
        except NotARewardError:
            continue  # texts and lists in verl's dicts are notes, not numbers
        assert part is not None
        parts[str(key)] = part
    return parts


def _name(value: object) -> str:
    shape = f" of {value.ndim} dimensions" if isinstance(value, _Array) and not isinstance(value, type) else ""
    text = repr(value)
    return f"{type(value).__name__}{shape} {text if len(text) <= 60 else text[:57] + '...'}"
