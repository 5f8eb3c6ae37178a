"""Calling a reward function: the arguments of each signature, and what became of the call. Runs in worker processes."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from plimsoll.reward.signature import Function, Kind
from plimsoll.reward.values import NotARewardError, to_list, to_parts, to_reward
from plimsoll.types import ScoreRequest

_DETAIL_CHARACTERS = 8000
"""Tracebacks are cut to their last characters: deep recursion prints thousands of lines."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Outcome:
    """What a worker says about one response; the fields are those of Score."""

    value: float | None
    status: str
    detail: str = ""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])


class BrokenContractError(Exception):
    """The function is wrong for every response alike: the run stops at once."""


def score_alone(function: Function, request: ScoreRequest) -> Outcome:
    """One response by a function of any signature. BrokenContractError: TRL's returned a wrong number of values."""
    if function.kind is Kind.TRL:
        outcomes = score_together(function, [request])
        assert outcomes is not None
        return outcomes[0]
    arguments = _ours(function, request) if function.kind is Kind.OURS else _verl(function, request)
    try:
        returned = function.call(**arguments)
    except BaseException as error:  # SystemExit too: a user's sys.exit() is a failure of this response, not of the pool
        return _failure(error)
    return _outcome(function, returned)


def score_together(function: Function, requests: Sequence[ScoreRequest]) -> list[Outcome] | None:
    """One call of a function of TRL's signature for all the requests.

    None when it raised and there are several of them: then it is not known whose fault it was.
    Raises BrokenContractError for a wrong number of values.
    """
    try:
        returned = function.call(**_trl(function, requests))
    except BaseException as error:
        return [_failure(error)] if len(requests) == 1 else None
    try:
        values = to_list(returned)
    except NotARewardError as error:
        raise BrokenContractError(f"{function.name} {error}") from error
    if len(values) != len(requests):
        raise BrokenContractError(f"{function.name}: expected {len(requests)} rewards, got {len(values)}")
    return [_outcome(function, value) for value in values]


def _outcome(function: Function, returned: object) -> Outcome:
    parts: Mapping[str, float] = {}
    try:
        if function.kind is not Kind.TRL and isinstance(returned, Mapping):
            entries = cast("Mapping[Any, object]", returned)
            if "score" not in entries:
                raise NotARewardError(f"returned a dict without 'score' (it has {', '.join(map(str, entries))})")
            parts = to_parts(entries)
            returned = entries["score"]
        value = to_reward(returned)
    except NotARewardError as error:
        return Outcome(value=None, status="error", detail=f"{function.name} {error}")
    return Outcome(value=value, status="unscored" if value is None else "ok", parts=parts)


def _failure(error: BaseException) -> Outcome:
    # Our own frame says nothing to the author of the function; it stays only where there is no other.
    frames = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return Outcome(value=None, status="error", detail=text[-_DETAIL_CHARACTERS:])


def _ours(function: Function, request: ScoreRequest) -> dict[str, Any]:
    columns = {name: value for name, value in _columns(request).items() if name not in function.settings}
    return function.accepted(
        columns
        | dict(function.options)
        | {"prompt": request.prompt, "response": request.response, "answer": request.answer}
    )


def _verl(function: Function, request: ScoreRequest) -> dict[str, Any]:
    return function.accepted(
        dict(function.options)
        | {
            "data_source": request.data_source,
            "solution_str": request.response,
            "ground_truth": request.answer,
            "extra_info": request.extra.get("extra_info", request.extra),
        }
    )


def _trl(function: Function, requests: Sequence[ScoreRequest]) -> dict[str, Any]:
    rows = [_columns(request) for request in requests]
    names = dict.fromkeys(name for row in rows for name in row)
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    return function.accepted(
        columns
        | dict(function.options)
        | {
            "answer": [request.answer for request in requests],
            "prompts": [r.prompt if r.plain else [dict(m) for m in r.messages] for r in requests],
            "completions": [r.response if r.plain else [_assistant(r.response)] for r in requests],
        }
    )


def _columns(request: ScoreRequest) -> dict[str, Any]:
    """The row's other columns by name."""
    return {"data_source": request.data_source, **request.extra}


def _assistant(response: str) -> dict[str, str]:
    return {"role": "assistant", "content": response}
