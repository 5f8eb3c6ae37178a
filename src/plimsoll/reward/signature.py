"""The three signatures of a reward function, told apart by the names of their parameters."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from plimsoll.errors import RecipeError

ACCEPTED = (
    "(prompt, response, answer, **extra) -> float | None",
    "compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict (verl)",
    "f(prompts, completions, **columns) -> list (TRL)",
)


class Kind(StrEnum):
    """Whose signature a reward function has."""

    OURS = "ours"
    VERL = "verl"
    TRL = "trl"


_REQUIRED: Mapping[Kind, frozenset[str]] = {
    Kind.OURS: frozenset({"response"}),
    Kind.VERL: frozenset({"solution_str", "ground_truth"}),
    Kind.TRL: frozenset({"completions"}),
}
"""Names that a function of this kind has; a function that has those of two kinds is refused."""

_RESERVED: Mapping[Kind, frozenset[str]] = {
    Kind.OURS: frozenset({"prompt", "response", "answer"}),
    Kind.VERL: frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
    Kind.TRL: frozenset({"prompts", "completions", "answer"}),
}
"""Names that the row or the response fills; `reward.options` may not set them."""

_NEVER_GIVEN = frozenset({"completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric", "environments"})
"""Arguments of TRL's trainer that do not exist here."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Function:
    """A reward function, ready to be called in a worker process."""

    name: str  # as in the recipe
    call: Callable[..., Any]
    kind: Kind
    parameters: frozenset[str]  # names that can be passed by keyword
    takes_rest: bool  # has **kwargs
    options: Mapping[str, Any]
    settings: frozenset[str] = frozenset()  # parameters that only `options` may fill, never a column of the row

    def accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that the function can take."""
        return {key: value for key, value in arguments.items() if self.takes_rest or key in self.parameters}


def describe(name: str, target: Any, options: Mapping[str, Any], *, setting: str = "reward") -> Function:
    """Find the signature of `target`. Raises RecipeError when it is none of the three, or two of them at once.

    `setting` is the section of `function` and `options` in the recipe.
    """
    _check_callable(name, target, setting)
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError) as error:
        raise _unsupported(setting, name, f"it has no signature that Python can read ({error})") from error
    values = signature.parameters.values()
    if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in values):
        raise _unsupported(setting, name, f"found {signature}, and positional-only parameters cannot be passed by name")
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = frozenset(p.name for p in values if p.kind in by_name)
    kinds = [kind for kind, required in _REQUIRED.items() if required <= parameters]
    if len(kinds) != 1:
        reason = "which is two signatures at once" if kinds else "which is none of them"
        raise _unsupported(setting, name, f"found {signature}, {reason}")
    needed = frozenset(p.name for p in values if p.kind in by_name and p.default is inspect.Parameter.empty)
    missing = sorted((needed & _NEVER_GIVEN) - options.keys())
    if missing:
        raise _unsupported(
            setting, name, f"found {signature}, and {', '.join(missing)} is not given to reward functions here"
        )
    function = Function(
        name=name,
        call=target,
        kind=kinds[0],
        parameters=parameters,
        takes_rest=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in values),
        options=dict(options),
    )
    _check_options(function, setting)
    return function


def _check_callable(name: str, target: Any, setting: str) -> None:
    if not callable(target):
        raise RecipeError(f"{setting}.function: {name} is a {type(target).__name__}, not a function.")
    if inspect.isclass(target):
        raise RecipeError(f"{setting}.function: {name} is a class; name a function, or an instance that can be called.")
    if inspect.iscoroutinefunction(target):
        raise RecipeError(
            f"{setting}.function: {name} is async; reward functions are called one after another: use def."
        )
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise RecipeError(f"{setting}.function: {name} is a generator (it has yield); it must return its value.")


def _check_options(function: Function, setting: str) -> None:
    reserved = sorted(function.options.keys() & _RESERVED[function.kind])
    if reserved:
        raise RecipeError(
            f"{setting}.options: {', '.join(reserved)} comes from the row or the response and cannot be set there."
        )
    if function.takes_rest:
        return
    unknown = sorted(function.options.keys() - function.parameters)
    if unknown:
        takes = ", ".join(sorted(function.parameters - _RESERVED[function.kind])) or "no options"
        raise RecipeError(f"{setting}.options: {function.name} does not take {', '.join(unknown)}; it takes {takes}.")


def _unsupported(setting: str, name: str, found: str) -> RecipeError:
    return RecipeError(f"{setting}.function: {name}: {found}. Accepted by parameter names: {'; '.join(ACCEPTED)}.")
