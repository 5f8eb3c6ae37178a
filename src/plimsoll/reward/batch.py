"""One call of the pool: what is still to be scored, what came back, and when too much has failed."""

from collections import deque
from collections.abc import Sequence
from math import ceil

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import RewardError
from plimsoll.reward.call import Outcome
from plimsoll.reward.compose import reward_spec
from plimsoll.reward.signature import Kind
from plimsoll.types import Score, ScoreRequest

_CHUNKS_PER_WORKER = 4
_MAX_CHUNK = 32
"""Requests travel in chunks to save round trips; small enough that the last chunks are shared out evenly."""

FAILED = frozenset({"error", "timeout"})


class ScoringBatch:
    """Requests by their position in the call, and the outcome of each."""

    def __init__(self, requests: Sequence[ScoreRequest], config: RewardConfig) -> None:
        assert len({request.sample_id for request in requests}) == len(requests), "a sample id occurs twice"
        self.requests = tuple(requests)
        self._config = config
        self._outcomes: dict[int, Outcome] = {}
        self._failed: list[int] = []
        self._chunks: deque[list[int]] | None = None

    @property
    def done(self) -> bool:
        """Every request has its outcome."""
        return len(self._outcomes) == len(self.requests)

    def next_chunk(self, kind: Kind) -> list[int]:
        """Positions for one worker; empty when all are handed out."""
        if self._chunks is None:
            self._chunks = deque(self._groups() if kind is Kind.TRL else self._slices())
        return self._chunks.popleft() if self._chunks else []

    def record(self, position: int, outcome: Outcome) -> None:
        """The outcome of one request, once."""
        assert position not in self._outcomes
        self._outcomes[position] = outcome
        if outcome.status in FAILED:
            self._failed.append(position)

    def lose(self, chunk: Sequence[int], kind: Kind, status: str, detail: str) -> None:
        """A worker was lost at the first request of `chunk`; the others go back to the front.

        A call for several responses does not tell which of them it was, so these are repeated one by one.
        """
        assert self._chunks is not None
        first, *rest = chunk
        if kind is Kind.TRL and rest:
            self._chunks.extendleft([position] for position in reversed(chunk))
            return
        self.record(first, Outcome(value=None, status=status, detail=detail))
        if rest:
            self._chunks.appendleft(rest)

    def scores(self) -> list[Score]:
        """In the order of the requests."""
        return [self._score(request, self._outcomes[i]) for i, request in enumerate(self.requests)]

    def check_share(self) -> None:
        """Raise RewardError as soon as it is certain that more than the allowed share fails."""
        failed = self._failed
        share = self._config.max_error_share
        # A share of a handful says little, and dynamic sampling may ask for one prompt: one failure is borne, unless
        # none is to be.
        if len(failed) <= (max(1.0, share * len(self.requests)) if share > 0 else 0):
            return
        num_timeouts = sum(self._outcomes[i].status == "timeout" for i in failed)
        first = min(failed)
        raise RewardError(
            f"{reward_spec(self._config).subject} failed for {len(failed)} of {len(self.requests)} responses "
            f"({len(failed) - num_timeouts} errors, {num_timeouts} time-outs; {len(self._outcomes)} were tried); "
            f"reward.max_error_share = {share:g} allows {share:.0%}. "
            f"The first, sample {self.requests[first].sample_id}:\n{self._outcomes[first].detail}"
        )

    def _score(self, request: ScoreRequest, outcome: Outcome) -> Score:
        return Score(
            sample_id=request.sample_id,
            value=self._config.failed_score if outcome.status in FAILED else outcome.value,
            status=outcome.status,
            detail=outcome.detail,
            parts=outcome.parts,
        )

    def _slices(self) -> list[list[int]]:
        size = min(_MAX_CHUNK, ceil(len(self.requests) / (_CHUNKS_PER_WORKER * self._config.workers)))
        return [list(range(i, min(i + size, len(self.requests)))) for i in range(0, len(self.requests), size)]

    def _groups(self) -> list[list[int]]:
        """The samples of one prompt together, by their index: some functions compare them with one another."""
        groups: dict[object, list[int]] = {}
        for position, request in enumerate(self.requests):
            groups.setdefault(request.sample_id.group, []).append(position)
        return [sorted(group, key=lambda i: self.requests[i].sample_id.index) for group in groups.values()]
