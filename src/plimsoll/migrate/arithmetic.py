"""`$(( … ))` of bash on whole numbers, without a shell: + - * / % **, brackets, names."""

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(?:(0[xX][0-9a-fA-F]+|\d+)|\$?\{?([A-Za-z_]\w*)\}?|(\*\*|[-+*/%()]))")
_LARGEST_POWER = 62
"""Beyond it bash overflows; here it would only take long."""


class NotArithmeticError(ValueError):
    """The expression holds something else, or a name without a number."""


class _Expression:
    """Recursive descent; one pass, values at once."""

    def __init__(self, text: str, value_of: Callable[[str], int]) -> None:
        self.value_of = value_of
        self.items: list[int | str] = []
        at = 0
        text = text.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise NotArithmeticError(f"`{text[at:].strip()}` is not read here")
            number, name, operator = match.groups()
            # bash takes a leading 0 for octal.
            value = int(number, 8 if re.fullmatch(r"0[0-7]+", number) else 0) if number else None
            self.items.append(value if value is not None else value_of(name) if name else operator)
            at = match.end()
        self.at = 0

    def whole(self) -> int:
        value = self.sum()
        if self.at != len(self.items):
            raise NotArithmeticError(f"`{self.items[self.at]}` stands where none can")
        return value

    def _next(self, *operators: str) -> str | None:
        item = self.items[self.at] if self.at < len(self.items) else None
        if isinstance(item, str) and item in operators:
            self.at += 1
            return item
        return None

    def sum(self) -> int:
        value = self.product()
        while operator := self._next("+", "-"):
            right = self.product()
            value = value + right if operator == "+" else value - right
        return value

    def product(self) -> int:
        value = self.unary()
        while operator := self._next("*", "/", "%"):
            right = self.unary()
            if operator == "*":
                value *= right
            elif right == 0:
                raise NotArithmeticError("a division by 0")
            else:  # like C: towards zero, the remainder with the sign of the left side
                quotient = abs(value) // abs(right) * (1 if (value < 0) == (right < 0) else -1)
                value = quotient if operator == "/" else value - quotient * right
        return value

    def unary(self) -> int:
        sign = self._next("+", "-")
        if sign:
            value = self.unary()
            return -value if sign == "-" else value
        return self.power()

    def power(self) -> int:
        base = self.atom()
        if self._next("**"):
            exponent = self.unary()
            if not 0 <= exponent <= _LARGEST_POWER:
                raise NotArithmeticError(f"the power {exponent}")
            return base**exponent
        return base

    def atom(self) -> int:
        if self._next("("):
            value = self.sum()
            if not self._next(")"):
                raise NotArithmeticError("a bracket that is not closed")
            return value
        item = self.items[self.at] if self.at < len(self.items) else "the end"
        if not isinstance(item, int):
            raise NotArithmeticError(f"`{item}` stands where a number is wanted")
        self.at += 1
        return item


def evaluate(text: str, value_of: Callable[[str], int]) -> int:
    """The value; `value_of` gives that of a name. NotArithmeticError: what else stands there, or a division by 0."""
    return _Expression(text, value_of).whole()
