"""RUN/rollouts/step_000012.jsonl: the text of a sample of the responses, with their rewards."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plimsoll.jsonl import json_line, write_atomic
from plimsoll.types import Group, Sample

_NAME = re.compile(r"step_(\d+)\.jsonl(?:\.tmp)?")


class RolloutWriter:
    """Writes `num_samples` responses a step; 0 writes nothing."""

    def __init__(self, folder: Path, num_samples: int) -> None:
        self._folder = folder
        self._num_samples = num_samples

    def write(self, step: int, groups: Sequence[Group]) -> Path | None:
        """Write the file of `step`, complete or not at all; None: there is nothing to write."""
        chosen = choose(groups, self._num_samples)
        if not chosen:
            return None
        path = self._folder / f"step_{step:06d}.jsonl"
        write_atomic(path, b"".join(json_line(_row(step, group, sample)) for group, sample in chosen))
        return path

    def truncate(self, last_step: int) -> None:
        """Remove the files of steps after `last_step` (resume)."""
        for path in self._folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and (int(match[1]) > last_step or path.suffix == ".tmp"):
                path.unlink()


def choose(groups: Sequence[Group], num_samples: int) -> list[tuple[Group, Sample]]:
    """At most `num_samples` samples, spread evenly over the groups and, within a group, over its samples.

    The choice depends on nothing but the groups' order and sizes. Neighbouring groups start at different samples, so
    that one sample of each is not always the first.
    """
    filled = [group for group in groups if group.samples]
    num_samples = min(num_samples, sum(len(group.samples) for group in filled))
    if num_samples <= 0:
        return []
    step = max(1.0, len(filled) / num_samples)
    visited = [filled[int(index * step)] for index in range(min(num_samples, len(filled)))]
    chosen: list[tuple[int, int]] = []
    turn = 0
    while len(chosen) < num_samples:  # one sample of each visited group a turn, until there are enough
        for place, group in enumerate(visited):
            if turn < len(group.samples) and len(chosen) < num_samples:
                chosen.append((place, (turn + place) % len(group.samples)))
        turn += 1
    return [(visited[place], visited[place].samples[index]) for place, index in sorted(chosen)]


def _row(step: int, group: Group, sample: Sample) -> dict[str, Any]:
    return {
        "step": step,
        "group": str(group.id),
        "sample": sample.id.index,
        "prompt": sample.prompt_text or group.prompt.text,
        "response": sample.response_text,
        "answer": group.prompt.answer,
        "reward": sample.reward,
        "score": sample.score.value,
        "score_parts": dict(sample.score.parts),
        "score_status": sample.score.status,
        "score_detail": sample.score.detail,
        "prompt_length": sample.prompt_length,
        "response_length": sample.response_length,
        "finish_reason": sample.finish_reason.value,
        "masked": sample.masked,
        "version": sample.version,
    }
