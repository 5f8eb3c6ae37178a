"""The tasks: each one counts its problems and makes the problem of a given index. No randomness here.

    name            prompt       answer      options
    reverse_string  483920>      029384      length, alphabet
    sort_digits     483920<      023489      length
    copy_string     483920:      483920      length, alphabet
    count_letter    abcadbca#a   3           length, alphabet
    addition        48+39=       87          digits
    subtraction     39-48=       -9          digits
    multiplication  48*39=       1872        digits

Prompts are short on purpose: a character tokenizer makes one token of each character, and a model of a million
parameters has to learn them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plimsoll.data.tasks.options import LetterOptions, NumberOptions, TaskOptions, TextOptions


@dataclass(slots=True, kw_only=True, frozen=True)
class Problem:
    """A question and its only right answer."""

    prompt: str
    answer: str

    @property
    def echo(self) -> str:
        """The question without its last character, the task's mark: what a careless demonstrator answers."""
        return self.prompt[:-1]


@dataclass(slots=True, kw_only=True, frozen=True)
class Task:
    """`make(options, index)` is the problem of 0 <= index < `count(options)`; different indices, different prompts.

    Both functions take the class named by `options`.
    """

    options: type[TaskOptions]
    count: Callable[[Any], int]
    make: Callable[[Any, int], Problem]


def string_at(index: int, length: int, alphabet: str) -> str:
    """The string whose characters are the digits of `index` in base len(alphabet)."""
    characters: list[str] = []
    for _ in range(length):
        index, digit = divmod(index, len(alphabet))
        characters.append(alphabet[digit])
    return "".join(characters)


def num_strings(options: TextOptions) -> int:
    """Strings of this length."""
    return len(options.alphabet) ** options.length


def num_pairs(options: NumberOptions) -> int:
    """Ordered pairs of numbers."""
    return 10 ** (2 * options.digits)


def reverse_string(options: TextOptions, index: int) -> Problem:
    """The string backwards."""
    text = string_at(index, options.length, options.alphabet)
    return Problem(prompt=f"{text}>", answer=text[::-1])


def sort_digits(options: TextOptions, index: int) -> Problem:
    """The characters in ascending order."""
    text = string_at(index, options.length, options.alphabet)
    return Problem(prompt=f"{text}<", answer="".join(sorted(text)))


def copy_string(options: TextOptions, index: int) -> Problem:
    """The string again."""
    text = string_at(index, options.length, options.alphabet)
    return Problem(prompt=f"{text}:", answer=text)


def count_letter(options: LetterOptions, index: int) -> Problem:
    """How often the letter after # is in the string."""
    index, which = divmod(index, len(options.alphabet))
    text, letter = string_at(index, options.length, options.alphabet), options.alphabet[which]
    return Problem(prompt=f"{text}#{letter}", answer=str(text.count(letter)))


def addition(options: NumberOptions, index: int) -> Problem:
    """a + b."""
    a, b = divmod(index, 10**options.digits)
    return Problem(prompt=f"{a}+{b}=", answer=str(a + b))


def subtraction(options: NumberOptions, index: int) -> Problem:
    """a - b, which may be negative."""
    a, b = divmod(index, 10**options.digits)
    return Problem(prompt=f"{a}-{b}=", answer=str(a - b))


def multiplication(options: NumberOptions, index: int) -> Problem:
    """a · b."""
    a, b = divmod(index, 10**options.digits)
    return Problem(prompt=f"{a}*{b}=", answer=str(a * b))


TASKS: dict[str, Task] = {
    "reverse_string": Task(options=TextOptions, count=num_strings, make=reverse_string),
    "sort_digits": Task(options=TextOptions, count=num_strings, make=sort_digits),
    "copy_string": Task(options=TextOptions, count=num_strings, make=copy_string),
    "count_letter": Task(
        options=LetterOptions, count=lambda options: num_strings(options) * len(options.alphabet), make=count_letter
    ),
    "addition": Task(options=NumberOptions, count=num_pairs, make=addition),
    "subtraction": Task(options=NumberOptions, count=num_pairs, make=subtraction),
    "multiplication": Task(options=NumberOptions, count=num_pairs, make=multiplication),
}
"""Every built-in task by the name behind `task:`."""
