"""The Engine protocol over vLLM's synchronous engine in this process. Imports no vLLM: `rollout/vllm.py` builds it.

    (no weights) → sleep → … → wake(weights) → begin, bucket …, commit → wake(kv_cache) → add, step … → sleep → …

Calls come from the collector's thread and from the main one, never at the same time.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plimsoll.errors import RunError
from plimsoll.rollout.vllm_memory import SleepPool
from plimsoll.rollout.vllm_settings import check_request, request_seed, sampling_arguments
from plimsoll.rollout.vllm_weights import WeightReload
from plimsoll.types import Completion, EnginePart, FinishReason, Request, SampleId

Guard = Callable[[], AbstractContextManager[None]]
"""Entered around every call of the engine that may allocate device memory."""

_DRAIN_STEPS = 16
"""More than the engine keeps under way (two batches), fewer than for ever."""


@dataclass(slots=True, kw_only=True, frozen=True)
class VllmParts:
    """What the engine is driven through; tests write their own."""

    llm: Any
    """vLLM's LLMEngine."""
    core: Any
    """Its EngineCore: `batch_queue`."""
    sampling_params: Callable[..., Any]
    """Makes vLLM's SamplingParams."""
    prompt: Callable[[list[int]], Any]
    """Token ids → vLLM's input."""
    reload: WeightReload
    pool: SleepPool
    dropped: Callable[[EnginePart], list[Tensor]]
    """Tensors of a part whose contents come anew after a sleep."""
    after_wake: Callable[[EnginePart], None]
    """vLLM's own work after a part is mapped again."""
    synchronize: Callable[[], None]
    """Wait for the device."""


@dataclass(slots=True, kw_only=True)
class _Running:
    request: Request
    internal: str  # vLLM's own id of it


