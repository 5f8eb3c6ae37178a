"""States for tests."""

from dataclasses import replace
from typing import Any

from plimsoll.checkpoint.rng import capture_rng
from plimsoll.checkpoint.state import TrainingState, library_versions


def training_state(**changes: Any) -> TrainingState:
    """A state of step 12 with the generators as they are now."""
    state = TrainingState(
        step=12,
        policy_version=11,
        optimizer_steps=22,
        skipped_nonfinite=2,
        skipped_empty=1,
        cursor={"epoch": 1, "position": 8, "spare": [[1, 5], [1, 2]], "lost": None, "share": 0.1},
        plan={"steps": 40, "compute_dtype": "float32", "stop_token_ids": [2, 3]},
        rng=capture_rng("cpu"),
        libraries=library_versions(),
    )
    return replace(state, **changes)
