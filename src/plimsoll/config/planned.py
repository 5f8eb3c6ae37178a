"""The memory plan as data: what `plimsoll plan --json` prints and RUN/plan.json keeps. All sizes in bytes."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, JsonValue

from plimsoll.config.base import Section


class PlannedPhase(Section):
    """One phase on one slot: the rank of it that holds most."""

    slot: str
    """Group of equal devices with one schedule."""
    phase: str
    """Value of `memory.phases.Phase`; the two parts of an update are `update/gradients` and `update/step`."""
    device_bytes: int
    """Highest use of the device: all residents and the workspace."""
    capacity_bytes: int
    """What the device has."""
    headroom_bytes: int
    """capacity - use; negative where it does not fit."""
    residents: dict[str, int]
    """What lies on the device all through the phase, context and communicators included."""
    workspace_bytes: int
    """What comes and goes inside, at its highest."""
    workspace: dict[str, int] = Field(default_factory=dict)
    """The parts of `workspace_bytes`, which they add up to."""
    evicted: tuple[str, ...] = ()
    """Residents that the plan moves off the device, or drops, for this phase."""
    host_bytes: int = 0
    """Anonymous and pinned host memory of the rank at its highest in this phase, over what the process starts with. On
    a run without a GPU `device_bytes` is part of it."""


class PlannedHost(Section):
    """Host memory over the whole run, load and save included."""

    node_peak_bytes: tuple[int, ...]
    """Each node, all its ranks together."""
    rank_peak_bytes: tuple[int, ...]
    """Each rank."""
    file_cache_bytes: tuple[int, ...]
    """Each node: page cache that the plan counts on (a reference read from its files at each pass). Reclaimable."""
    consumers: dict[str, int] = Field(default_factory=dict)
    """The fullest rank at its highest: who holds what."""
    capacity_bytes: int = 0
    """What a node has."""


class Refusal(Section):
    """One thing that does not fit."""

    slot: str
    phase: str
    """A phase, or `host` for a node's memory."""
    rank: int
    """The first rank that it is about (of a node: its first rank)."""
    need_bytes: int
    have_bytes: int
    largest: str = ""
    """The largest consumer, by name."""


class Advice(Section):
    """Settings that, applied together, make the run fit."""

    set: tuple[str, ...]
    """`section.key=value`, ready for the command line."""
    frees_bytes: int
    """By how much the fullest phase (or node) falls."""


class Choices(Section):
    """What the plan decided where the recipe says `auto` or nothing."""

    device: Literal["cpu", "cuda"]
    compute_dtype: Literal["float32", "float64", "bfloat16"]
    activation_checkpointing: Literal["none", "full", "selective"]
    token_budget: int
    """Tokens of a micro-batch."""
    optimizer_state: Literal["device", "streamed"]
    reference_placement: Literal["device", "page_cache", "ring", "arena"]
    kv_bytes: int
    """Of one engine's KV cache on one device."""
    evicted: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Phase → residents that are not on the device during it although they exist."""


class MemoryPlan(Section):
    """The whole answer."""

    fits: bool
    phases: tuple[PlannedPhase, ...]
    host: PlannedHost
    moved_bytes_per_step: int
    """Over PCIe, one rank, both ways together."""
    wire_bytes_per_step: int
    """Sent by one rank to other ranks."""
    seconds_per_step: dict[str, float] = Field(default_factory=dict)
    """Estimates of what moving costs: `moved`, `wire`; and of the arithmetic: `compute`."""
    refusals: tuple[Refusal, ...] = ()
    advice: tuple[Advice, ...] = ()
    choices: Choices
    model: dict[str, JsonValue] = Field(default_factory=dict)
    """Facts about the model: parameters, active parameters, KV bytes a token, FLOPs."""
    calibrated: bool = False
    """Activations are measured ones."""
    notes: tuple[str, ...] = ()
    """What was assumed, in sentences for the reader."""

    def phase(self, name: str) -> PlannedPhase | None:
        """The fullest row of a phase (`update`: of its two parts); None: the plan has no such phase."""
        found = [row for row in self.phases if row.phase == name or row.phase.startswith(f"{name}/")]
        return max(found, key=lambda row: row.device_bytes, default=None)

    def evicted(self, phase: str) -> tuple[str, ...]:
        """Names that are off the device during the phase."""
        return tuple(self.choices.evicted.get(phase, ()))

    def as_json(self) -> Mapping[str, JsonValue]:
        """One object."""
        return self.model_dump(mode="json")
