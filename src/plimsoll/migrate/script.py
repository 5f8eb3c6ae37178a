"""A launch script read, not run: its variables, the branches that can be decided, and the arguments of the launch."""

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from plimsoll.errors import RefusedError
from plimsoll.migrate.conditions import holds
from plimsoll.migrate.expand import Text, Variables
from plimsoll.migrate.lexer import Token, tokens

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_MODULE = re.compile(r"(?:.*[./])?main_(ppo|dapo)(?:_sync|_v0)?(?:\.py)?")
_OTHER_MODULE = re.compile(r"(?:verl|recipe)\.[\w.]+")
OVERRIDE = re.compile(r"(\+\+|\+|~)?(--config-name|model_engine|[A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
"""Of hydra: a dotted key, perhaps with `+`, `++` or `~` before it; and what chooses another trainer than FSDP."""
_SEPARATORS = ("\n", ";", "&&", "||", "|", "&", "(", ")", ";;", ";&", ";;&")
_REDIRECTIONS = (">", ">>", "<", "<<<", ">&", "<&", "&>", "&>>")
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_LOOPS = ("for", "while", "until", "select")


@dataclass(slots=True, kw_only=True, frozen=True)
class Argument:
    """One override of the launch."""

    key: str
    value: Text
    line: int
    removed: bool = False
    """`~key`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Launch:
    """What was found in a file."""

    module: str | None
    """`main_ppo` or `main_dapo`; None: a plain list of overrides."""
    arguments: tuple[Argument, ...]
    notes: tuple[str, ...]
    """What was assumed, passed over or left undecided, in sentences."""


@dataclass(slots=True, kw_only=True)
class _Found:
    module: str | None
    line: int
    words: list[tuple[Text, int]]


@dataclass(slots=True, kw_only=True)
class _Reader:
    """Goes over the tokens once; branches that are not taken are gone over without effect."""

    file: str
    items: tuple[Token, ...]
    variables: Variables
    at: int = 0
    launches: list[_Found] = field(default_factory=list[_Found])
    plain: list[tuple[Text, int]] = field(default_factory=list[tuple[Text, int]])
    notes: list[str] = field(default_factory=list[str])
    others: list[str] = field(default_factory=list[str])

    def block(self, ends: tuple[str, ...], *, live: bool) -> str:
        """Commands up to one of the words `ends`, which is taken too and returned; "" at the end of the file."""
        while self.at < len(self.items):
            token = self.items[self.at]
            if token.kind == "operator":
                self.at += 1
                if token.text in ends:
                    return token.text
            elif token.kind == "word" and token.text in ends:
                self.at += 1
                return token.text
            else:
                self._statement(token, live=live)
        return ""

    def _statement(self, token: Token, *, live: bool) -> None:
        if token.text == "if":
            self.at += 1
            self._if(token.line, live=live)
        elif token.text == "case":
            self.at += 1
            self._case(token.line, live=live)
        elif token.text in _LOOPS:
            self.at += 1
            self.block(("do",), live=False)
            start = len(self.launches)
            self.block(("done",), live=live)  # as if once: a launch inside must be found; its own variable is unknown
            if live and len(self.launches) > start:
                self.notes.append(f"line {token.line}: a loop; read as if it ran once")
        elif token.text in ("{", "}", "!", "function", "then", "do"):
            self.at += 1
        else:
            self._command(live=live)

    def _if(self, line: int, *, live: bool) -> None:
        taken: bool | None = False
        while True:
            start = self.at
            self.block(("then",), live=False)
            condition = self.items[start : self.at - 1]
            decided = holds(condition, self.variables) if live and taken is False else False
            if live and taken is False and decided is None:
                self.notes.append(f"line {line}: the condition cannot be decided here; its branches are left out")
            end = self.block(("elif", "else", "fi"), live=live and taken is False and decided is True)
            taken = decided if taken is False else taken
            if end == "else":
                self.block(("fi",), live=live and taken is False)
                return
            if end in ("fi", ""):
                return

    def _case(self, line: int, *, live: bool) -> None:
        subject = self.variables.value(self.items[self.at].text).known if self.at < len(self.items) else None
        while self.at < len(self.items) and self.items[self.at].text != "in":
            self.at += 1
        self.at += 1
        if live and subject is None:
            self.notes.append(f"line {line}: the value of this `case` is not known here; its branches are left out")
        taken = False
        while self.at < len(self.items):
            token = self.items[self.at]
            self.at += 1
            if token.text == "esac":
                return
            if token.text in ("\n", "("):
                continue
            patterns = [token.text]
            while self.at < len(self.items) and self.items[self.at].text != ")":
                patterns += [self.items[self.at].text] if self.items[self.at].kind == "word" else []
                self.at += 1
            self.at += 1
            known = [self.variables.value(pattern).known for pattern in patterns]
            fits = subject is not None and any(pattern and fnmatchcase(subject, pattern) for pattern in known)
            if self.block((";;", ";&", ";;&", "esac"), live=live and fits and not taken) in ("esac", ""):
                return
            taken = taken or fits

    def _command(self, *, live: bool) -> None:
        """One simple command."""
        start, line = self.at, self.items[self.at].line
        while self.at < len(self.items):
            token = self.items[self.at]
            if token.kind == "operator" and token.text in _SEPARATORS:
                break
            self.at += 1
        if not live:
            return
        words = list(self.items[start : self.at])
        declared = bool(words) and words[0].kind == "word" and words[0].text in _DECLARATIONS
        words = words[1:] if declared else words
        rest: list[Token] = []
        for index, token in enumerate(words):
            if token.kind == "array" or (not rest and _ASSIGNMENT.fullmatch(token.text)):
                self._assign(token)
            elif token.kind == "operator" and token.text in _REDIRECTIONS:
                break
            elif not declared and not (token.text.isdigit() and _redirects(words[index + 1 : index + 2])):
                rest.append(token)
        if rest:
            self._run(rest, line)

    def _assign(self, token: Token) -> None:
        match = _ASSIGNMENT.fullmatch(token.text)
        assert match, token
        name, plus, word = match.groups()
        values, arrays = self.variables.values, self.variables.arrays
        if token.kind == "array":
            items = tuple(text for item in token.items for text in self.variables.expand(item))
            arrays[name] = (*arrays.get(name, ()), *items) if plus else items
            return
        value = self.variables.value(word)
        before = self.variables.get(name) if plus else None
        values[name] = value if before is None else before + value
        arrays.pop(name, None)

    def _run(self, rest: list[Token], line: int) -> None:
        words = [(text, token.line) for token in rest for text in self.variables.expand(token.text)]
        if not words:
            return
        first = words[0][0].text
        if first in ("source", "."):
            named = words[1][0].text if len(words) > 1 else "a file"
            self.notes.append(f"line {line}: `{named}` is read by the shell and was not read here")
            return
        for index, (word, place) in enumerate(words):
            module = _MODULE.fullmatch(word.text)
            if module and index and first not in ("echo", "printf", "cd", "ls", "cat"):
                self.launches.append(_Found(module=f"main_{module[1]}", line=place, words=words[index + 1 :]))
                return
            if _MODULE.search(word.text) and " -m " in word.text and first not in ("echo", "printf"):
                inner = tokens(word.text, self.file)  # bash -c "python3 -m …"
                nested = _Reader(file=self.file, items=inner, variables=self.variables)
                nested.block((), live=True)
                self.launches += [
                    _Found(module=found.module, line=place, words=found.words) for found in nested.launches
                ]
                return
            if index and words[index - 1][0].text == "-m" and _OTHER_MODULE.fullmatch(word.text):
                self.others.append(word.text)
        self.plain += [(word, place) for word, place in words if OVERRIDE.fullmatch(word.text) and "=" in word.text]


def _redirects(following: list[Token]) -> bool:
    return any(token.kind == "operator" and token.text in _REDIRECTIONS for token in following)


def read_script(path: Path, given: dict[str, str]) -> Launch:
    """The launch in a bash script, or the overrides of a plain list. `given`: variables of the script set by the user.
    RefusedError: no such file, quotes that never close, a launch of something else, no launch at all."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise RefusedError(f"{path}: {reason}; name a verl launch script, or a file of its overrides") from None
    reader = _Reader(file=str(path), items=tokens(text, str(path)), variables=Variables(given=given))
    reader.block((), live=True)
    if reader.launches:
        found = reader.launches[0]
        for other in reader.launches[1:]:
            reader.notes.append(f"line {other.line}: another launch; only the one of line {found.line} was read")
        for word, line in reader.plain:
            reader.notes.append(
                f"line {line}: `{word.text}` stands outside of the launch (a `\\` with a blank behind it, or a comment "
                "between continued lines, ends a command); it was not read"
            )
        words = found.words
    elif reader.others:
        raise RefusedError(
            f"{path} launches `{reader.others[0]}`; what can be read is `verl.trainer.main_ppo` (PPO, GRPO) and "
            "`main_dapo`: name such a script, or a file of its overrides"
        )
    elif reader.plain:
        found, words = None, reader.plain
    else:
        raise RefusedError(
            f"{path} has no launch of `verl.trainer.main_ppo` or `main_dapo` and no line `key=value`; name a verl "
            "launch script, or a file of its overrides"
        )
    arguments = tuple(argument for word, line in words if (argument := _argument(word, line)) is not None)
    notes = [*reader.variables.assumed, *reader.notes]
    for word, line in words:
        if _argument(word, line) is None and word.text:
            notes.append(f"line {line}: `{word.text}` is no `key=value` and was not read")
    return Launch(module=found.module if found else None, arguments=arguments, notes=tuple(dict.fromkeys(notes)))


def _argument(word: Text, line: int) -> Argument | None:
    match = OVERRIDE.fullmatch(word.text)
    if match is None or (match[3] is None and match[1] != "~"):
        return None
    value = Text(text=match[3] or "", unknown=word.unknown)
    return Argument(key=match[2], value=value, line=line, removed=match[1] == "~")
