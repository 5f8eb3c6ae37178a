"""What a loaded source is: prompts in the order of the source, a report of what was left out, a fingerprint."""

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.types import Prompt

SHOWN_ROWS = 10
"""Row numbers spelled out in a line of the report; the rest is a count."""


@dataclass(slots=True, kw_only=True, frozen=True)
class DataReport:
    """What happened between the rows read and the prompts kept; every row that is not kept is in `dropped`."""

    source: str
    key: str  # the setting that names the source: data.train or data.eval
    num_read: int
    num_kept: int
    dropped: Mapping[str, int]  # rows by reason
    replaced_rows: tuple[int, ...]  # rows whose invalid text was replaced by U+FFFD
    truncated_rows: tuple[int, ...]  # rows cut to their last data.max_prompt_tokens tokens
    longest_prompt: int  # tokens, of the kept rows; 0 without rows
    notes: tuple[str, ...]  # what a person should know once, for example a template without a generation prompt

    def lines(self) -> list[str]:
        """For a person: one line of counts, then one line for each thing that is out of the ordinary."""
        counts = f"{self.key}={self.source}: {self.num_read} rows read, {self.num_kept} kept"
        if self.dropped:
            counts += f", {self.num_read - self.num_kept} dropped ({by_reason(self.dropped)})"
        lines = [f"{counts}; longest prompt {self.longest_prompt} tokens"]
        if self.replaced_rows:
            lines.append(f"{self.key}: invalid text replaced by U+FFFD in {some_rows(self.replaced_rows)}")
        if self.truncated_rows:
            lines.append(f"{self.key}: cut to data.max_prompt_tokens: {some_rows(self.truncated_rows)}")
        return lines + [f"{self.key}: {note}" for note in self.notes]


@dataclass(slots=True, kw_only=True, frozen=True)
class Dataset:
    """Usable rows of one source.

    `fingerprint` is the SHA-256 of row numbers, prompt ids, answers, responses and data sources. A cursor is valid only
    on a dataset with the same fingerprint.
    """

    prompts: tuple[Prompt, ...]
    report: DataReport
    fingerprint: str


def by_reason(dropped: Mapping[str, int]) -> str:
    """`3 no prompt, 1 answer is null`: most frequent first."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items(), key=lambda item: -item[1]))


def some_rows(rows: tuple[int, ...]) -> str:
    """`2 rows (4, 7)`, with at most SHOWN_ROWS numbers."""
    numbers = ", ".join(map(str, rows[:SHOWN_ROWS])) + (", …" if len(rows) > SHOWN_ROWS else "")
    return f"{len(rows)} row{'s' if len(rows) != 1 else ''} ({numbers})"
