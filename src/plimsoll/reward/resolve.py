"""The early check of the reward, in a process that lives only for it.

The driver never imports a user's module: workers get the functions' names and load them themselves (compose.py).
"""

import time
from collections.abc import Iterable
from pathlib import Path

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import DataError, RecipeError
from plimsoll.reward.compose import RewardSpec, RuleSpec, load_reward, reward_spec
from plimsoll.reward.load import BUILT_IN, BY_SOURCE, check_form
from plimsoll.reward.process import WorkerProcess, start_limit
from plimsoll.reward.signature import Kind
from plimsoll.reward.sources import BUILT_IN_SOURCES, find_source
from plimsoll.reward.worker import Ready, StartFailed

_SHOWN_SOURCES = 10

_checked: dict[str, Ready] = {}
"""The answer to the last check that went well, by the reward it was about: the same command asks again for the kind."""


def check_function(config: RewardConfig) -> None:
    """Raise RecipeError, with all causes, unless every function that `reward` names can be imported and called.

    Covers `reward.function` or all of `reward.parts`, and `reward.sources`, with their options. Imports them in a child
    process, for at most 30 s or `reward.timeout`, whichever is longer.
    """
    _checked.clear()
    _checked[_key(config)] = _check(config)


def function_kind(config: RewardConfig) -> Kind:
    """Whose signature the function has; TRL's where any of several has it. Raises as `check_function` does."""
    return _ready(config).kind


def needs_answer(config: RewardConfig) -> bool:
    """False where rows need no answer, because all functions have TRL's signature. Raises as `check_function` does."""
    return _ready(config).needs_answer


def check_sources(config: RewardConfig, sources: Iterable[str]) -> None:
    """Refuse rows that `by_source` cannot score, given the `data_source` of each: DataError where there is no function
    for it, RecipeError where the built-in rule for it needs an extra that is not installed."""
    spec = reward_spec(config)
    if not spec.by_source:
        return
    count: dict[str, int] = {}
    for source in sources:
        if find_source(spec.sources, source) is None:
            count[source] = count.get(source, 0) + 1
    names = {source: find_source(BUILT_IN_SOURCES, source) for source in count}
    unknown = [source for source, name in names.items() if name is None]
    if unknown:
        shown = ", ".join(f"{source!r} ({count[source]} rows)" for source in unknown[:_SHOWN_SOURCES])
        more = f" and {len(unknown) - _SHOWN_SOURCES} more" if len(unknown) > _SHOWN_SOURCES else ""
        raise DataError(
            f"{BY_SOURCE} has no function for {len(unknown)} data_source of {sum(count[s] for s in unknown)} rows: "
            f"{shown}{more}; name one for each in reward.sources (a * at the end of its name stands for anything)"
        )
    rules = [
        RuleSpec(setting=f"data_source {source!r}, reward", function=name, options={})
        for source, name in names.items()
        if name is not None
    ]
    wrong = _wrong_forms({rule.function: rule for rule in reversed(rules)}.values())
    if wrong:
        raise RecipeError([cause for causes in wrong.values() for cause in causes])


def _wrong_forms(rules: Iterable[RuleSpec]) -> dict[str, tuple[str, ...]]:
    """What can be refused without importing anything: setting → causes."""
    wrong: dict[str, tuple[str, ...]] = {}
    for rule in rules:
        try:
            check_form(rule.function, setting=rule.setting)
        except RecipeError as error:
            wrong[rule.setting] = error.causes
    return wrong


def _key(config: RewardConfig) -> str:
    return f"{Path.cwd()} {config.model_dump_json()}"  # files and modules are looked for in the current folder


def _ready(config: RewardConfig) -> Ready:
    if _key(config) not in _checked:
        check_function(config)
    return _checked[_key(config)]


def _check(config: RewardConfig) -> Ready:
    spec = reward_spec(config)
    wrong = _wrong_forms(spec.rules)
    causes = [cause for causes in wrong.values() for cause in causes]
    right = spec.without(wrong)
    try:
        ready = _load(right, start_limit(config.timeout))
    except RecipeError as error:
        causes.extend(error.causes)
        raise RecipeError(causes) from error
    if causes:
        raise RecipeError(causes)
    return ready


def _load(spec: RewardSpec, limit: float) -> Ready:
    if all(rule.function == BY_SOURCE or _is_light(rule.function) for rule in spec.rules):
        reward = load_reward(spec)
        return Ready(kind=reward.kind, needs_answer=reward.needs_answer)
    return _ask(spec, limit)


def _is_light(function: str) -> bool:
    return function in BUILT_IN and BUILT_IN[function].light


def _ask(spec: RewardSpec, limit: float) -> Ready:
    deadline = time.monotonic() + limit
    process = WorkerProcess(spec, guard=None)
    message: object = None
    try:
        # A child that the module forked may hold the pipe open, so the end of the process is looked at as well.
        while message is None and time.monotonic() < deadline:
            gone = process.dead
            if process.connection.poll(0.0 if gone else 0.1):
                message = process.connection.recv()
            elif gone:
                break
    except (EOFError, ConnectionResetError):
        message = None
    finally:
        timed_out = not process.dead and time.monotonic() >= deadline
        ended = process.end()
    if isinstance(message, Ready):
        return message
    if isinstance(message, StartFailed):
        raise RecipeError(message.reasons)
    if timed_out:
        raise RecipeError(
            f"{spec.subject}: importing it took more than {limit:g} s; a longer reward.timeout allows it."
        )
    raise RecipeError(f"{spec.subject}: the process that imported it ended with {ended}.")
