"""rollouts/step_N.jsonl → a bounded number of sampled responses: the newest, and steps spread over the run."""

from pathlib import Path
from typing import Any, cast

from plimsoll.observe.report.data import Number, Rollout
from plimsoll.observe.report.lines import Row, number, rows_of, whole

MAX_SAMPLES = 2000
MAX_TEXT = 8000
"""Characters of one text; a longer one is shown with its middle left out."""
MAX_CHARACTERS = 16_000_000
"""Of all texts together."""
_HEAD = 3 / 4  # of MAX_TEXT before the gap, the rest after it


def read_rollouts(folder: Path, notes: list[str], max_samples: int = MAX_SAMPLES) -> list[Rollout]:
    """Samples in order of their steps. Half of the room is for the newest steps, half for steps spread over the rest.

    Files are read until the room is used, so a folder of 100,000 costs no more than its listing.
    """
    files = sorted(folder.glob("step_*.jsonl")) if folder.is_dir() else []
    newest: list[Rollout] = []
    remaining = list(files)
    while remaining and _has_room(newest, max_samples // 2):
        newest[:0] = _samples(remaining.pop(), notes)
    spread: list[Rollout] = []
    num_newest, every, num_read = len(files) - len(remaining), 1, len(files) - len(remaining)
    if remaining:
        per_file = max(1, len(newest) // num_newest)
        every = max(1, -(-len(remaining) * per_file // (max_samples // 2)))
        for path in remaining[::every]:
            if not _has_room(spread, max_samples // 2):
                break
            spread += _samples(path, notes)
            num_read += 1
    if num_read < len(files):
        notes.append(
            f"Rollouts: {len(spread) + len(newest):,} samples are shown, of {num_read:,} of {len(files):,} steps: the "
            f"newest {num_newest:,}, and of those before {num_read - num_newest:,} spread over the run. All are in "
            f"{folder.name}/."
        )
    return (spread + newest)[-max_samples:]


def _has_room(samples: list[Rollout], limit: int) -> bool:
    size = sum(len(s.prompt) + len(s.response) + len(s.score_detail) for s in samples)
    return len(samples) < limit and size < MAX_CHARACTERS // 2


def _samples(path: Path, notes: list[str]) -> list[Rollout]:
    return [_sample(row) for row in rows_of(path, notes)]


def _sample(row: Row) -> Rollout:
    return Rollout(
        step=int(row["step"]),
        group=_text(row.get("group")),
        sample=whole(row.get("sample")) or 0,
        prompt=_text(row.get("prompt")),
        response=_text(row.get("response")),
        answer=_text(row.get("answer")),
        reward=number(row.get("reward")),
        score=number(row.get("score")),
        score_parts=_parts(row.get("score_parts")),
        score_status=_text(row.get("score_status")),
        score_detail=_text(row.get("score_detail")),
        prompt_length=whole(row.get("prompt_length")),
        response_length=whole(row.get("response_length")),
        finish_reason=_text(row.get("finish_reason")),
        masked=row.get("masked") is True,
        version=whole(row.get("version")),
    )


def _parts(value: object) -> dict[str, Number | None]:
    if not isinstance(value, dict):
        return {}
    return {str(name): number(part) for name, part in cast("dict[Any, Any]", value).items()}


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    if len(text) <= MAX_TEXT:
        return text
    head = int(MAX_TEXT * _HEAD)
    left_out = len(text) - MAX_TEXT
    return f"{text[:head]}\n[… {left_out:,} characters left out here …]\n{text[len(text) - (MAX_TEXT - head) :]}"
