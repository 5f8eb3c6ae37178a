"""Accuracy and pass@k, against counting by hand and against all subsets."""

from collections.abc import Sequence
from itertools import combinations

import pytest

from plimsoll.config.rollout import EvalSampling
from plimsoll.errors import RewardError
from plimsoll.reward.fake import FakeScorer
from plimsoll.rollout.evaluation import EVAL_EPOCH, EvalResult, evaluate, pass_at_k, powers_up_to
from plimsoll.rollout.fake import FakeEngine
from plimsoll.types import Prompt, Request, Score, ScoreRequest

STOP = 2


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_correct_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        correct = [i < num_correct for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = list(combinations(correct, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share)


def test_k_doubles_up_to_the_number_of_samples() -> None:
    assert [powers_up_to(n) for n in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


def decode(ids: Sequence[int]) -> str:
    return ".".join(str(i) for i in ids)


def run(
    scores: dict[tuple[int, int], float | None], *, samples: int, temperature: float
) -> tuple[EvalResult, FakeEngine]:
    """Scores by (row, sample); a response has as many tokens as its sample's number, plus the stop token."""

    def script(request: Request, version: int) -> list[int]:
        return [9] * request.sample_id.index + [STOP]

    def function(request: ScoreRequest) -> float | None:
        assert request.response == decode([9] * request.sample_id.index)
        assert request.answer == request.sample_id.group.row
        return scores[request.sample_id.group.row, request.sample_id.index]

    rows = sorted({row for row, _ in scores})
    prompts = [Prompt(row=row, token_ids=(1, row), text=str(row), messages=(), answer=row) for row in rows]
    engine = FakeEngine(script=script, num_slots=3)
    result = evaluate(
        engine,
        FakeScorer(function),
        prompts,
        sampling=EvalSampling(temperature=temperature, samples=samples, top_p=0.9, top_k=5),
        max_tokens=6,
        stop_token_ids=(STOP,),
        seed=11,
        decode=decode,
    )
    return result, engine


def test_greedy_accuracy_counts_full_scores_and_nothing_else() -> None:
    scores = {(4, 0): 1.0, (5, 0): 0.99, (7, 0): None, (9, 0): 2.5, (12, 0): -1.0}
    result, engine = run(scores, samples=1, temperature=0.0)
    assert result == EvalResult(
        accuracy=2 / 5,  # at least 1; what was not scored is wrong
        pass_at_k={1: 2 / 5},
        mean_score=(1.0 + 0.99 + 2.5 - 1.0) / 4,
        mean_length=1.0,
        n=5,
        num_unscored=1,
    )
    assert {request.params.temperature for request in engine.added} == {0.0}
    assert {request.sample_id.group.epoch for request in engine.added} == {EVAL_EPOCH}
    assert result.metrics() == {
        "eval/accuracy": 2 / 5,
        "eval/pass_at_1": 2 / 5,
        "eval/score_mean": 3.49 / 4,
        "eval/length_mean": 1.0,
        "eval/n": 5.0,
        "eval/unscored": 1.0,
    }
    assert result.as_json() == {
        "accuracy": 2 / 5,
        "pass_at_k": {"1": 2 / 5},
        "n": 5,
        "mean_score": 3.49 / 4,
        "mean_length": 1.0,
        "unscored": 1,
        "parts": {},
    }


def test_several_samples_a_problem() -> None:
    correct = {0: [1, 0, 0, 0], 1: [0, 0, 0, 0], 2: [1, 1, 0, 1]}
    scores: dict[tuple[int, int], float | None] = {
        (row, index): float(value) for row, values in correct.items() for index, value in enumerate(values)
    }
    result, engine = run(scores, samples=4, temperature=0.8)
    assert result.n == 3
    assert result.accuracy == 4 / 12
    assert result.pass_at_k == pytest.approx({1: 4 / 12, 2: (1 / 2 + 0 + 1) / 3, 4: 2 / 3})
    assert result.mean_length == (1 + 2 + 3 + 4) / 4
    params = {(r.params.temperature, r.params.top_p, r.params.top_k, r.params.max_tokens) for r in engine.added}
    assert params == {(0.8, 0.9, 5, 6)}
    assert {request.seed for request in engine.added} == {11}


def test_nothing_scored_has_a_mean_of_zero_and_says_so() -> None:
    result, _ = run({(0, 0): None, (1, 0): None}, samples=1, temperature=0.0)
    assert (result.accuracy, result.mean_score, result.num_unscored, result.n) == (0.0, 0.0, 2, 2)


class PartsScorer:
    """Value and parts by row; None: not scored."""

    def __init__(self, rows: dict[int, tuple[float, dict[str, float]] | None]) -> None:
        self._rows = rows

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        found = [(request.sample_id, self._rows[request.sample_id.group.row]) for request in requests]
        return [
            Score(sample_id=sample_id, value=None, status="unscored")
            if row is None
            else Score(sample_id=sample_id, value=row[0], status="ok", parts=row[1])
            for sample_id, row in found
        ]


def run_parts(rows: dict[int, tuple[float, dict[str, float]] | None], correct_part: str | None) -> EvalResult:
    return evaluate(
        FakeEngine(script=lambda request, version: [STOP], num_slots=3),
        PartsScorer(rows),
        [Prompt(row=row, token_ids=(1, row), text=str(row), messages=()) for row in rows],
        sampling=EvalSampling(correct_part=correct_part, correct_score=0.5),
        max_tokens=6,
        stop_token_ids=(STOP,),
        seed=11,
        decode=decode,
    )


PARTS: dict[int, tuple[float, dict[str, float]] | None] = {
    0: (0.2, {"right": 1.0, "format": 0.0}),
    1: (0.9, {"right": 0.0}),
    2: (0.9, {"format": 1.0}),
    3: None,
}


def test_a_part_decides_what_is_correct_where_it_is_named_and_all_are_averaged() -> None:
    result = run_parts(PARTS, "right")
    assert (result.accuracy, result.pass_at_k) == (1 / 4, {1: 1 / 4})  # row 0 alone
    assert run_parts(PARTS, None).accuracy == 2 / 4  # rows 1 and 2
    assert result.parts == {"right": 1 / 2, "format": 1 / 2}  # over the two responses that have each
    assert result.metrics()["eval/part/format"] == 1 / 2
    assert result.as_json()["parts"] == {"right": 1 / 2, "format": 1 / 2}


def test_a_part_that_no_response_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(RewardError, match=r"correct_part=rigth: none of 3 scored .*the parts right, format"):
        run_parts(PARTS, "rigth")
    with pytest.raises(RewardError, match="they have no parts"):
        run_parts({0: (1.0, {})}, "right")
    assert run_parts({0: None}, "right").accuracy == 0.0  # nothing was scored: nothing is known about parts
