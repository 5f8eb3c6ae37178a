from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from plimsoll.errors import RecipeError
from plimsoll.reward.call import BrokenContractError, Outcome, score_together
from plimsoll.reward.compose import Part, Reward
from plimsoll.reward.load import load_function
from plimsoll.reward.signature import Kind, describe
from tests.unit.reward.requests import requests_for


def score(
    function: Callable[..., Any], responses: list[str], *, options: dict[str, Any] | None = None
) -> list[Outcome]:
    described = describe("rewards.py:f", function, options or {})
    reward = Reward(parts=[Part(name="", function=described)], sources={})
    return [o for part in reward.score(requests_for(responses, level=3, extra_info={"index": 7})) for o in part]


def test_ours_gets_the_columns_that_it_names() -> None:
    seen: dict[str, Any] = {}

    def f(prompt: str, response: str, answer: str, level: int, weight: float) -> float:
        seen.update(prompt=prompt, answer=answer, level=level)
        return weight * (response == answer)

    assert [o.value for o in score(f, ["1", "2"], options={"weight": 2.0})] == [2.0, 0.0]
    assert seen == {"prompt": "what?", "answer": "1", "level": 3}


def test_ours_with_extra_gets_every_column() -> None:
    seen: dict[str, Any] = {}

    def f(prompt: str, response: str, answer: str, **extra: Any) -> None:
        seen.update(extra)

    assert score(f, ["1"]) == [Outcome(value=None, status="unscored")]
    assert seen == {"level": 3, "extra_info": {"index": 7}, "data_source": "tests"}


def test_a_column_never_changes_the_settings_of_a_built_in_rule() -> None:
    function = load_function("regex", {"pattern": "a+"})
    reward = Reward(parts=[Part(name="", function=function)], sources={})
    requests = requests_for(["aaa", "b"], pattern="b", wrong=1.0)
    assert [o.value for part in reward.score(requests) for o in part] == [1.0, 0.0]


def test_verl_gets_its_four_and_may_return_a_dict() -> None:
    def f(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
        assert (data_source, extra_info) == ("tests", {"index": 7})
        return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str}

    assert score(f, ["1"]) == [Outcome(value=1.0, status="ok", parts={"acc": 1.0})]


def test_ours_may_return_a_dict_too() -> None:
    def f(response: str, answer: str) -> dict[str, Any]:
        return {"score": float(response == answer), "length": len(response), "note": "text"}

    assert score(f, ["12"]) == [Outcome(value=0.0, status="ok", parts={"length": 2.0})]


def test_verl_dict_without_a_score_is_an_error() -> None:
    def f(solution_str: str, ground_truth: str) -> dict[str, float]:
        return {"acc": 1.0}

    (outcome,) = score(f, ["1"])
    assert outcome.status == "error"
    assert "without 'score'" in outcome.detail


def test_trl_gets_messages_or_strings_as_the_row_had_them_and_columns_as_lists() -> None:
    seen: list[Any] = []

    def f(prompts: list[Any], completions: list[Any], answer: list[str], level: list[int]) -> list[float | None]:
        seen.append((prompts[0], completions[0], answer, level))
        return [1.0, None]

    described = describe("rewards.py:f", f, {})
    requests = requests_for(["a", "b"], level=3)
    outcomes = score_together(described, requests)
    assert [(o.value, o.status) for o in outcomes or ()] == [(1.0, "ok"), (None, "unscored")]
    score_together(described, [replace(request, plain=True) for request in requests])
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"}]
    assert seen[0] == (messages, [{"role": "assistant", "content": "a"}], ["1", "1"], [3, 3])
    assert seen[1] == ("what?", "a", ["1", "1"], [3, 3])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "expected 3 rewards, got 1"),
        ([1.0] * 4, "expected 3 rewards, got 4"),
        (1.0, "float 1.0 instead of a list"),
    ],
)
def test_wrong_number_of_values_breaks_the_contract(returned: object, message: str) -> None:
    def f(completions: list[Any], **columns: Any) -> object:
        return returned

    with pytest.raises(BrokenContractError, match=rf"rewards\.py:f.*{message}"):
        score(f, ["a", "b", "c"])


def test_a_bad_value_in_a_list_costs_only_its_response() -> None:
    def f(completions: list[Any], **columns: Any) -> list[Any]:
        return [1.0, "high", float("nan")]

    got = score(f, ["a", "b", "c"])
    assert [o.status for o in got] == ["ok", "error", "error"]
    assert "rewards.py:f returned str 'high'" in got[1].detail


def test_an_exception_in_a_call_for_several_costs_only_the_response_at_fault() -> None:
    def f(completions: list[Any], **columns: Any) -> list[float]:
        return [1.0 / len(c[0]["content"]) for c in completions]

    got = score(f, ["ab", "", "a"])
    assert [o.value for o in got] == [0.5, None, 1.0]
    assert "ZeroDivisionError" in got[1].detail


def test_traceback_starts_in_the_function() -> None:
    def f(response: str) -> float:
        raise SystemExit("no")

    (outcome,) = score(f, ["a"])
    assert outcome.status == "error"
    assert "SystemExit: no" in outcome.detail
    assert "plimsoll/reward" not in outcome.detail


def accepted_kinds() -> list[tuple[Callable[..., Any], Kind]]:
    return [
        (lambda prompt, response, answer, **extra: 0, Kind.OURS),
        (lambda response, answer: 0, Kind.OURS),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0, Kind.VERL),
        (lambda prompts, completions, **kwargs: [0], Kind.TRL),
        (lambda completions, completion_ids=None: [0], Kind.TRL),
    ]


@pytest.mark.parametrize(("function", "kind"), accepted_kinds())
def test_kind_by_parameter_names(function: Callable[..., Any], kind: Kind) -> None:
    assert describe("f", function, {}).kind is kind


async def asynchronous(response: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda question, output, gold: 0, r"\(question, output, gold\), which is none of them"),
        (lambda response, completions: 0, "which is two signatures at once"),
        (lambda *args, **kwargs: 0, "which is none of them"),
        (lambda completions, completion_ids: 0, "completion_ids is not given"),
        (lambda response, /: 0, "positional-only"),
    ],
)
def test_other_signatures_are_refused_with_what_was_found(function: Callable[..., Any], found: str) -> None:
    with pytest.raises(RecipeError, match=rf"reward\.function: f: .*{found}.*prompt, response, answer.*verl.*TRL"):
        describe("f", function, {})


@pytest.mark.parametrize(("target", "found"), [(3, "is a int"), (dict, "is a class"), (asynchronous, "is async")])
def test_what_is_not_a_plain_function_is_refused(target: Any, found: str) -> None:
    with pytest.raises(RecipeError, match=found):
        describe("f", target, {})


def test_options_that_the_function_does_not_take_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"reward\.options: f does not take wieght; it takes weight"):
        describe("f", lambda response, weight=1: 0, {"wieght": 2})
    with pytest.raises(RecipeError, match=r"reward\.options: answer comes from the row"):
        describe("f", lambda response, **extra: 0, {"answer": 2})
