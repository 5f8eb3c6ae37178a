"""A scorer without processes, for tests and for trying things out."""

from collections.abc import Callable, Sequence

from plimsoll.types import Score, ScoreRequest


class FakeScorer:
    """Calls `function` in this process, one request at a time; what it raises is raised to the caller."""

    def __init__(self, function: Callable[[ScoreRequest], float | None]) -> None:
        self._function = function
        self.calls: list[tuple[ScoreRequest, ...]] = []
        """The requests of every call of `score`, in order."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """One Score per request, in the order of the requests."""
        self.calls.append(tuple(requests))
        return [self._score(request) for request in requests]

    def _score(self, request: ScoreRequest) -> Score:
        value = self._function(request)
        return Score(sample_id=request.sample_id, value=value, status="unscored" if value is None else "ok")
