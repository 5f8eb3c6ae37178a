"""The collector: prompts in, scored groups out. It pumps the engine and calls the scorer in a thread of its own, so
that the driver may do other work between `start` and `result`."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from plimsoll.plane.columns import put_sample
from plimsoll.plane.local import LocalPlane
from plimsoll.rollout.generate import generate
from plimsoll.types import (
    Completion,
    DataRef,
    Engine,
    FinishReason,
    Group,
    GroupId,
    Prompt,
    Request,
    Sample,
    SampleId,
    SamplingParams,
    Score,
    Scorer,
    ScoreRequest,
)

Draw = tuple[GroupId, Prompt]

CLOSE_SECONDS = 5.0
"""How long `close` waits for a running round."""


@dataclass(slots=True, kw_only=True, frozen=True)
class CollectorSettings:
    """What every round of a run has in common."""

    samples_per_prompt: int
    params: SamplingParams
    seed: int
    overlong_filter: bool  # responses that hit max_tokens stay out of the loss
    length_penalty: Callable[[int], float]  # response length -> number <= 0 that is added to the score


@dataclass(slots=True, kw_only=True, frozen=True)
class Collected:
    """One round of generation, groups in the order of the prompts given."""

    groups: tuple[Group, ...]
    num_tokens: int  # response tokens sampled
    generate_seconds: float
    score_seconds: float


def requests_of(draws: Sequence[Draw], num_samples: int, params: SamplingParams, seed: int) -> list[Request]:
    """`num_samples` requests a prompt, groups in the order given."""
    return [
        Request(sample_id=SampleId(group=group, index=index), token_ids=prompt.token_ids, params=params, seed=seed)
        for group, prompt in draws
        for index in range(num_samples)
    ]


def response_text(completion: Completion, decode: Callable[[Sequence[int]], str]) -> str:
    """The text that rewards read: without the stop token that ended it."""
    ids = completion.token_ids
    return decode(ids[:-1] if completion.finish_reason is FinishReason.STOP else ids)


def score_request(prompt: Prompt, completion: Completion, text: str) -> ScoreRequest:
    """What the scorer is asked about one response."""
    return ScoreRequest(
        sample_id=completion.sample_id,
        prompt=prompt.text,
        messages=prompt.messages,
        response=text,
        answer=prompt.answer,
        data_source=prompt.data_source,
        extra=prompt.extra,
        plain=prompt.plain,
    )


class Collector:
    """Runs one round at a time; a round is a set of prompts, each sampled `samples_per_prompt` times."""

    def __init__(
        self,
        *,
        engine: Engine,
        scorer: Scorer,
        plane: LocalPlane,
        decode: Callable[[Sequence[int]], str],
        settings: CollectorSettings,
    ) -> None:
        self._engine = engine
        self._scorer = scorer
        self._plane = plane
        self._decode = decode
        self._settings = settings
        # One thread for all rounds: a GPU library keeps handles and caches for each thread that ever called it.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collector")
        self._stopping = threading.Event()
        self._round: Future[Collected] | None = None

    def start(self, draws: Sequence[Draw]) -> None:
        """Begin a round; the engine already has the weights it shall sample with."""
        assert self._round is None, "a round is running"
        self._round = self._executor.submit(self._collect, tuple(draws))

    def result(self) -> Collected:
        """Wait for the round. Raises what the scorer or the engine raised."""
        assert self._round is not None, "no round was started"
        round_, self._round = self._round, None
        return round_.result()

    def close(self) -> None:
        """End a running round: the engine is emptied at its next step, a call of the scorer at its own limit."""
        self._stopping.set()
        if self._round is not None:
            wait([self._round], timeout=CLOSE_SECONDS)
            self._round = None
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _collect(self, draws: tuple[Draw, ...]) -> Collected:
        settings = self._settings
        begin = time.perf_counter()
        requests = requests_of(draws, settings.samples_per_prompt, settings.params, settings.seed)
        completions = generate(self._engine, requests, stop=self._stopping.is_set)
        generated = time.perf_counter()
        texts = {sample_id: response_text(done, self._decode) for sample_id, done in completions.items()}
        prompts = dict(draws)
        scores = self._scorer.score(
            [score_request(prompts[sid.group], done, texts[sid]) for sid, done in completions.items()]
        )
        by_id = {score.sample_id: score for score in scores}
        groups = tuple(self._group(group, prompt, completions, texts, by_id) for group, prompt in draws)
        return Collected(
            groups=groups,
            num_tokens=sum(len(done.token_ids) for done in completions.values()),
            generate_seconds=generated - begin,
            score_seconds=time.perf_counter() - generated,
        )

    def _group(
        self,
        group: GroupId,
        prompt: Prompt,
        completions: Mapping[SampleId, Completion],
        texts: Mapping[SampleId, str],
        scores: Mapping[SampleId, Score],
    ) -> Group:
        samples: list[Sample] = []
        for index in range(self._settings.samples_per_prompt):
            sample_id = SampleId(group=group, index=index)
            samples.append(self._sample(prompt, completions[sample_id], texts[sample_id], scores[sample_id]))
        return Group(id=group, samples=tuple(samples), prompt=prompt)

    def _sample(self, prompt: Prompt, completion: Completion, text: str, score: Score) -> Sample:
        ref = DataRef(key=f"{completion.sample_id}@{completion.version}")
        put_sample(self._plane, ref, prompt.token_ids, completion.token_ids, completion.logprobs)
        response_length = len(completion.token_ids)
        overlong = completion.finish_reason is FinishReason.LENGTH
        penalty = self._settings.length_penalty(response_length)
        return Sample(
            id=completion.sample_id,
            ref=ref,
            prompt_length=len(prompt.token_ids),
            response_length=response_length,
            finish_reason=completion.finish_reason,
            version=completion.version,
            score=score,
            reward=None if score.value is None else score.value + penalty,
            masked=self._settings.overlong_filter and overlong,
            prompt_text=prompt.text,
            response_text=text,
        )
