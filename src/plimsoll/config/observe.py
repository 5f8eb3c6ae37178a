"""`observe`: what a run writes about itself."""

from typing import Literal

from pydantic import Field

from plimsoll.config.base import Section


class ObserveConfig(Section):
    """Console and files."""

    console: Literal["auto", "rich", "plain", "off"] = "auto"
    """Progress on stderr. `auto`: rich on a terminal, else one plain line a step."""
    rollout_samples: int = Field(default=8, ge=0)
    """Responses written to RUN/rollouts a step, with their rewards."""
    memory_interval: float = Field(default=0.02, gt=0.0)
    """Seconds between two readings of host memory inside a phase."""
