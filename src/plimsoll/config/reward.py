"""`reward`: how responses are scored."""

from pydantic import Field

from plimsoll.config.base import Options, Section


class RewardRule(Section):
    """One function with its options."""

    function: str
    """As `reward.function`."""
    options: Options = Field(default_factory=dict)
    """As `reward.options`."""


class RewardPart(RewardRule):
    """One of several rewards."""

    weight: float = 1.0
    """The reward is the sum of weight × score over the parts that gave a score."""


class RewardConfig(Section):
    """A Python function or a built-in rule, or several of them, run in processes of their own."""

    function: str = "exact_match"
    """A built-in name (docs/rewards.md), `package.module:function` or `file.py:function` (ours, verl's or TRL's
    signature). `by_source` picks the function by the row's `data_source`."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments handed to the function with every call."""
    parts: dict[str, RewardPart] = Field(default_factory=dict)
    """Several rewards by name, each with `function`, `options` and `weight`, instead of `reward.function`. Each is
    logged as `reward/part/NAME`."""
    sources: dict[str, RewardRule] = Field(default_factory=dict)
    """For `by_source`: `data_source` (a `*` at the end stands for anything) → `function` and `options`; looked up
    before the built-in table."""
    workers: int = Field(default=2, ge=1)
    """Processes that score."""
    timeout: float = Field(default=10.0, gt=0.0)
    """Seconds for one response, all parts together (TRL signature: for one call with a chunk of responses); then its
    process is killed."""
    max_error_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of a batch that may fail (exception or time-out) before the run stops with the traceback."""
    failed_score: float | None = None
    """Score of a response whose function failed. Default: not scored, left out of group and loss, counted."""
