"""From the text of `reward.function` to the function. Runs in worker processes, each for itself."""

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from plimsoll.errors import RecipeError
from plimsoll.reward.rules import exact_match, number
from plimsoll.reward.signature import Function, describe

BUILT_IN: Mapping[str, Callable[..., Any]] = {"exact_match": exact_match, "number": number}


def load_function(spec: str, options: Mapping[str, Any]) -> Function:
    """The function that `spec` names: a built-in name, `package.module:function` or `file.py:function`.

    A file is relative to the current folder; it is loaded under a module name of its own, and its folder can be
    imported from, as if it were run as a script. Raises RecipeError, with the last line of what its import raised.
    """
    check_form(spec)
    if spec in BUILT_IN:
        return describe(spec, BUILT_IN[spec], options)
    where, _, attribute = spec.rpartition(":")
    module = _import(spec, where)
    members = vars(module)
    if attribute not in members:
        near = difflib.get_close_matches(attribute, [name for name, value in members.items() if callable(value)], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"reward.function: {where} has no function {attribute}{hint}")
    return describe(spec, members[attribute], options)


def check_form(spec: str) -> None:
    """Refuse what is neither a built-in name nor `where:function`, and a file that is not there (RecipeError)."""
    if spec in BUILT_IN:
        return
    where, colon, attribute = spec.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(spec, BUILT_IN, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise RecipeError(
            f"reward.function: {spec!r} is not a built-in name ({', '.join(BUILT_IN)}) and not of the form "
            f"package.module:function or file.py:function.{hint}"
        )
    if not where or not attribute.isidentifier():
        raise RecipeError(f"reward.function: {spec!r} should be package.module:function or file.py:function.")
    if where.endswith(".py") and not Path(where).is_file():
        raise RecipeError(f"reward.function: there is no file {where} (looked in {Path.cwd()}).")


def _import(spec: str, where: str) -> ModuleType:
    try:
        return _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except (Exception, SystemExit) as error:
        last_line = traceback.format_exception_only(error)[-1].strip()
        if isinstance(error, SyntaxError):
            last_line = f"{error.filename}, line {error.lineno}: {last_line}: {(error.text or '').strip()}"
        raise RecipeError(f"reward.function: {spec}: importing {where} failed: {last_line}") from error


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
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module
