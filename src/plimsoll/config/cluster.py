"""`cluster`: where workers run."""

from typing import Literal

from pydantic import Field

from plimsoll.config.base import Section


class ClusterConfig(Section):
    """Processes and hosts."""

    backend: Literal["inline", "local", "ray"] = "inline"
    """`inline`: one device, this process. `local`: processes of one host. `ray`: any number of hosts."""
    ranks: int = Field(default=1, ge=1)
    """Ranks in all."""
    ranks_per_node: int | None = Field(default=None, ge=1)
    """Ranks of one host. Default: all."""
    max_restarts: int = Field(default=0, ge=0)
    """Restarts after a worker died."""
    min_ranks: int | None = Field(default=None, ge=1)
    """Go on with at least so many ranks after a loss."""
    stall_timeout: float | None = Field(default=None, gt=0.0)
    """Seconds without progress after which the run is ended."""
