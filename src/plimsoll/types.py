"""The life of a sample, one type a stage. This is the only vocabulary that stages share.

    Prompt ──rollout──▶ Sample ──group──▶ Group ──pack──▶ TrainBatch ⊃ MiniBatch ⊃ MicroBatch ──update──▶ StepStats

Shape suffixes: T packed tokens of a micro-batch, S sequences, L tokens of one sample, V vocabulary, H hidden.

Worked example, two samples of the prompt "12+3=" (5 tokens), one token a character:

    sample 0 says "15$" (stop)   lengths: prompt 5, response 3, L = 8
    sample 1 says "151"  (length) lengths: prompt 5, response 3, L = 8

The driver holds ids, lengths, rewards, versions and a `DataRef` a sample. The token columns stay in the plane
(`plimsoll.plane`), under that reference, each of shape [L]:

    token_ids         int64    prompt then response
    sampled           bool     True where the policy sampled the token: the loss mask
    rollout_logprobs  float32  log-probability under the distribution sampled from; 0 where not sampled
    old_logprobs      float32  by the trainer before the update; only when it is needed
    ref_logprobs      float32  by the frozen reference; only when a KL coefficient is set
    advantages        float32  0 where not sampled

The value at index i belongs to token i: it was computed from the hidden state at i - 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # the vocabulary is imported by processes that must start without torch
    from torch import Tensor


class FinishReason(StrEnum):
    """Why a sample ended. The loss mask comes from lengths and this, never from token values."""

    STOP = "stop"  # a stop token was sampled; it is part of the response and is trained
    LENGTH = "length"  # rollout.max_response_tokens reached
    ABORT = "abort"  # taken back by the collector


@dataclass(slots=True, kw_only=True, frozen=True)
class DataRef:
    """Names the columns of one sample in the plane."""

    key: str


@dataclass(slots=True, kw_only=True, frozen=True)
class GroupId:
    """The samples of one prompt in one epoch."""

    epoch: int
    row: int  # row number in the source as read, before any row is dropped

    def __str__(self) -> str:
        return f"{self.epoch}:{self.row}"


@dataclass(slots=True, kw_only=True, frozen=True)
class SampleId:
    """One sample of a group."""

    group: GroupId
    index: int  # 0 <= index < rollout.samples_per_prompt

    def __str__(self) -> str:
        return f"{self.group}:{self.index}"


@dataclass(slots=True, kw_only=True, frozen=True)
class Prompt:
    """One usable row, tokenised once. These ids go to the engine and into the training row, unchanged."""

    row: int  # row number in the source as read
    token_ids: tuple[int, ...]
    text: str  # what a person reads: the last user message, or the plain prompt
    messages: tuple[Mapping[str, str], ...]  # as given in the row; a plain string is one user message
    answer: Any = None
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the row's other columns
    response: str | None = None  # supervised target (SFT rows only)
    plain: bool = False  # True: the row's prompt was a string, not a list of messages


@dataclass(slots=True, kw_only=True, frozen=True)
class SamplingParams:
    """Complete: nothing is inherited from the model's generation_config.json."""

    temperature: float  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    max_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True, frozen=True)
class Request:
    """What an engine is asked for. The noise is keyed by (seed, policy version, group, sample, position)."""

    sample_id: SampleId
    token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


@dataclass(slots=True, kw_only=True, frozen=True)
class Completion:
    """What an engine returns for one request."""

    sample_id: SampleId
    token_ids: tuple[int, ...]  # response only, the sampled stop token included
    logprobs: tuple[float, ...]  # of the distribution sampled from, one a response token
    finish_reason: FinishReason
    version: int  # policy version that sampled it


class Engine(Protocol):
    """An inference engine that is pumped; it never blocks on anything but its own arithmetic."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use; set by the sync stage."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests; admission is in the order given."""
        ...

    def step(self) -> list[Completion]:
        """Advance every active sequence by one token; return what finished. Empty when idle."""
        ...

    def abort(self, sample_ids: Sequence[SampleId] | None = None) -> list[Completion]:
        """Take requests back (None: all); partial outputs come with FinishReason.ABORT."""
        ...

    @property
    def idle(self) -> bool:
        """True when nothing is queued or active."""
        ...


EnginePart = Literal["weights", "kv_cache"]
"""What an engine drops while it sleeps."""


