"""Conditions of a bash script that can be decided without running anything."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from plimsoll.migrate.expand import Variables
from plimsoll.migrate.lexer import Token

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


def holds(condition: Sequence[Token], variables: Variables) -> bool | None:
    """`[ … ]`, `[[ … ]]`, `test …` joined by `&&` and `||`, in braces or not; None: it cannot be decided."""
    parts: list[list[Token]] = [[]]
    joins: list[str] = []
    double = False
    for token in condition:
        if token.kind == "word":
            double = (double or token.text == "[[") and token.text != "]]"
        if token.text in ("&&", "||"):
            joins.append(token.text)
            parts.append([])
        elif token.text not in ("\n", ";", "{", "}", "(", ")") or double:
            parts[-1].append(token)
    value = _test(parts[0], variables)
    for join, part in zip(joins, parts[1:], strict=True):
        other = _test(part, variables)
        stops = join == "||"  # the value that decides: true for `or`, false for `and`
        if stops in (value, other):
            value = stops
        elif value is None or other is None:
            value = None
        else:
            value = not stops
    return value


def _test(tokens: Sequence[Token], variables: Variables) -> bool | None:
    words = [token.text for token in tokens if token.text not in ("[", "]", "[[", "]]", "test")]
    negated = False
    while words and words[0] == "!":
        words, negated = words[1:], not negated
    value = _unnegated(words, variables)
    return None if value is None else value != negated


def _unnegated(words: Sequence[str], variables: Variables) -> bool | None:
    match words:
        case ["-z" | "-n" as operator, word]:
            text = variables.value(word).known
            return None if text is None else (text == "") == (operator == "-z")
        case [left, "=" | "==" | "!=" as operator, right]:
            a, b = variables.value(left).known, variables.value(right).known
            if a is None or b is None:
                return None
            return fnmatchcase(a, b) == (operator != "!=")
        case [left, operator, right] if operator in _NUMBERS:
            return _compare(variables.value(left).known, operator, variables.value(right).known)
        case [word]:
            text = variables.value(word).known
            return {"true": True, "false": False}.get(text) if text is not None else None
        case _:
            return None


def _compare(left: str | None, operator: str, right: str | None) -> bool | None:
    try:
        return None if left is None or right is None else _NUMBERS[operator](int(left), int(right))
    except ValueError:
        return None
