"""An engine without a model: what it says is a function that the test writes. Shipped, so that others need no mocks.

It also keeps the books that a real engine in the trainer's process keeps: weights and KV cache that sleep and wake, by
bytes, weights that arrive in buckets, a prefix cache, and a log of all of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plimsoll.types import Completion, EnginePart, FinishReason, Request, SampleId

if TYPE_CHECKING:
    from torch import Tensor

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
    """The protocols Engine and ColocatedEngine over a script; one token a step and slot, admission in queue order.

    logprob: the log-probability of every token. `weights_size`, `kv_size`: bytes while awake. `accepts`: names that
        `bucket` must bring, each once; None: any. `added`, `versions` and `events` record what was asked, for tests to
        look at; several fakes may share one list of events. `watch` is called after each event, with the ledger as it
        then is.
    """

    script: Script
    num_slots: int = 8
    logprob: float = -1.0
    version: int = 0
    weights_size: int = 0
    kv_size: int = 0
    accepts: frozenset[str] | None = None
    prefix_hits: int = 0
    prefix_misses: int = 0
    added: list[Request] = field(default_factory=list[Request])
    versions: list[int] = field(default_factory=list[int])
    events: list[str] = field(default_factory=list[str])
    watch: Callable[[], None] | None = None
    _queue: list[Request] = field(default_factory=list[Request])
    _active: list[_Active] = field(default_factory=list[_Active])
    _asleep: set[EnginePart] = field(default_factory=set[EnginePart])
    _prefixes: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    _coming: int | None = None  # the version whose buckets are under way
    _arrived: set[str] = field(default_factory=set[str])

    @property
    def idle(self) -> bool:
        """True when nothing is queued or active."""
        return not self._queue and not self._active

    @property
    def weights_bytes(self) -> int:
        """Of the weights, now."""
        return 0 if "weights" in self._asleep else self.weights_size

    @property
    def kv_bytes(self) -> int:
        """Of the KV cache, now."""
        return 0 if "kv_cache" in self._asleep else self.kv_size

    def awake(self, part: EnginePart) -> bool:
        """Whether a part is on the device."""
        return part not in self._asleep

    def sleep(self, parts: Sequence[EnginePart]) -> None:
        """Drop parts and what is in them. The prefixes go with the KV cache, the version with the weights."""
        assert self.idle, "an engine with unfinished requests was put to sleep"
        for part in parts:
            assert part not in self._asleep, f"{part} is asleep already"
            self._asleep.add(part)
            if part == "weights":
                self.version = -1
            self._prefixes.clear()
            self._event(f"engine.sleep({part})")

    def wake(self, parts: Sequence[EnginePart]) -> None:
        """Memory for parts, without contents."""
        for part in parts:
            assert part in self._asleep, f"{part} is awake already"
            self._asleep.remove(part)
            self._event(f"engine.wake({part})")

    def begin(self, version: int) -> None:
        """Buckets of this version follow."""
        assert self.awake("weights"), "weights were sent to an engine whose weights are asleep"
        assert self._coming is None, "one sync at a time"
        self._coming, self._arrived = version, set()
        self.version = -1
        self._event("engine.begin")

    def bucket(self, tensors: "Sequence[tuple[str, Tensor]]") -> None:
        """Some of the weights. Unknown names and names that come twice are mistakes."""
        assert self._coming is not None, "a bucket before `begin`"
        for name, _ in tensors:
            assert self.accepts is None or name in self.accepts, f"no parameter is made of {name}"
            assert name not in self._arrived, f"{name} came twice"
            self._arrived.add(name)
        self._event("engine.bucket")

    def commit(self, version: int) -> None:
        """All weights are there; what was computed with older ones is void."""
        assert version == self._coming, f"version {version} ends what {self._coming} began"
        missing = (self.accepts or frozenset()) - self._arrived
        assert not missing, f"these weights never came: {sorted(missing)}"
        self._coming = None
        self.set_version(version)
        self._event("engine.commit")

    def set_version(self, version: int) -> None:
        """New weights; unfinished requests start again, as in the native engine."""
        self._queue[:0] = [active.request for active in self._active]
        self._active.clear()
        self._prefixes.clear()
        self.version = version
        self.versions.append(version)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._queue.extend(requests)
        self.added.extend(requests)

    def step(self) -> list[Completion]:
        """One token for each active request; what finished, in the order of admission."""
        assert self.idle or not self._asleep, f"a step while {sorted(self._asleep)} is asleep"
        while self._queue and len(self._active) < self.num_slots:
            request = self._queue.pop(0)
            self._look_up(request.token_ids)
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

    def _look_up(self, prefix: tuple[int, ...]) -> None:
        if prefix in self._prefixes:
            self.prefix_hits += 1
        else:
            self.prefix_misses += 1
            self._prefixes.add(prefix)

    def _event(self, event: str) -> None:
        self.events.append(event)
        if self.watch is not None:
            self.watch()

    def _completion(self, active: _Active, reason: FinishReason) -> Completion:
        return Completion(
            sample_id=active.request.sample_id,
            token_ids=tuple(active.tokens[: active.count]),
            logprobs=(self.logprob,) * active.count,
            finish_reason=reason,
            version=self.version,
        )