class ColocatedEngine(Engine, Protocol):
    """An engine with weights of its own on the trainer's device: it sleeps while others need the memory, and each sync
    sends it the weights anew, in buckets.

        sleep → … → wake(weights) → begin → bucket, bucket, … → commit → wake(kv_cache) → add, step, …
    """

    @property
    def weights_bytes(self) -> int:
        """Device bytes of the weights now; 0 while they sleep."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Device bytes of the KV cache now; 0 while it sleeps."""
        ...

    def awake(self, part: EnginePart) -> bool:
        """Whether a part is on the device."""
        ...

    def sleep(self, parts: Sequence[EnginePart]) -> None:
        """Give the memory of these parts back, contents dropped. The engine must be idle and the parts awake. Without
        its weights `version` is -1, until the next commit."""
        ...

    def wake(self, parts: Sequence[EnginePart]) -> None:
        """Take memory for these parts again, without contents."""
        ...

    def begin(self, version: int) -> None:
        """Weights of this version follow; `version` is -1 until they are all there. The engine must be idle."""
        ...

    def bucket(self, tensors: "Sequence[tuple[str, Tensor]]") -> None:
        """Some of the weights, by the names of a Hugging Face checkpoint, each name in one bucket only. The tensors
        are read before the call returns and not kept."""
        ...

    def commit(self, version: int) -> None:
        """That was all of them: an error if it was not. Cached prefixes are void."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class ScoreRequest:
    """One response to be scored. Results are keyed by sample id, never by position."""

    sample_id: SampleId
    prompt: str
    messages: tuple[Mapping[str, str], ...]
    response: str
    answer: Any
    data_source: str
    extra: Mapping[str, Any]
    plain: bool = False  # Prompt.plain: functions of TRL's signature then get strings instead of messages


@dataclass(slots=True, kw_only=True, frozen=True)
class Score:
    """`value` None: not scored; the sample is left out of its group and of the loss, and counted."""

    sample_id: SampleId
    value: float | None
    status: str  # "ok" | "unscored" (the function said None) | "timeout" | "error"
    detail: str = ""  # traceback or reason when status is "timeout" or "error"
    parts: Mapping[str, float] = field(default_factory=dict[str, float])  # other numbers that the function returned


class Scorer(Protocol):
    """Scores responses in processes of its own."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """One Score per request, in the order of the requests."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class Sample:
    """A scored response as the driver sees it: no tokens, only lengths and a reference."""

    id: SampleId
    ref: DataRef
    prompt_length: int
    response_length: int
    finish_reason: FinishReason
    version: int
    score: Score
    reward: float | None  # score after overlong shaping; None: not scored
    masked: bool = False  # True: in its group's statistics, but not in the loss (overlong filter)
    prompt_text: str = ""
    response_text: str = ""

    @property
    def length(self) -> int:
        """L: tokens of prompt and response."""
        return self.prompt_length + self.response_length


@dataclass(slots=True, kw_only=True, frozen=True)
class Group:
    """All samples of one prompt in one epoch, under one policy version."""

    id: GroupId
    samples: tuple[Sample, ...]
    prompt: Prompt


@dataclass(slots=True, kw_only=True, frozen=True)
class MicroBatch:
    """Samples that go through the model together, packed into T tokens without padding."""

    samples: tuple[Sample, ...]

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(sample.length for sample in self.samples)


@dataclass(slots=True, kw_only=True, frozen=True)
class MiniBatch:
    """One optimizer step. Denominators are global: all ranks, all micro-batches, from the final mask."""

    micro_batches: tuple[MicroBatch, ...]
    num_loss_tokens: int  # sampled tokens of samples that are in the loss
    num_loss_sequences: int  # samples in the loss with at least one sampled token


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainBatch:
    """What one step of the loop trains on."""

    step: int
    groups: tuple[Group, ...]  # kept groups, with every sample (statistics need all)
    mini_batches: tuple[MiniBatch, ...]  # in order; repeated over train.epochs_per_rollout by the update

    def samples(self) -> list[Sample]:
        """Every sample that is in some micro-batch."""
        return [s for mini in self.mini_batches for micro in mini.micro_batches for s in micro.samples]


@dataclass(slots=True, kw_only=True, frozen=True)
class StepStats:
    """What a stage reports: plain numbers by metric name (`actor/entropy`, …), ready for metrics.jsonl."""

    values: Mapping[str, float]
