"""The scorers of reasoning-gym, for rows that `gym:NAME` made (extra `tasks`).

A response is text around an answer, and the scorers want the answer alone: it is taken out first. Each row carries its
item and the parameters of its generator in the column `gym`.
"""

import contextlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, cast

from plimsoll.config.base import Options
from plimsoll.errors import RecipeError
from plimsoll.reward.marks import last_marked
from plimsoll.reward.rules import bare_number, find_number

Extract = Literal["auto", "tag", "boxed", "last_line", "last_number", "whole"]

EXTRACT: tuple[Extract, ...] = ("auto", "tag", "boxed", "last_line", "last_number", "whole")

CONSOLATION = 0.06
"""Many scorers give 0.01 to 0.05 for any answer at all, right or not. Below this the score is 0."""

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_END_OF_THOUGHT = "</think>"


def reasoning_gym(
    prompt: str,
    response: str,
    answer: object,
    *,
    gym: Mapping[str, Any] | None = None,
    extract: Extract = "auto",
    minimum: float = CONSOLATION,
) -> float:
    r"""The task's own score of the answer in the response, from 0 to 1.

    `extract` says where the answer stands; text up to `</think>` is never looked at.
      auto         the last `<answer>…</answer>`; else the last of `\boxed{}`, `####`, `Answer: …`; else everything.
                   Where the row's answer is a number, the number in it, by value: "42." and "1,000" are read as 42
                   and 1000, and of a whole response without a mark the last number counts.
      tag, boxed   only there; without one the score is 0.
      last_line    the last line with something in it.
      last_number  as `number` finds it.
      whole        the response, white space around it aside.
    Scores below `minimum` become 0; with `minimum` 1 only full marks count.
    Raises ValueError for a row that `gym:NAME` did not make.
    """
    if gym is None or not {"task", "config", "item"} <= gym.keys():
        raise ValueError(
            "reasoning_gym scores rows of data.train=gym:NAME, and this row has not the column `gym` that they carry; "
            "for other rows set reward.function to another rule"
        )
    given = extracted(response, extract, answer)
    if given is None:
        return 0.0
    item = decode(json.loads(gym["item"]))
    scorer = _scorer(gym["task"], json.dumps(gym["config"], sort_keys=True))
    with contextlib.redirect_stdout(sys.stderr):
        try:
            score = float(scorer.score_answer(given, item))
        except Exception:  # scorers parse what they are given and let any parser's error through: not an answer
            return 0.0
    return score if score >= minimum else 0.0


def check_options(options: Options) -> None:
    """Raises RecipeError for a way to extract that does not exist and a minimum outside 0 … 1."""
    causes: list[str] = []
    extract, minimum = options.get("extract", "auto"), options.get("minimum", CONSOLATION)
    if extract not in EXTRACT:
        causes.append(f"reward.options.extract={extract!r} is none of {', '.join(EXTRACT)}")
    if isinstance(minimum, bool) or not isinstance(minimum, int | float) or not 0 <= minimum <= 1:
        causes.append(f"reward.options.minimum={minimum!r}: a number from 0 to 1")
    if "gym" in options:
        causes.append("reward.options.gym comes from the row and cannot be set")
    if causes:
        raise RecipeError(causes)


def extracted(response: str, extract: Extract, answer: object) -> str | None:
    """The answer in the response, or None. `answer` is the row's, which tells whether a number is looked for."""
    text = response.rpartition(_END_OF_THOUGHT)[2]
    tags = _TAG.findall(text)
    match extract:
        case "tag":
            return tags[-1].strip() if tags else None
        case "boxed":
            found = last_marked(text.replace("####", ""))  # the other mark that it knows
            return None if found is None else found.strip()
        case "last_line":
            return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)
        case "last_number":
            return _number(tags[-1] if tags else text, answer)
        case "whole":
            return text.strip()
        case "auto":
            marked = tags[-1] if tags else last_marked(text, answer_lines=True)
            found = (text if marked is None else marked).strip()
            if isinstance(answer, str) and bare_number(answer) is not None and found != answer:
                return _number(found, answer) or found
            return found


def _number(text: str, answer: object) -> str | None:
    """The number of the text; spelled as the answer where both are equal, because scorers compare spellings."""
    value = find_number(text)
    if value is None:
        return None
    return answer if isinstance(answer, str) and value == bare_number(answer) else str(value)


def decode(value: Any) -> Any:
    """The Python value that `plimsoll.data.gym.encode` wrote: {"$": kind, "of": […]} are tuples, sets and mappings."""
    if isinstance(value, list):
        return [decode(entry) for entry in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    entries = cast(dict[str, Any], value)
    if "$" not in entries:
        return {key: decode(entry) for key, entry in entries.items()}
    of = decode(entries["of"])
    kinds: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}
    return kinds[entries["$"]](of)


@lru_cache(maxsize=128)
def _scorer(task: str, config: str) -> Any:
    """The generator with its parameters, on which scores depend in some tasks. Kept, because some load files."""
    create = vars(importlib.import_module("reasoning_gym"))["create_dataset"]
    return create(task, **decode(json.loads(config)), seed=0, size=1)
