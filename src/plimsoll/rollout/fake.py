"""An engine without a model: what it says is a function that the test writes. Shipped, so that others need no mocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plimsoll.types import Completion, FinishReason, Request, SampleId

Script = Callable[[Request, int], Sequence[int]]
"""(request, policy version) → the token ids that the model would go on to say. What comes after a stop token or after
max_tokens is never asked for; running out before either is a mistake of the script."""


@dataclass(slots=True, kw_only=True)
class _Active:
    request: Request
    tokens: Sequence[int]
    count: int = 0


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """The Engine protocol over a script; one token a step and slot, admission in queue order.

    logprob: the log-probability of every token. `added` and `versions` record what was asked, for tests to look at.
    """

    script: Script
    num_slots: int = 8
    logprob: float = -1.0
    version: int = 0
    kv_bytes: int = 0
    added: list[Request] = field(default_factory=list[Request])
    versions: list[int] = field(default_factory=list[int])
    _queue: list[Request] = field(default_factory=list[Request])
    _active: list[_Active] = field(default_factory=list[_Active])

    @property
    def idle(self) -> bool:
        """True when nothing is queued or active."""
        return not self._queue and not self._active

    def set_version(self, version: int) -> None:
        """New weights; unfinished requests start again, as in the native engine."""
        self._queue[:0] = [active.request for active in self._active]
        self._active.clear()
        self.version = version
        self.versions.append(version)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._queue.extend(requests)
        self.added.extend(requests)

    def step(self) -> list[Completion]:
        """One token for each active request; what finished, in the order of admission."""
        while self._queue and len(self._active) < self.num_slots:
            request = self._queue.pop(0)
            self._active.append(_Active(request=request, tokens=self.script(request, self.version)))
        finished: list[Completion] = []
        still: list[_Active] = []
        for active in self._active:
            params = active.request.params
            assert active.count < len(active.tokens), f"the script of {active.request.sample_id} ran out of tokens"
            active.count += 1
            if active.tokens[active.count - 1] in params.stop_token_ids:
                finished.append(self._completion(active, FinishReason.STOP))
            elif active.count == params.max_tokens:
                finished.append(self._completion(active, FinishReason.LENGTH))
            else:
                still.append(active)
        self._active = still
        return finished

    def abort(self, sample_ids: Sequence[SampleId] | None = None) -> list[Completion]:
        """Take requests back (None: all) with what they have so far; unknown ids are ignored."""
        everything = [*self._active, *(_Active(request=request, tokens=()) for request in self._queue)]
        taken = [a for a in everything if sample_ids is None or a.request.sample_id in sample_ids]
        gone = {active.request.sample_id for active in taken}
        self._active = [active for active in self._active if active.request.sample_id not in gone]
        self._queue = [request for request in self._queue if request.sample_id not in gone]
        return [self._completion(active, FinishReason.ABORT) for active in taken]

    def _completion(self, active: _Active, reason: FinishReason) -> Completion:
        return Completion(
            sample_id=active.request.sample_id,
            token_ids=tuple(active.tokens[: active.count]),
            logprobs=(self.logprob,) * active.count,
            finish_reason=reason,
            version=self.version,
        )
