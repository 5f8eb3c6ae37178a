"""The rule `code`: the response holds a program, and the program passes the row's tests, in a sandbox."""

import json
import math
import re
import secrets
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from plimsoll.config.base import Options
from plimsoll.errors import RecipeError
from plimsoll.reward import code_child
from plimsoll.reward.code_tests import Asserting, Printing, Returning, Test, passes, read_tests, returns
from plimsoll.reward.sandbox import FEATURES, PYTHON, Limits, Result, SandboxError, isolation, run_program

_FENCE = re.compile(r"[ \t]*```[ \t]*([\w+-]*)[ \t]*\r?")
_PYTHON_FENCES = frozenset({"", "python", "python3", "py"})
_HARNESS = "harness.py"
_MEMORY = "512MiB"
_START_SECONDS = 20.0
_RESULT_BYTES = 2048
"""Room for the line with the result, besides what a program may print."""


def code(
    prompt: str,
    response: str,
    answer: object,
    *,
    language: str = "python",
    time_limit: float = 5.0,
    memory: int | str = _MEMORY,
    max_output: int = 65536,
    max_processes: int = 16,
    max_tests: int | None = None,
    share: bool = False,
    strict: bool = False,
    right: float = 1.0,
    wrong: float = 0.0,
) -> float:
    """`right` where the response's program passes all tests of the row, else `wrong`.

    The program is the last ```python block (or one without a language); without one the whole response, or nothing
    with `strict`. Tests: see code_tests.py. Each is a run of its own of at most `time_limit` seconds, `memory` bytes
    ("512MiB") and `max_processes` processes and threads altogether, and `max_output` bytes of output; the first that
    fails ends it. `share`: all are run, and the score lies between `wrong` and `right` by the share that passed.
    `max_tests`: only the first so many. `reward.timeout` has to be longer than all tests of a row together.
    Raises ValueError for an answer without tests, SandboxError where a program cannot be started.
    """
    tests = read_tests(answer)[:max_tests]
    if not share:
        tests = _together(tests)
    program = find_program(response, strict=strict)
    if program is None:
        return wrong
    _say_what_is_missing()
    limits = Limits(
        seconds=time_limit, memory=_bytes(memory), output=max_output + _RESULT_BYTES, processes=max_processes
    )
    if not share:
        return right if all(_passes(program, test, limits) for test in tests) else wrong
    return wrong + (right - wrong) * sum(_passes(program, test, limits) for test in tests) / len(tests)


def check_options(options: Options) -> None:
    """Raises RecipeError for limits that are none, another language, and a machine where no program can be started."""
    causes: list[str] = []
    if options.get("language", "python") != "python":
        causes.append(f"reward.options.language: {options['language']!r} is not python, the only one that there is.")
    try:
        _bytes(options.get("memory", _MEMORY))
    except ValidationError:
        causes.append(f"reward.options.memory: {options['memory']!r} is not a size such as 512MiB.")
    for name in ("time_limit", "max_output", "max_processes", "max_tests"):
        value = options.get(name, 1)
        if name == "max_tests" and value is None:
            continue
        kinds = (int, float) if name == "time_limit" else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            causes.append(f"reward.options.{name}: {value!r} should be a number above 0.")
    if not causes:
        causes = _start_one(options)
    if causes:
        raise RecipeError(causes)


def _start_one(options: Options) -> list[str]:
    """What hinders an empty program: every response would be wrong."""
    memory = options.get("memory", _MEMORY)
    try:
        result = run_program([*PYTHON, "-c", ""], limits=Limits(seconds=_START_SECONDS, memory=_bytes(memory)))
    except SandboxError as error:
        return [f"reward.options: code: {error}"]
    if result.status != "ok":
        return [f"reward.options.memory: {memory} is too little for Python itself; it ended with {result.status}."]
    return []


def find_program(response: str, *, strict: bool) -> str | None:
    """The last closed block of Python; else the response, or None with `strict`."""
    program: str | None = None
    language: str | None = None  # of the block we are in
    lines: list[str] = []
    for line in response.split("\n"):
        fence = _FENCE.fullmatch(line)
        if language is None:
            if fence is not None:
                language, lines = fence[1].lower(), []
        elif fence is not None and not fence[1]:
            if language in _PYTHON_FENCES:
                program = "\n".join(lines) + "\n"
            language = None
        else:
            lines.append(line)
    return response if program is None and not strict else program


def _together(tests: tuple[Test, ...]) -> tuple[Test, ...]:
    """Asserts that are all to pass need one run only."""
    if not all(isinstance(test, Asserting) for test in tests):
        return tests
    return (Asserting(source="\n".join(test.source for test in tests if isinstance(test, Asserting))),)


def _passes(program: str, test: Test, limits: Limits) -> bool:
    if isinstance(test, Printing):
        result = run_program([*PYTHON, "program.py"], stdin=test.stdin, files={"program.py": program}, limits=limits)
        return result.status == "ok" and passes(test, result.stdout.decode("utf-8", "replace"))
    token = secrets.token_hex(16)
    task = code_child.Task(
        token=token,
        program=program,
        tests=test.source if isinstance(test, Asserting) else "",
        function=test.function if isinstance(test, Returning) else "",
        arguments=list(test.arguments) if isinstance(test, Returning) else [],
    )
    files = {_HARNESS: _harness()}
    result = run_program([*PYTHON, _HARNESS], stdin=json.dumps(task) + "\n", files=files, limits=limits)
    found = _reported(result, token)
    return bool(found) and (not isinstance(test, Returning) or returns(test, found[0]))


def _reported(result: Result, token: str) -> list[Any]:
    """The value behind the token, in a list; empty where the program did not come so far."""
    last = result.stdout.rstrip(b"\n").rpartition(b"\n")[2].decode("utf-8", "replace")
    if result.status != "ok" or not last.startswith(f"{token} "):
        return []
    return [json.loads(last.removeprefix(f"{token} "))]


@lru_cache(maxsize=1)
def _harness() -> str:
    """As text: its file may be where programs see nothing."""
    return Path(code_child.__file__).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _say_what_is_missing() -> None:
    """Once a process, on stderr."""
    missing = sorted(FEATURES - isolation())
    if missing:
        print(
            f"reward code: this machine gives programs no isolation of {', '.join(missing)} "
            '(docs/rewards.md, "Programs"); their limits hold nevertheless.',
            file=sys.stderr,
        )


def _bytes(size: object) -> int:
    return int(TypeAdapter(ByteSize).validate_python(size))
