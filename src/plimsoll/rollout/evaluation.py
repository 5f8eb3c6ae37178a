"""Accuracy and pass@k on held-out rows: what training measures on the way and `plimsoll eval` afterwards."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plimsoll.config.rollout import EvalSampling
from plimsoll.rollout.collector import requests_of, response_text, score_request
from plimsoll.rollout.generate import generate
from plimsoll.types import Engine, GroupId, Prompt, SamplingParams, Scorer

EVAL_EPOCH = (1 << 31) - 1
"""Epoch number of evaluation groups: their noise is never that of a training group."""


@dataclass(slots=True, kw_only=True, frozen=True)
class EvalResult:
    """Measured over exactly `n` problems; a response that was not scored counts as wrong."""

    accuracy: float  # share of correct responses
    pass_at_k: dict[int, float]  # k -> unbiased estimate
    mean_score: float  # over scored responses
    mean_length: float  # response tokens
    n: int  # problems
    num_unscored: int  # responses

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl."""
        return {
            "eval/accuracy": self.accuracy,
            **{f"eval/pass_at_{k}": value for k, value in self.pass_at_k.items()},
            "eval/score_mean": self.mean_score,
            "eval/length_mean": self.mean_length,
            "eval/n": float(self.n),
            "eval/unscored": float(self.num_unscored),
        }

    def as_json(self) -> dict[str, object]:
        """What `plimsoll eval` prints."""
        return {
            "accuracy": self.accuracy,
            "pass_at_k": {str(k): value for k, value in self.pass_at_k.items()},
            "n": self.n,
            "mean_score": self.mean_score,
            "mean_length": self.mean_length,
            "unscored": self.num_unscored,
        }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al., arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def powers_up_to(num_samples: int) -> list[int]:
    """1, 2, 4, … up to `num_samples`, itself included."""
    return sorted({1 << i for i in range(num_samples.bit_length())} | {num_samples})


def evaluate(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    *,
    sampling: EvalSampling,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    seed: int,
    decode: Callable[[Sequence[int]], str],
    stop: Callable[[], bool] = lambda: False,
) -> EvalResult:
    """Sample every prompt `sampling.samples` times and score the responses. GenerationStopped when `stop` says so."""
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
    )
    draws = [(GroupId(epoch=EVAL_EPOCH, row=prompt.row), prompt) for prompt in prompts]
    completions = generate(engine, requests_of(draws, sampling.samples, params, seed), stop=stop)
    by_group = dict(draws)
    scores = scorer.score(
        [score_request(by_group[sid.group], done, response_text(done, decode)) for sid, done in completions.items()]
    )
    correct = dict.fromkeys(by_group, 0)
    for score in scores:
        correct[score.sample_id.group] += score.value is not None and score.value >= sampling.correct_score
    values = [score.value for score in scores if score.value is not None]
    num_samples = sampling.samples
    return EvalResult(
        accuracy=sum(correct.values()) / (len(draws) * num_samples),
        pass_at_k={
            k: sum(pass_at_k(num_samples, c, k) for c in correct.values()) / len(draws)
            for k in powers_up_to(num_samples)
        },
        mean_score=sum(values) / len(values) if values else 0.0,
        mean_length=sum(len(done.token_ids) for done in completions.values()) / len(completions),
        n=len(draws),
        num_unscored=len(scores) - len(values),
    )
