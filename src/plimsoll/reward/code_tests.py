"""The tests of a program, read from a row's answer, in the forms in which data sets have them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

FORMS = (
    '{"inputs": […], "outputs": […]} with or without "fn_name", {"tests": [{"input": …, "output": …}, …]}, '
    'a list of assert statements (also as "tests", "test_list" or "assert_case"), or Python code that tests'
)


@dataclass(slots=True, kw_only=True, frozen=True)
class Printing:
    """What the program prints, given its standard input."""

    stdin: str
    expected: str


@dataclass(slots=True, kw_only=True, frozen=True)
class Returning:
    """What one of its functions returns; values as JSON has them."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any


@dataclass(slots=True, kw_only=True, frozen=True)
class Asserting:
    """Python code that runs after the program and raises where it is wrong."""

    source: str


Test = Printing | Returning | Asserting


def read_tests(answer: object) -> tuple[Test, ...]:
    """All tests of a row, at least one. Raises ValueError for an answer of none of FORMS."""
    value = _value(answer)
    tests: Sequence[Test] = ()
    if isinstance(value, Mapping):
        tests = _of_mapping(cast("Mapping[str, Any]", value))
    elif isinstance(value, list | tuple):
        tests = _of_list(cast("Sequence[Any]", value))
    elif isinstance(value, str) and value.strip():
        tests = [Asserting(source=value)]
    if not tests:
        raise ValueError(f"code finds no tests in this row's answer {str(answer)[:200]!r}; it reads {FORMS}")
    return tuple(tests)


def passes(test: Printing, stdout: str) -> bool:
    """The same words in the same order: layout does not count, and 1.0 is not 1."""
    return stdout.split() == test.expected.split()


def returns(test: Returning, value: object) -> bool:
    """Equal as JSON values; data sets often put the expected value into a list of one."""
    return _equal(value, test.expected) or _equal([value], test.expected)


def _equal(left: object, right: object) -> bool:
    """1 is 1.0, but true is not 1."""
    return left == right and json.dumps(_plain(left)) == json.dumps(_plain(right))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return sorted((key, _plain(item)) for key, item in cast("dict[str, Any]", value).items())
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else value


def _value(answer: object) -> object:
    if not isinstance(answer, str):
        return answer
    try:
        return json.loads(answer)
    except ValueError:
        return answer


def _of_mapping(value: Mapping[str, Any]) -> Sequence[Test]:
    if "inputs" in value and "outputs" in value:
        inputs, outputs = list(value["inputs"]), list(value["outputs"])
        if len(inputs) != len(outputs):
            raise ValueError(f"this row's answer has {len(inputs)} inputs and {len(outputs)} outputs")
        name = value.get("fn_name")
        return [
            _returning(str(name), given, expected) if name else _printing(given, expected)
            for given, expected in zip(inputs, outputs, strict=True)
        ]
    if "test" in value and "entry_point" in value:
        return [Asserting(source=f"{value['test']}\ncheck({value['entry_point']})\n")]
    setup = str(value.get("test_setup_code") or "")
    for name in ("tests", "test_list", "assert_case"):
        if name in value:
            tests = value[name]
            return _of_list([tests] if isinstance(tests, str) else tests, setup)
    return ()


def _of_list(values: Sequence[Any], setup: str = "") -> Sequence[Test]:
    tests: list[Test] = []
    for entry in values:
        if isinstance(entry, str):
            tests.append(Asserting(source=f"{setup}\n{entry}" if setup else entry))
        elif isinstance(entry, Mapping) and {"input", "output"} <= cast("Mapping[str, Any]", entry).keys():
            tests.append(_printing(entry["input"], entry["output"]))
        else:
            return ()
    return tests


def _printing(given: Any, expected: Any) -> Printing:
    return Printing(stdin=_text(given), expected=_text(expected))


def _text(value: Any) -> str:
    """Some rows have a list of lines."""
    return "\n".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)


def _returning(name: str, given: Any, expected: Any) -> Returning:
    """Arguments: a list of them, or a text with one JSON value a line."""
    arguments = [_value(line) for line in given.split("\n") if line] if isinstance(given, str) else list(given)
    return Returning(function=name.rpartition(".")[2], arguments=tuple(arguments), expected=_value(expected))
