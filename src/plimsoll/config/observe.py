"""`observe`: what a run writes about itself."""

from typing import Literal

from pydantic import Field

from plimsoll.config.base import Section

ProfiledPhase = Literal["rollout", "logprob", "update", "sync", "eval", "save"]


class ObserveConfig(Section):
    """Console, files, sinks and profiles."""

    console: Literal["auto", "rich", "plain", "off"] = "auto"
    """Progress on stderr. `auto`: rich on a terminal, else one plain line a step."""
    rollout_samples: int = Field(default=8, ge=0)
    """Responses written to RUN/rollouts a step, with their rewards."""
    memory_interval: float = Field(default=0.02, gt=0.0)
    """Seconds between two readings of host memory inside a phase."""
    report: bool = True
    """Write RUN/report.html while the run goes on and at its end, in a process of its own."""
    report_interval: float = Field(default=60.0, gt=0.0)
    """Seconds between two writings of the report."""
    tensorboard: bool = False
    """Write the rows of metrics.jsonl as TensorBoard events to RUN/tensorboard (extra `tensorboard`)."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Send the rows of metrics.jsonl to Weights & Biases, or keep them in RUN/wandb (extra `wandb`)."""
    wandb_project: str = "plimsoll"
    """Project at Weights & Biases; entity, group and tags come from wandb's own variables (WANDB_ENTITY …)."""
    profile_steps: tuple[int, ...] = ()
    """Steps whose phases, those in `observe.profile_phases`, are profiled; traces go to RUN/profile."""
    profile_phases: tuple[ProfiledPhase, ...] = ("rollout", "logprob", "update")
    """Phases to profile in those steps."""
    profile_memory: bool = False
    """Also record a memory snapshot of each profiled phase (torch's memory_viz reads it); devices only."""
