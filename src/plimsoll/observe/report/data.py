"""What the page shows, as it is embedded in it. The numbers are those of the run folder, untouched."""

from dataclasses import dataclass

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
class Highest:
    """The highest value of a quantity over the run and the first step that had it. Bytes, or seconds."""

    value: Number
    step: int


@dataclass(slots=True, kw_only=True, frozen=True)
class PhaseSummary:
    """One phase of one process over every row of memory.jsonl, also of those that the page does not draw."""

    phase: str
    rows: int
    failed: int
    seconds: float
    highest: dict[str, Highest]  # key of memory.jsonl → highest value
    residents: dict[str, Highest]
    predicted: dict[str, int]  # last prediction by resident


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
    residents: dict[str, list[int | None]]
    predicted: dict[str, list[int | None]]
    on_host: list[str]  # residents of a device run that are in host memory
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
    """One run. `notes` says what was left out, missing or damaged, in sentences for the reader of the page."""

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
