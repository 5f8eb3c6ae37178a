"""What the page shows, as it is embedded in it. The numbers are those of the run folder, untouched."""

from dataclasses import dataclass

from pydantic import JsonValue

Number = int | float


@dataclass(slots=True, kw_only=True, frozen=True)
class Curve:
    """One key of metrics.jsonl over the steps that have it; `values` holds None where the row says null."""

    key: str
    steps: list[int]
    values: list[Number | None]


@dataclass(slots=True, kw_only=True, frozen=True)
class PhaseTotal:
    """Seconds of one `time/NAME` over every row of the run."""

    name: str
    rows: int
    seconds: float
    highest: float
    highest_step: int


@dataclass(slots=True, kw_only=True, frozen=True)
class Times:
    """Seconds by phase: `columns` has one list a name, each as long as `steps`; None where a step lacks the phase."""

    steps: list[int]
    columns: dict[str, list[Number | None]]
    totals: list[PhaseTotal]


@dataclass(slots=True, kw_only=True, frozen=True)
class Extreme:
    """The highest value of a quantity over the run (or the lowest) and the first step that had it; bytes or seconds."""

    value: Number
    step: int


@dataclass(slots=True, kw_only=True, frozen=True)
class Compared:
    """The row of a phase that needed most, and what the plan said for that same row. Bytes."""

    value: int
    step: int
    planned: int | None


@dataclass(slots=True, kw_only=True, frozen=True)
class PhaseSummary:
    """One phase of one process over every row of memory.jsonl, also of those that the page does not draw."""

    phase: str
    rows: int
    failed: int
    seconds: float
    highest: dict[str, Extreme]  # key of memory.jsonl, or a level → highest value
    residents: dict[str, Extreme]
    predicted: dict[str, int]  # last prediction by resident
    device: Compared | None  # level `device_peak`
    host: Compared | None  # growth of host memory over the worker's start, which is what a plan speaks of
    host_left: Extreme | None  # the lowest that node and cgroup could still give


@dataclass(slots=True, kw_only=True, frozen=True)
class Track:
    """The ledger of one process in order of time; every list has one entry a row of memory.jsonl. Bytes."""

    rank: int
    device: str
    process: str
    steps: list[int]
    phases: list[str]
    failed: list[bool]
    seconds: list[Number | None]
    values: dict[str, list[int | None]]
    levels: dict[str, list[int | None]]  # heights of the lines, sums of several values: see levels.py
    seconds_border: list[Number | None]  # of moving residents before the phase
    residents: dict[str, list[int | None]]
    predicted: dict[str, list[int | None]]
    on_host: list[str]  # residents of a device run that are in host memory
    in_engine: list[str]  # residents that lie in the pools of an engine, not in torch's
    summary: list[PhaseSummary]


@dataclass(slots=True, kw_only=True, frozen=True)
class Rollout:
    """A sampled response with its score; the keys of rollouts/step_N.jsonl."""

    step: int
    group: str
    sample: int
    prompt: str
    response: str
    answer: str
    reward: Number | None
    score: Number | None
    score_parts: dict[str, Number | None]
    score_status: str
    score_detail: str
    prompt_length: int | None
    response_length: int | None
    finish_reason: str
    masked: bool
    version: int | None


@dataclass(slots=True, kw_only=True, frozen=True)
class RunReport:
    """One run, or a ledger alone. `notes` says what was left out or damaged, in sentences for who reads the page."""

    kind: str  # "run", or "ledger": memory.jsonl and nothing else of a run
    name: str
    path: str
    model: str
    algorithm: str
    device: str
    state: str  # "running", "finished" or "stopped"
    steps_done: int
    steps_planned: int | None
    num_rows: int
    last_row_at: float | None  # seconds since 1970
    recipe: dict[str, str]  # key → value as JSON
    curves: list[Curve]
    times: Times
    ledger: list[Track]
    plan: dict[str, JsonValue] | None  # MemoryPlan; None: not planned
    rollouts: list[Rollout]
    notes: list[str]

    def brief(self) -> dict[str, str | int | None]:
        """What `plimsoll report --json` says of the run."""
        return {
            "name": self.name,
            "path": self.path,
            "state": self.state,
            "steps": self.steps_done,
            "planned": self.steps_planned,
        }
