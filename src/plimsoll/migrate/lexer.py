"""A bash script cut into tokens. Nothing is run and nothing is expanded: words keep their quotes and their `$`."""

from dataclasses import dataclass
from typing import Literal

from plimsoll.errors import RefusedError

_OPERATORS = (
    ";;&",
    "<<<",
    "&>>",
    "&&",
    "||",
    ";;",
    ";&",
    ">>",
    "<<",
    ">&",
    "<&",
    "&>",
    ";",
    "|",
    "&",
    "(",
    ")",
    "<",
    ">",
)
_BLANK = " \t\r"
_CLOSING = {"(": ")", "{": "}"}


@dataclass(slots=True, kw_only=True, frozen=True)
class Token:
    """A word as written, an operator, or the end of a line."""

    kind: Literal["word", "operator", "array"]
    text: str
    """Of a word: as written. Of an array: `NAME=` or `NAME+=`."""
    line: int
    items: tuple[str, ...] = ()
    """Words of an array, as written."""


class _Lexer:
    """One pass over the text."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.file = file
        self.at = 0
        self.line = 1
        self.tokens: list[Token] = []
        self.heredocs: list[str] = []

    def refuse(self, line: int, problem: str) -> RefusedError:
        return RefusedError(
            f"{self.file}, line {line}: {problem}; mend the script, or give a file with the plain overrides, one "
            "`key=value` a line"
        )

    def run(self) -> tuple[Token, ...]:
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\n":
                self._end_line()
            elif char in _BLANK:
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at, self.line = self.at + 2, self.line + 1
            elif char == "#":
                self._skip_to_end_of_line()
            elif operator := next((found for found in _OPERATORS if self.text.startswith(found, self.at)), None):
                self._operator(operator)
            else:
                self._word_or_array()
        return tuple(self.tokens)

    def _add(self, kind: Literal["word", "operator"], text: str, line: int) -> None:
        self.tokens.append(Token(kind=kind, text=text, line=line))

    def _skip_to_end_of_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _end_line(self) -> None:
        self._add("operator", "\n", self.line)
        self.at, self.line = self.at + 1, self.line + 1
        for mark in self.heredocs:
            while self.at < len(self.text):
                start = self.at
                self._skip_to_end_of_line()
                found = self.text[start : self.at].strip()
                self.at, self.line = self.at + 1, self.line + 1
                if found == mark:
                    break
        self.heredocs.clear()

    def _operator(self, operator: str) -> None:
        self.at += len(operator)
        if operator == "(" and self.text.startswith("(", self.at):  # (( … )) as a command: arithmetic, no value for us
            line, start = self.line, self.at - 1
            self.at = start
            self._add("word", self._balanced("("), line)
            return
        self._add("operator", operator, self.line)
        if operator == "<<":
            while self.text[self.at : self.at + 1] in ("-", " ", "\t"):
                self.at += 1
            mark = self._word()
            self.heredocs.append(mark.strip("'\"\\"))

    def _word_or_array(self) -> None:
        line = self.line
        word = self._word()
        if word.endswith("=") and self.text.startswith("(", self.at):
            self.at += 1
            self.tokens.append(Token(kind="array", text=word, line=line, items=self._array(line)))
        else:
            self._add("word", word, line)

    def _array(self, line: int) -> tuple[str, ...]:
        items: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == ")":
                self.at += 1
                return tuple(items)
            if char == "\n":
                self.at, self.line = self.at + 1, self.line + 1
            elif char in _BLANK:
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at, self.line = self.at + 2, self.line + 1
            elif char == "#":
                self._skip_to_end_of_line()
            else:
                items.append(self._word(ends="()"))
                if self.text.startswith("(", self.at):
                    raise self.refuse(self.line, "a `(` inside an array that opened in this script")
        raise self.refuse(line, "an array opens with `(` and is never closed")

    def _word(self, ends: str = "();<>|&") -> str:
        """From here to the next blank or operator, quotes and `$…` whole. Continued lines are joined."""
        parts: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at, self.line = self.at + 2, self.line + 1
                continue
            if char in _BLANK or char == "\n" or char in ends:
                break
            parts.append(self._piece(char))
        return "".join(parts)

    def _piece(self, char: str) -> str:
        start = self.at
        if char == "\\":
            self.at += 2
        elif char == "'":
            self._to_quote("'", "a single quote opens and is never closed", escapes=False)
        elif char == '"':
            self._double_quoted()
        elif char == "`":
            self._to_quote("`", "a backquote opens and is never closed", escapes=True)
        elif char == "$" and self.text[self.at + 1 : self.at + 2] in ("(", "{"):
            self.at += 1
            self._balanced(self.text[self.at])
        else:
            self.at += 1
        return self.text[start : self.at]

    def _to_quote(self, quote: str, problem: str, *, escapes: bool) -> None:
        line = self.line
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == quote:
                self.at += 1
                return
            self.line += char == "\n"
            self.at += 2 if escapes and char == "\\" else 1
        raise self.refuse(line, problem)

    def _double_quoted(self) -> None:
        line = self.line
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return
            if char == "$" and self.text[self.at + 1 : self.at + 2] in ("(", "{"):
                self.at += 1
                self._balanced(self.text[self.at])
                continue
            self.line += char == "\n"
            self.at += 2 if char == "\\" else 1
        raise self.refuse(line, "a double quote opens and is never closed")

    def _balanced(self, opening: str) -> str:
        """From an opening bracket over everything up to its own closing one."""
        start, line, depth = self.at, self.line, 0
        closing = _CLOSING[opening]
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "'\"`\\":
                self._piece(char)
                continue
            depth += (char == opening) - (char == closing)
            self.line += char == "\n"
            self.at += 1
            if depth == 0:
                return self.text[start : self.at]
        raise self.refuse(line, f"`{opening}` opens and is never closed")


def tokens(text: str, file: str) -> tuple[Token, ...]:
    """All tokens of a script; comments and here-documents are left out. RefusedError: quotes or brackets that never
    close, with their line."""
    return _Lexer(text, file).run()
