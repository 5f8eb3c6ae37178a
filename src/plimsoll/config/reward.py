"""`reward`: how responses are scored."""

from pydantic import Field

from plimsoll.config.base import Section
from plimsoll.config.data import Scalar


class RewardConfig(Section):
    """A Python function or a built-in rule, run in processes of its own."""

    function: str = "exact_match"
    """`exact_match`, `number`, `package.module:function` or `file.py:function` (ours, verl's or TRL's signature)."""
    options: dict[str, Scalar] = Field(default_factory=dict)
    """Keyword arguments handed to the function with every call."""
    workers: int = Field(default=2, ge=1)
    """Processes that score."""
    timeout: float = Field(default=10.0, gt=0.0)
    """Seconds for one response (TRL signature: for one call with a chunk of responses); then its process is killed."""
    max_error_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of a batch that may fail (exception or time-out) before the run stops with the traceback."""
    failed_score: float | None = None
    """Score of a response whose function failed. Default: not scored, left out of group and loss, counted."""
