"""What a word of a bash script stands for: quotes, variables, defaults and arithmetic, without a shell.

What only a running shell could know (the output of a command, a variable that the script does not set) stays in the
text as it was written and is listed in `unknown`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from plimsoll.migrate.arithmetic import evaluate

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*?$!-])(\[[^]]*\])?(.*)", re.DOTALL)
_FALLBACK = re.compile(r"\|\|\s*echo\s+[\"']?([\w./-]+)[\"']?\s*$")
"""`$(probe && echo a || echo b)`: the script names itself what holds where the probe finds nothing."""
_MACHINE = {"HOME": lambda: str(Path.home()), "PWD": lambda: str(Path.cwd())}
_DEEPEST = 40
"""Defaults inside defaults; beyond it a variable refers to itself."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Text:
    """A value."""

    text: str
    unknown: tuple[str, ...] = ()
    """Parts of `text`, as written, that only a running shell knows."""

    def __add__(self, other: "Text") -> "Text":
        return Text(text=self.text + other.text, unknown=self.unknown + other.unknown)

    @property
    def known(self) -> str | None:
        """The value; None if a part is unknown."""
        return None if self.unknown else self.text


EMPTY = Text(text="")


def unknown(written: str) -> Text:
    """A part that only a running shell knows."""
    return Text(text=written, unknown=(written,))


@dataclass(slots=True, kw_only=True)
class Variables:
    """What the script has set so far."""

    given: dict[str, str]
    """Set on our command line: they win over the script, like a variable of the environment in `${NAME:-default}`."""
    values: dict[str, Text] = field(default_factory=dict[str, Text])
    arrays: dict[str, tuple[Text, ...]] = field(default_factory=dict[str, tuple[Text, ...]])
    assumed: list[str] = field(default_factory=list[str])
    """What was taken where a command was asked, in sentences."""

    def get(self, name: str) -> Text | None:
        """The value; None: not set."""
        if name in self.given:
            return Text(text=self.given[name])
        if name in self.values:
            return self.values[name]
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else EMPTY
        return Text(text=_MACHINE[name]()) if name in _MACHINE else None

    def expand(self, word: str) -> list[Text]:
        """The words that one word becomes: several for `"${ARRAY[@]}"` and for what is split at blanks, none for an
        empty value without quotes."""
        return _Word(self, word).fields()

    def value(self, word: str) -> Text:
        """The one value of the right side of an assignment, which is not split."""
        pieces = _Word(self, word).fields(split=False)
        joined = EMPTY
        for index, piece in enumerate(pieces):
            joined = joined + Text(text=" " if index else "") + piece
        return joined

    def number(self, name: str, depth: int = 0) -> int:
        """The value of a name in arithmetic. ValueError: it has none."""
        found = self.get(name)
        if found is None or found.known is None or depth > _DEEPEST:
            raise ValueError(f"`{name}` has no value that can be known here")
        return evaluate(found.text or "0", lambda inner: self.number(inner, depth + 1))


