"""`checkpoint`: when to save and what to keep."""

from pydantic import Field

from plimsoll.config.base import Section


class CheckpointConfig(Section):
    """Checkpoints in RUN/checkpoints/step_N, complete or absent."""

    every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints. Default: only at the end (and when interrupted)."""
    keep: int | None = Field(default=2, ge=1)
    """Newest complete checkpoints that stay; older ones are deleted after a new one is published. null: all."""
    grace: float = Field(default=60.0, gt=0.0)
    """Seconds an interrupted run may take to finish its step before the step is abandoned."""