class VllmEngine:
    """The protocol ColocatedEngine over vLLM's synchronous engine.

    slot_tokens: prompt + response of one sequence at most. seeded: each request has a seed of its own (`request_seed`);
        vLLM's older runner, which mixtures of experts have, draws seeded rows one by one in Python, so there the
        engine's one generator is used and runs differ. guard: see `Guard`. calls: entered around every call, inside
        the guard. buffers_bytes: what the engine keeps besides its parts.

    The weights are random until the first commit, and `version` is -1.
    """

    def __init__(
        self,
        parts: VllmParts,
        *,
        slot_tokens: int,
        seeded: bool,
        guard: Guard = nullcontext,
        calls: Guard = nullcontext,
        buffers_bytes: int = 0,
    ) -> None:
        self._parts = parts
        self._slot_tokens = slot_tokens
        self._seeded = seeded
        self._guard = guard
        self._calls = calls
        self.buffers_bytes = buffers_bytes
        self._running: dict[str, _Running] = {}  # by the id that vLLM answers with
        self._version = -1
        self._coming: int | None = None

    @property
    def version(self) -> int:
        """Policy version of the weights in use; -1: none."""
        return self._version

    @property
    def idle(self) -> bool:
        """True when nothing is queued or active."""
        return not self._running

    @property
    def weights_bytes(self) -> int:
        """Device bytes of the weights now."""
        return self._parts.pool.mapped_bytes("weights")

    @property
    def kv_bytes(self) -> int:
        """Device bytes of the KV cache now."""
        return self._parts.pool.mapped_bytes("kv_cache")

    @property
    def host_bytes(self) -> int:
        """Host bytes of what is kept over a sleep."""
        return self._parts.pool.host_bytes

    def memory(self) -> tuple[int, int]:
        """(bytes of the pool in torch's counters, which do not see it sleep; bytes of it on the device now)."""
        return self._parts.pool.counted_bytes(), self._parts.pool.mapped_bytes()

    def awake(self, part: EnginePart) -> bool:
        """Whether a part is on the device."""
        return self._parts.pool.awake(part)

    def sleep(self, parts: Sequence[EnginePart]) -> None:
        """Give the memory of these parts back. Cached prefixes are void in any case, without weights the version."""
        with self._calling():
            self._settle()
            self._reset_prefixes()
            self._parts.synchronize()  # the pool is unmapped below torch, whatever still runs on the device
            for part in parts:
                self._parts.pool.sleep(part, self._parts.dropped(part))
                if part == "weights":
                    self._version = -1

    def wake(self, parts: Sequence[EnginePart]) -> None:
        """Take memory for these parts again; buffers in them are as they were."""
        with self._calling():
            for part in parts:
                self._parts.pool.wake(part)
                self._parts.after_wake(part)

    def begin(self, version: int) -> None:
        """Weights of this version follow."""
        assert self.awake("weights"), "weights were sent to an engine whose weights are asleep"
        assert self._coming is None, "one sync at a time"
        with self._calling():
            self._settle()
            self._coming, self._version = version, -1
            self._parts.reload.begin()

    def bucket(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Some of the weights. RunError for a name that vLLM does not know.

        Tensors of a layer that is not complete yet are held until it is: they must not be written to before `commit`.
        """
        assert self._coming is not None, "a bucket before `begin`"
        with self._calling():
            self._parts.reload.bucket(tensors)

    def commit(self, version: int) -> None:
        """All weights are there; RunError when some are not. Prefixes of older weights are forgotten."""
        assert version == self._coming, f"version {version} ends what {self._coming} began"
        with self._calling():
            self._parts.reload.commit()
            self._reset_prefixes()
        self._coming, self._version = None, version

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none; RefusedError when one does not fit."""
        for request in requests:
            check_request(request, self._slot_tokens)
        names = [str(request.sample_id) for request in requests]
        assert len(set(names)) == len(names), "two requests with one sample id"
        assert not set(names) & set(self._running), "a sample id is in use"
        params = [self._sampling(request) for request in requests]
        with self._calling():
            for name, request, wanted in zip(names, requests, params, strict=True):
                internal = self._parts.llm.add_request(name, self._parts.prompt(list(request.token_ids)), wanted)
                self._running[name] = _Running(request=request, internal=str(internal))

    def step(self) -> list[Completion]:
        """Advance what is active by one token; what finished. Empty when idle."""
        if self.idle:
            return []
        parts: tuple[EnginePart, ...] = ("weights", "kv_cache")
        assert all(map(self.awake, parts)), "a step of an engine that sleeps"
        assert self._version >= 0, "a step without weights"
        with self._calling():
            outputs: list[Any] = self._parts.llm.step()
        return [self._finished(output) for output in outputs if output.finished]

    def abort(self, sample_ids: Sequence[SampleId] | None = None) -> list[Completion]:
        """Take requests back (None: all) with what they have so far, in the order they were added.

        Ids that are not in the engine are ignored: they may have finished in the meantime.
        """
        wanted = None if sample_ids is None else {str(sample_id) for sample_id in sample_ids}
        taken = {name: run for name, run in self._running.items() if wanted is None or name in wanted}
        # vLLM answers nothing about a request that is taken back, so what it has is read before.
        states: Mapping[str, Any] = self._parts.llm.output_processor.request_states
        out: list[Completion] = []
        for name, run in taken.items():
            state = states[run.internal]
            tokens = [int(token) for token in state.detokenizer.output_token_ids]
            out.append(self._completion(run.request, tokens, state.logprobs_processor.logprobs, FinishReason.ABORT))
            del self._running[name]
        if taken:
            with self._calling():
                self._parts.llm.abort_request([run.internal for run in taken.values()], internal=True)
                if self.idle:
                    self._settle()
        return out

    @contextmanager
    def _calling(self) -> Generator[None]:
        with self._guard(), self._calls():
            yield

    def _settle(self) -> None:
        """The engine computes one batch ahead: let it end what it has under way for requests that are gone."""
        assert self.idle, "the engine has unfinished requests"
        for _ in range(_DRAIN_STEPS):
            if not self._parts.core.batch_queue:
                return
            self._parts.llm.step()
        raise AssertionError("the engine goes on computing without requests")

    def _reset_prefixes(self) -> None:
        if not self._parts.llm.reset_prefix_cache():
            raise RunError(
                "vLLM did not forget its cached prefixes, as some of its KV blocks are in use; with them, responses"
                " would be sampled from a mixture of two versions of the policy"
            )

    def _sampling(self, request: Request) -> Any:
        seed = request_seed(request, self._version) if self._seeded else None
        return self._parts.sampling_params(**sampling_arguments(request.params, seed))

    def _finished(self, output: Any) -> Completion:
        run = self._running.pop(str(output.request_id))
        (answer,) = output.outputs
        reasons = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
        reason = reasons.get(str(answer.finish_reason))
        if reason is None:
            raise RunError(f"vLLM gave up on sample {run.request.sample_id}: {answer.finish_reason}")
        return self._completion(run.request, [int(token) for token in answer.token_ids], answer.logprobs, reason)

    def _completion(self, request: Request, tokens: list[int], flat: Any, reason: FinishReason) -> Completion:
        # One entry a position, that of the sampled token: no others were asked for.
        logprobs = [float(flat.logprobs[start]) for start in flat.start_indices][: len(tokens)]
        if len(logprobs) != len(tokens) or any(math.isnan(value) for value in logprobs):
            raise RunError(
                f"sample {request.sample_id}: vLLM returned {len(tokens)} tokens with {len(logprobs)} log-probs,"
                f" {sum(map(math.isnan, logprobs))} of which are not numbers; the weights may have diverged (look at"
                " actor/grad_norm in metrics.jsonl)"
            )
        if request.params.temperature == 0:
            logprobs = [0.0] * len(tokens)  # what is certain; vLLM says the softmax's value there
        return Completion(
            sample_id=request.sample_id,
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            finish_reason=reason,
            version=self._version,
        )
