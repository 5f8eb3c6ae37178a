"""Accuracy and pass@k on held-out rows: what training measures on the way and `plimsoll eval` afterwards."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from plimsoll.config.rollout import EvalSampling
from plimsoll.errors import RewardError
from plimsoll.rollout.collector import requests_of, response_text, score_request
from plimsoll.rollout.generate import generate
from plimsoll.types import Engine, GroupId, Prompt, SamplingParams, Score, Scorer

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
    parts: Mapping[str, float] = field(default_factory=dict[str, float])  # name -> mean over responses that have it

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl."""
        return {
            "eval/accuracy": self.accuracy,
            **{f"eval/pass_at_{k}": value for k, value in self.pass_at_k.items()},
            "eval/score_mean": self.mean_score,
            **{f"eval/part/{name}": value for name, value in self.parts.items()},
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
            "parts": dict(self.parts),
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
    """Sample every prompt `sampling.samples` times and score the responses.

    GenerationStopped when `stop` says so; RewardError when no response has `rollout.eval.correct_part`.
    """
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
    _check_part(scores, sampling.correct_part)
    correct = dict.fromkeys(by_group, 0)
    for score in scores:
        value = _judged(score, sampling.correct_part)
        correct[score.sample_id.group] += value is not None and value >= sampling.correct_score
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
        parts=part_means(scores),
    )


def _judged(score: Score, part: str | None) -> float | None:
    """What decides whether a response is correct; None: it was not scored."""
    return score.value if part is None or score.value is None else score.parts.get(part)


def _check_part(scores: Sequence[Score], part: str | None) -> None:
    """A misspelt name would be an accuracy of 0 for ever. Where nothing was scored, nothing can be said about it."""
    scored = [score for score in scores if score.status == "ok"]
    if part is None or not scored or any(part in score.parts for score in scored):
        return
    there = ", ".join(dict.fromkeys(name for score in scored for name in score.parts))
    has = f"they have the parts {there}" if there else "they have no parts"
    raise RewardError(
        f"rollout.eval.correct_part={part}: none of {len(scored)} scored responses has such a part; {has}. Set "
        "rollout.eval.correct_part to one of them, or to null for the score itself."
    )


def part_means(scores: Sequence[Score]) -> dict[str, float]:
    """The mean of each part over the scores that have it."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.parts.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}
