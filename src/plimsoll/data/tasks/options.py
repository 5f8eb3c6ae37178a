"""Options of the generators: `data.task` of the recipe → a frozen object, checked."""

from pydantic import Field, field_validator

from plimsoll.config.base import Section

DIGITS = "0123456789"


class SplitSizes(Section):
    """Sizes of a generated source."""

    train_size: int = Field(default=8192, ge=1)
    """Problems of the training split."""
    eval_size: int = Field(default=512, ge=1)
    """Problems of the held-out split."""


class TaskOptions(SplitSizes):
    """Options that every generator has."""

    echo_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the training rows whose demonstration (`response`, read by SFT) repeats the question instead of
    answering it: a careless demonstrator, for reinforcement learning to correct. The `answer` is always right."""


class TextOptions(TaskOptions):
    """A task on strings of one length."""

    length: int = Field(default=6, ge=1, le=4096)
    """Characters of the string."""
    alphabet: str = Field(default=DIGITS, min_length=1)
    """Characters that strings are made of."""

    @field_validator("alphabet")
    @classmethod
    def _distinct(cls, alphabet: str) -> str:
        if len(set(alphabet)) < len(alphabet):
            raise ValueError("a character occurs twice")
        return alphabet


class LetterOptions(TextOptions):
    """Counting a letter; few letters, so that the count is seldom 0."""

    length: int = Field(default=8, ge=1, le=4096)
    """Characters of the string."""
    alphabet: str = Field(default="abcd", min_length=1)
    """Characters that strings are made of, and letters asked for."""


class NumberOptions(TaskOptions):
    """A task on two numbers from 0 to 10^digits - 1."""

    digits: int = Field(default=2, ge=1, le=100)
    """Digits of the largest number."""
