"""From the text of `reward.function` to the function. Runs in worker processes, each for itself."""

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from plimsoll.config.extras import how_to_install, installed
from plimsoll.errors import RecipeError
from plimsoll.reward.signature import Function, describe

BY_SOURCE = "by_source"
"""The name that is no function: the row's data_source picks one (see compose.py)."""


@dataclass(slots=True, kw_only=True, frozen=True)
class BuiltIn:
    """Where a built-in rule is found; its module is imported only where the rule is used.

    The module may have `check_options(options)`, which raises ValueError or RecipeError for values that cannot be used.
    """

    module: str
    function: str
    extra: str | None = None  # of this package: what brings `requires`
    requires: str | None = None  # top-level module of another package
    light: bool = False  # imports the standard library only: the driver checks it without a process


_RULES = "plimsoll.reward.rules"

BUILT_IN: Mapping[str, BuiltIn] = {
    "exact_match": BuiltIn(module=_RULES, function="exact_match", light=True),
    "number": BuiltIn(module=_RULES, function="number", light=True),
    "math": BuiltIn(module="plimsoll.reward.math_rule", function="math", extra="math", requires="math_verify"),
    "choice": BuiltIn(module="plimsoll.reward.choice", function="choice"),
    "regex": BuiltIn(module="plimsoll.reward.pattern", function="regex"),
    "json_schema": BuiltIn(module="plimsoll.reward.json_rule", function="json_schema"),
    "code": BuiltIn(module="plimsoll.reward.code", function="code"),
    "http": BuiltIn(module="plimsoll.reward.http", function="http"),
    "reasoning_gym": BuiltIn(
        module="plimsoll.reward.gym", function="reasoning_gym", extra="tasks", requires="reasoning_gym"
    ),
}

NAMES = (*BUILT_IN, BY_SOURCE)
"""What `reward.function` takes without a colon."""


def load_function(spec: str, options: Mapping[str, Any], *, setting: str = "reward") -> Function:
    """The function that `spec` names: a built-in name, `package.module:function` or `file.py:function`.

    A file is relative to the current folder; it is loaded under a module name of its own, and its folder can be
    imported from, as if it were run as a script. Raises RecipeError, with the last line of what its import raised;
    `setting` is the section of `function` and `options` in its text.
    """
    check_form(spec, setting=setting)
    if spec in BUILT_IN:
        return _built_in(spec, options, setting)
    where, _, attribute = spec.rpartition(":")
    module = _import(spec, where, setting)
    members = vars(module)
    if attribute not in members:
        near = difflib.get_close_matches(attribute, [name for name, value in members.items() if callable(value)], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"{setting}.function: {where} has no function {attribute}{hint}")
    return describe(spec, members[attribute], options, setting=setting)


def check_form(spec: str, *, setting: str = "reward") -> None:
    """Refuse what is neither a built-in name nor `where:function`, a file that is not there, and a built-in name whose
    extra is not installed (RecipeError). Imports nothing."""
    if spec in NAMES:
        _check_installed(spec, setting)
        return
    where, colon, attribute = spec.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(spec, NAMES, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise RecipeError(
            f"{setting}.function: {spec!r} is not a built-in name ({', '.join(NAMES)}) and not of the form "
            f"package.module:function or file.py:function.{hint}"
        )
    if not where or not attribute.isidentifier():
        raise RecipeError(f"{setting}.function: {spec!r} should be package.module:function or file.py:function.")
    if where.endswith(".py") and not Path(where).is_file():
        raise RecipeError(f"{setting}.function: there is no file {where} (looked in {Path.cwd()}).")


def _check_installed(name: str, setting: str) -> None:
    rule = BUILT_IN.get(name)
    if rule is not None and rule.requires is not None and not installed(rule.requires):
        raise RecipeError(
            f"{setting}.function: {name} needs {rule.requires}, which is not installed: "
            f"{how_to_install(str(rule.extra))}"
        )


_FROM_ROWS = frozenset({"data_source", "gym"})
"""Parameters of built-in rules that a row's columns fill."""


def _built_in(name: str, options: Mapping[str, Any], setting: str) -> Function:
    rule = BUILT_IN[name]
    members = vars(_import(name, rule.module, setting))
    function = describe(name, members[rule.function], options, setting=setting)
    # A column that happens to be called `url` or `memory` is data; it must not change how a rule works.
    function = replace(function, settings=function.parameters - _FROM_ROWS)
    if "check_options" in members:
        _check_values(members["check_options"], function, setting)
    return function


def _check_values(check: Any, function: Function, setting: str) -> None:
    try:
        check(function.options)
    except RecipeError as error:
        # A rule does not know where in the recipe it stands.
        texts = [cause.removeprefix("reward.options").removeprefix(": ") for cause in error.causes]
        raise RecipeError([f"{setting}.options{'' if text[:1] == '.' else ': '}{text}" for text in texts]) from error
    except ValueError as error:
        raise RecipeError(f"{setting}.options: {error}") from error


def _import(spec: str, where: str, setting: str) -> ModuleType:
    try:
        return _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except (Exception, SystemExit) as error:
        last_line = traceback.format_exception_only(error)[-1].strip()
        if isinstance(error, SyntaxError):
            last_line = f"{error.filename}, line {error.lineno}: {last_line}: {(error.text or '').strip()}"
        raise RecipeError(f"{setting}.function: {spec}: importing {where} failed: {last_line}") from error


def _import_module(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # the console script's path lacks the current folder; searched last
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # A name of its own: `math.py` or `types.py` of a user must not take the place of the library's.
    name = f"plimsoll_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:  # another part of the reward is in the same file
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