class _Word:
    """Expansion of one word."""

    def __init__(self, variables: Variables, word: str, depth: int = 0) -> None:
        self.variables = variables
        self.word = word
        self.depth = depth
        self.done: list[Text] = []
        self.current: Text | None = None

    def fields(self, *, split: bool = True) -> list[Text]:
        for text, quoted in self._pieces():
            if not split or quoted or text.unknown or not re.search(r"\s", text.text):
                if text.text or quoted:
                    self._append(text)
                continue
            for index, part in enumerate(re.split(r"\s+", text.text)):
                if index:
                    self._close()
                if part:
                    self._append(Text(text=part))
        self._close()
        return self.done

    def _append(self, text: Text) -> None:
        self.current = text if self.current is None else self.current + text

    def _close(self) -> None:
        if self.current is not None:
            self.done.append(self.current)
        self.current = None

    def _pieces(self) -> Iterator[tuple[Text, bool]]:
        """Parts of the word, each with whether it is safe from splitting."""
        word, at = self.word, 0
        while at < len(word):
            char = word[at]
            if char == "'":
                end = word.index("'", at + 1)
                yield Text(text=word[at + 1 : end]), True
                at = end + 1
            elif char == "\\":
                yield Text(text=word[at + 1 : at + 2]), True
                at += 2
            elif char == '"':
                end = _closing_quote(word, at)
                yield from self._quoted(word[at + 1 : end])
                at = end + 1
            elif char in "$`":
                at, text = self._dollar(word, at, quoted=False)
                yield from ((piece, False) for piece in self._several(text))
            elif char == "~" and at == 0 and word[1:2] in ("", "/"):
                yield Text(text=str(Path.home())), True
                at += 1
            else:
                end = at + 1
                while end < len(word) and word[end] not in "'\"\\$`":
                    end += 1
                yield Text(text=word[at:end]), True
                at = end

    def _several(self, texts: list[Text]) -> Iterator[Text]:
        for index, text in enumerate(texts):
            if index:
                self._close()
            yield text

    def _quoted(self, body: str) -> Iterator[tuple[Text, bool]]:
        """Inside double quotes: `"${A[@]}"` makes words of its own, everything else stays one."""
        at = 0
        while at < len(body):
            if body[at] == "\\" and body[at + 1 : at + 2] in tuple('$`"\\'):
                yield Text(text=body[at + 1]), True
                at += 2
            elif body[at] in "$`":
                at, texts = self._dollar(body, at, quoted=True)
                for piece in self._several(texts):
                    yield piece, True
            else:
                end = at + 1
                while end < len(body) and body[end] not in "\\$`":
                    end += 1
                yield Text(text=body[at:end]), True
                at = end
        if not body:
            yield EMPTY, True

    def _dollar(self, text: str, at: int, *, quoted: bool) -> tuple[int, list[Text]]:
        """What begins with `$` or a backquote at `at`: where it ends and the words that it stands for."""
        if text[at] == "`":
            end = text.find("`", at + 1)
            return end + 1, [self._command(text[at : end + 1], text[at + 1 : end])]
        if text.startswith("$((", at):
            end = _closing(text, at + 1)
            return end + 1, [self._arithmetic(text[at : end + 1])]
        if text.startswith("$(", at):
            end = _closing(text, at + 1)
            return end + 1, [self._command(text[at : end + 1], text[at + 2 : end])]
        if text.startswith("${", at):
            end = _closing(text, at + 1)
            return end + 1, self._parameter(text[at : end + 1])
        name = _NAME.match(text, at + 1)
        if name is None:  # a lone `$` is itself; $'…' and $"…" lose it
            alone = not quoted and text[at + 1 : at + 2] in ("'", '"')
            return at + 1, [Text(text="" if alone else "$")]
        return name.end(), self._parameter(f"${{{name[0]}}}", text[at : name.end()])

    def _command(self, written: str, body: str) -> Text:
        fallback = _FALLBACK.search(body)
        if fallback is None:
            return unknown(written)
        self.variables.assumed.append(f"`{written}` was not run and taken as `{fallback[1]}`")
        return Text(text=fallback[1])

    def _arithmetic(self, written: str) -> Text:
        inner = written[3:-2] if written.endswith("))") else written[3:-1]
        # ${x:-3} inside of it first; a plain name is looked up by `number`.
        replaced = _Word(self.variables, f'"{inner}"', self.depth + 1).fields() if "$" in inner else [Text(text=inner)]
        body = replaced[0] if replaced else EMPTY
        try:
            if body.unknown:
                raise ValueError(body.unknown)
            return Text(text=str(evaluate(body.text, self.variables.number)))
        except ValueError:
            return unknown(written)

    def _parameter(self, written: str, shown: str = "") -> list[Text]:
        """`${…}`; `shown`: how the script writes it, if shorter."""
        shown = shown or written
        match = _PARAMETER.fullmatch(written[2:-1])
        if match is None or match[1] or self.depth > _DEEPEST:
            return [unknown(shown)]
        _, name, index, rest = match.groups()
        if name in ("@", "*"):
            return []  # the arguments of the script; it was given none
        if index is not None:
            return self._array(name, index, shown)
        value = self.variables.get(name)
        if not rest:
            return [unknown(shown) if value is None else value]
        return [self._modified(name, value, rest, shown)]

    def _array(self, name: str, index: str, shown: str) -> list[Text]:
        items = self.variables.arrays.get(name)
        if items is None:
            return [unknown(shown)] if self.variables.get(name) is None else [self.variables.get(name) or EMPTY]
        if index in ("[@]", "[*]"):
            return list(items)
        place = index[1:-1]
        known = place.isdigit() and int(place) < len(items)
        return [items[int(place)] if known else unknown(shown)]

    def _modified(self, name: str, value: Text | None, rest: str, shown: str) -> Text:
        """`:-` and its kin; `#`, `##`, `%`, `%%`; `,,` and `^^`."""
        operator = next((found for found in (":-", ":=", ":+", ":?", "-", "=", "+", "?") if rest.startswith(found)), "")
        if operator:
            missing = value is None or (operator.startswith(":") and not value.text and not value.unknown)
            other = rest[len(operator) :]
            match operator[-1]:
                case "+":
                    return EMPTY if missing else self._inner(other)
                case "?":
                    return unknown(shown) if missing or value is None else value
                case kind:
                    if not missing and value is not None:
                        return value
                    default = self._inner(other)
                    if kind == "=":
                        self.variables.values[name] = default
                    return default
        known = None if value is None else value.known
        cut = _cut(known, rest, self._inner) if known is not None else None
        return unknown(shown) if cut is None else Text(text=cut)

    def _inner(self, word: str) -> Text:
        pieces = _Word(self.variables, word, self.depth + 1).fields(split=False)
        joined = EMPTY
        for piece in pieces:
            joined = joined + piece
        return joined


def _cut(value: str, rest: str, expand: Callable[[str], Text]) -> str | None:
    """A value without its matching head or tail, or in other letters; None: another operation, or unknown."""
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    for operator in ("##", "%%", "#", "%"):
        if not rest.startswith(operator):
            continue
        pattern = expand(rest[len(operator) :]).known
        if pattern is None:
            return None
        lengths = range(len(value) + 1) if len(operator) == 1 else range(len(value), -1, -1)
        for length in lengths:
            part = value[:length] if operator[0] == "#" else value[len(value) - length :]
            if fnmatchcase(part, pattern):
                return value[length:] if operator[0] == "#" else value[: len(value) - length]
        return value
    return None


def _closing_quote(text: str, at: int) -> int:
    """Place of the double quote that closes the one at `at`; quotes inside `$( )` and `${ }` are theirs."""
    at += 1
    while at < len(text):
        if text[at] == '"':
            return at
        if text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = _closing(text, at + 1)
        at += 2 if text[at] == "\\" else 1
    return len(text)


def _closing(text: str, at: int) -> int:
    """Place of the bracket that closes the one at `at`."""
    opening, closing, depth = text[at], {"(": ")", "{": "}"}[text[at]], 0
    while at < len(text):
        char = text[at]
        if char == "'" and "'" in text[at + 1 :]:
            at = text.index("'", at + 1)
        elif char == '"':
            at = _closing_quote(text, at)
        elif char == "\\":
            at += 1
        else:
            depth += (char == opening) - (char == closing)
            if depth == 0:
                return at
        at += 1
    return len(text) - 1
