"""Requests for tests of scoring."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plimsoll.types import GroupId, SampleId, ScoreRequest


def requests_for(
    responses: Sequence[str], *, answer: Any = "1", group_size: int = 4, **extra: Any
) -> list[ScoreRequest]:
    """One request a response; `group_size` of them share a prompt."""
    return [
        ScoreRequest(
            sample_id=SampleId(group=GroupId(epoch=0, row=i // group_size), index=i % group_size),
            prompt="what?",
            messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"}),
            response=response,
            answer=answer,
            data_source="tests",
            extra=extra,
        )
        for i, response in enumerate(responses)
    ]


def write_function(folder: Path, body: str, name: str = "score") -> str:
    """Write a module and return what goes into reward.function."""
    path = folder / "rewards.py"
    path.write_text(textwrap.dedent(body))
    return f"{path}:{name}"
