"""The scoring pool: responses are scored in processes of their own, each under a time limit of its own.

The pool keeps a small protocol instead of using an executor, because three things have to be known at a time-out:
which response hangs (only that one is lost; the rest of its chunk is scored by others), which processes it started
(they are looked up while the worker still lives), and how a worker that died by itself ended.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from types import TracebackType
from typing import Self

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import RewardError
from plimsoll.reward.batch import ScoringBatch
from plimsoll.reward.compose import reward_spec
from plimsoll.reward.process import Guard, WorkerProcess, start_limit
from plimsoll.reward.signature import Kind
from plimsoll.reward.worker import BrokenContract, Loading, Ready, StartFailed
from plimsoll.types import Score, ScoreRequest

_TICK_SECONDS = 0.1
"""Longest wait before dead workers and `close` are looked for. A worker's pipe alone does not tell of its end: a
process that it forked may hold the other end open."""


@dataclass(slots=True, kw_only=True)
class _Worker:
    process: WorkerProcess
    deadline: float  # of the response it is at, or of its start; monotonic seconds
    kind: Kind | None = None  # None: still starting
    chunk: list[int] = field(default_factory=list[int])  # positions of the requests it has not answered yet

    @property
    def waited_for(self) -> bool:
        return self.kind is None or bool(self.chunk)


class ScoringPool:
    """Scores with the recipe's reward in `reward.workers` processes; a context manager and a Scorer.

    The processes start on entering and are loaded by the first call. `score` may be called from any thread, one call
    at a time; `close` may interrupt it from another one.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._spec = reward_spec(config)
        self._guard: Guard | None = None
        self._workers: list[_Worker] = []
        self._lock = threading.RLock()
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        assert self._guard is None, "entered twice"
        self._guard = Guard()
        self._fill()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers and what they started; a running `score` raises RewardError. May be called twice."""
        self._closing.set()
        with self._lock:
            for worker in self._workers:
                worker.process.end()
            self._workers = []
            if self._guard is not None:
                self._guard.close()
                self._guard = None

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """One Score per request, in the order of the requests.

        A time-out, an exception, a value that is not a reward and the death of the worker each cost one response:
        status "timeout" or "error", value `reward.failed_score`. Raises RewardError when more than
        `reward.max_error_share` of the requests failed, at once when a function of TRL's signature returned a wrong
        number of values, and when the function cannot be loaded.
        """
        if not requests:
            return []
        with self._lock:
            self._check_open()
            self._fill()
            batch = ScoringBatch(requests, self._config)
            try:
                self._run(batch)
            except BaseException:
                self._drop_busy()
                raise
            return batch.scores()

    def _run(self, batch: ScoringBatch) -> None:
        while not batch.done:
            self._check_open()
            self._hand_out(batch)
            for worker in self._readable():
                self._receive(worker, batch)
            for worker in list(self._workers):
                self._watch(worker, batch)
            batch.check_share()

    def _hand_out(self, batch: ScoringBatch) -> None:
        for worker in self._workers:
            if worker.kind is None or worker.chunk:
                continue
            chunk = batch.next_chunk(worker.kind)
            if not chunk:
                return
            worker.chunk = chunk
            worker.deadline = time.monotonic() + self._config.timeout
            with suppress(OSError):  # it has just died: _watch sees that
                worker.process.connection.send([batch.requests[index] for index in chunk])

    def _readable(self) -> list[_Worker]:
        """Workers that have said something; waits until one does, or a deadline, or a tick."""
        waited_for = {w.process.connection: w for w in self._workers if w.waited_for}
        soonest = min((w.deadline for w in waited_for.values()), default=0.0) - time.monotonic()
        ready = wait(list(waited_for), timeout=max(0.0, min(_TICK_SECONDS, soonest)))
        return [worker for connection, worker in waited_for.items() if connection in ready]

    def _receive(self, worker: _Worker, batch: ScoringBatch) -> None:
        try:
            message = worker.process.connection.recv()
        except (EOFError, OSError):
            self._died(worker, batch)
            return
        match message:
            case Ready(kind=kind):
                worker.kind = kind
            case Loading():
                worker.deadline = time.monotonic() + start_limit(self._config.timeout)
            case StartFailed(reasons=reasons, traceback=trace):
                raise RewardError("\n".join((*reasons, trace)))
            case BrokenContract(reason=reason):
                raise RewardError(f"{self._spec.setting}: {reason}")
            case outcomes:
                for outcome in outcomes:
                    batch.record(worker.chunk.pop(0), outcome)
                worker.deadline = time.monotonic() + self._config.timeout

    def _watch(self, worker: _Worker, batch: ScoringBatch) -> None:
        # A message that is already there counts, however late we come to read it.
        if not worker.waited_for or worker.process.connection.poll():
            return
        if worker.process.dead:
            self._died(worker, batch)
        elif time.monotonic() > worker.deadline:
            self._timed_out(worker, batch)

    def _died(self, worker: _Worker, batch: ScoringBatch) -> None:
        ended = self._replace(worker)
        if worker.kind is None:
            raise RewardError(f"{self._spec.subject}: a process that imported it ended with {ended}.")
        batch.lose(worker.chunk, worker.kind, "error", f"the process that scored it ended with {ended}")

    def _timed_out(self, worker: _Worker, batch: ScoringBatch) -> None:
        self._replace(worker)
        if worker.kind is None:
            limit = start_limit(self._config.timeout)
            raise RewardError(f"{self._spec.subject}: importing it took more than {limit:g} s.")
        detail = f"no score within reward.timeout = {self._config.timeout:g} s; its process was killed"
        batch.lose(worker.chunk, worker.kind, "timeout", detail)

    def _replace(self, worker: _Worker) -> str:
        ended = worker.process.end()
        self._workers.remove(worker)
        self._fill()
        return ended

    def _fill(self) -> None:
        """As many workers as configured, none of them dead."""
        for worker in [w for w in self._workers if not w.waited_for and w.process.dead]:
            worker.process.end()
            self._workers.remove(worker)
        while len(self._workers) < self._config.workers:
            process = WorkerProcess(self._spec, self._guard)
            deadline = time.monotonic() + start_limit(self._config.timeout)
            self._workers.append(_Worker(process=process, deadline=deadline))

    def _drop_busy(self) -> None:
        """After an error: what busy workers would say belongs to a batch that nobody waits for."""
        for worker in [w for w in self._workers if w.waited_for]:
            worker.process.end()
            self._workers.remove(worker)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise RewardError("Scoring was stopped: its processes have been closed.")
