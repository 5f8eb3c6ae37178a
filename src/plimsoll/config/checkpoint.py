"""`checkpoint`: when to save and what to keep."""

from pydantic import ByteSize, Field

from plimsoll.config.base import Section


class CheckpointConfig(Section):
    """Checkpoints in RUN/checkpoints/step_N, complete or absent."""

    every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints. Default: only at the end (and when interrupted)."""
    keep: int | None = Field(default=2, ge=1)
    """Newest complete checkpoints that stay; older ones are deleted after a new one is published. null: all."""
    background: bool = False
    """Write while the next rollout is made; the next update waits until the weights have been read."""
    staging_memory: ByteSize = Field(default=ByteSize(64 * 1024**2), ge=2**16)
    """Host memory of a rank for weights on their way to disk."""
    grace: float = Field(default=60.0, gt=0.0)
    """Seconds an interrupted run may take to finish its step before the step is abandoned."""
