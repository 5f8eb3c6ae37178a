"""`parallel`: how the model is split over ranks."""

from pydantic import Field

from plimsoll.config.base import Section


class ParallelConfig(Section):
    """Mesh axes."""

    shard: int | None = Field(default=None, ge=1)
    """Ranks of a shard group (FSDP2). Default: all ranks."""
    context: int = Field(default=1, ge=1)
    """Ranks that share one long sequence."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that share each layer."""
