"""Several rewards as one, and the choice by data source, against sums by hand."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plimsoll.config.reward import RewardConfig, RewardPart, RewardRule
from plimsoll.errors import RecipeError
from plimsoll.reward.call import BrokenContractError, Outcome
from plimsoll.reward.compose import Part, Reward, load_reward, reward_spec
from plimsoll.reward.load import BUILT_IN
from plimsoll.reward.signature import Kind, describe
from plimsoll.reward.sources import BUILT_IN_SOURCES, find_source
from plimsoll.types import ScoreRequest
from tests.unit.reward.requests import requests_for


def part(name: str, function: Any, weight: float = 1.0) -> Part:
    return Part(name=name, function=describe(name, function, {}), weight=weight)


def score(parts: list[Part], requests: list[ScoreRequest]) -> list[Outcome]:
    return [outcome for some in Reward(parts=parts, sources={}).score(requests) for outcome in some]


def length(response: str) -> float:
    return float(len(response))


def right_or_none(solution_str: str, ground_truth: str) -> Mapping[str, Any]:
    return {"score": float(solution_str == ground_truth) if solution_str else None, "seen": 7, "note": "text"}


def test_the_reward_is_the_weighted_sum_of_the_parts_that_gave_a_score() -> None:
    parts = [part("length", length, 0.25), part("right", right_or_none, 2.0)]
    got = score(parts, requests_for(["1", "22", ""]))
    assert got == [
        Outcome(value=0.25 * 1 + 2.0, status="ok", parts={"length": 1.0, "right": 1.0, "right/seen": 7.0}),
        Outcome(value=0.25 * 2, status="ok", parts={"length": 2.0, "right": 0.0, "right/seen": 7.0}),
        Outcome(value=0.0, status="ok", parts={"length": 0.0, "right/seen": 7.0}),
    ]


def test_without_any_score_the_response_is_unscored() -> None:
    parts = [part("a", lambda response: None), part("right", right_or_none)]
    assert score(parts, requests_for([""])) == [Outcome(value=None, status="unscored", parts={"right/seen": 7.0})]


def test_a_part_that_fails_fails_the_response_and_is_named() -> None:
    def inverse(response: str) -> float:
        return 1.0 / len(response)

    got = score([part("length", length), part("inverse", inverse)], requests_for(["12", ""]))
    assert [(o.value, o.status) for o in got] == [(2.5, "ok"), (None, "error")]
    assert got[1].detail.startswith("part inverse: ")
    assert "ZeroDivisionError" in got[1].detail


def test_a_sum_that_is_no_number_is_an_error() -> None:
    (outcome,) = score([part("a", lambda response: 1e308, 100.0)], requests_for(["1"]))
    assert outcome.status == "error"
    assert "inf" in outcome.detail


def test_signatures_mix_and_trl_still_sees_the_group() -> None:
    calls: list[list[str]] = []

    def rank(completions: list[Any], **columns: Any) -> list[float | None]:
        texts = [completion[0]["content"] for completion in completions]
        calls.append(texts)
        return [float(sorted(texts).index(text)) for text in texts]

    parts = [part("rank", rank, 10.0), part("length", length)]
    assert Reward(parts=parts, sources={}).kind is Kind.TRL
    got = score(parts, requests_for(["c", "bb", "a"]))
    assert [o.value for o in got] == [21.0, 12.0, 1.0]
    assert [dict(o.parts) for o in got] == [{"rank": r, "length": n} for r, n in ((2.0, 1.0), (1.0, 2.0), (0.0, 1.0))]
    assert calls == [["c", "bb", "a"]]


def test_a_trl_part_that_raises_for_a_group_costs_only_the_response_at_fault() -> None:
    def inverse(completions: list[Any], **columns: Any) -> list[float]:
        return [1.0 / len(completion[0]["content"]) for completion in completions]

    got = score([part("length", length), part("inverse", inverse)], requests_for(["ab", "", "a"]))
    assert [o.value for o in got] == [2.5, None, 2.0]
    with pytest.raises(BrokenContractError, match="short: expected 2 rewards, got 1"):
        score([part("length", length), part("short", lambda completions: [1.0])], requests_for(["a", "b"]))


def test_every_call_is_followed_by_the_hook() -> None:
    calls: list[str] = []
    parts = [part("a", lambda response: calls.append("a")), part("b", lambda completions: calls.append("b") or [1, 1])]
    list(Reward(parts=parts, sources={}).score(requests_for(["1", "2"]), after_call=lambda: calls.append("|")))
    assert calls == ["b", "|", "a", "|", "a", "|"]


def test_the_longest_beginning_wins_and_the_exact_name_wins_over_it() -> None:
    table = {"aime*": 1, "aime_2*": 2, "aime_2024": 3, "*": 4}
    found = [find_source(table, name) for name in ("aime_2024", "aime_2025", "aime", "other", "")]
    assert found == [3, 2, 1, 4, 4]
    assert find_source({"aime*": 1}, "gsm8k") is None


@pytest.mark.parametrize(
    ("source", "function"),
    [
        ("openai/gsm8k", "number"),
        ("aime2025", "math"),
        ("math", "math"),
        ("BytedTsinghua-SIA/DAPO-Math-17k", "math"),
        ("taco", "code"),
        ("gym:leg_counting", "reasoning_gym"),
        ("task:add", "exact_match"),
        ("mathematics", None),
        ("", None),
    ],
)
def test_the_built_in_table_knows_the_data_sources_of_others(source: str, function: str | None) -> None:
    assert find_source(BUILT_IN_SOURCES, source) == function
    assert set(BUILT_IN_SOURCES.values()) <= set(BUILT_IN)


def from_sources(*sources: str, response: str = "the answer is 1.0") -> list[ScoreRequest]:
    return [
        replace(request, data_source=source)
        for request, source in zip(requests_for([response] * len(sources)), sources, strict=True)
    ]


def test_by_source_takes_the_recipes_function_before_the_built_in_one_and_loads_on_demand() -> None:
    mine = {
        "mine*": RewardRule(function="exact_match", options={"strip": False}),
        "task:add": RewardRule(function="number"),
    }
    reward = load_reward(reward_spec(RewardConfig(function="by_source", sources=mine)))
    requests = from_sources("mine/a", "openai/gsm8k", "task:add", "task:other")
    assert reward.kind is Kind.OURS
    assert reward.needs_answer
    assert reward.missing(requests) == ["exact_match", "number"]  # those of the table; the recipe's are there
    reward.load(["exact_match", "number"])
    assert reward.missing(requests) == []
    assert [o.value for some in reward.score(requests) for o in some] == [0.0, 1.0, 1.0, 0.0]
    with pytest.raises(BrokenContractError, match="no function for data_source 'tests'"):
        reward.missing(requests_for(["1"]))


def test_by_source_may_be_one_of_several_parts() -> None:
    parts = {
        "right": RewardPart(function="by_source", weight=2.0),
        "same": RewardPart(function="exact_match", weight=0.5),
    }
    reward = load_reward(reward_spec(RewardConfig(parts=parts)))
    requests = from_sources("openai/gsm8k", response="1.0")
    reward.load(reward.missing(requests))
    ((outcome,),) = reward.score(requests)
    assert outcome == Outcome(value=2.0, status="ok", parts={"right": 1.0, "same": 0.0})


def test_all_functions_that_cannot_be_used_are_told_at_once_under_their_own_keys() -> None:
    parts = {
        "a": RewardPart(function="exact_mach"),
        "b": RewardPart(function="number", options={"tolerance": 1}),
        "c": RewardPart(function="by_source"),
    }
    sources = {"x": RewardRule(function="json:lods")}
    with pytest.raises(RecipeError) as caught:
        load_reward(reward_spec(RewardConfig(parts=parts, sources=sources)))
    first, second, third = caught.value.causes
    assert first.startswith("reward.parts.a.function: 'exact_mach' is not a built-in name")
    assert second.startswith("reward.parts.b.options: number does not take tolerance")
    assert third.startswith("reward.sources.x.function: json has no function lods")


def test_the_documented_table_of_data_sources_is_the_one_in_use() -> None:
    text = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| `data_source` \| function \|$(.*?)^$", text, flags=re.MULTILINE | re.DOTALL)
    documented: dict[str, str] = {}
    for row in table.strip().splitlines()[1:]:
        _, sources, function, _ = row.split("|")
        documented |= dict.fromkeys(re.findall(r"`([^`]+)`", sources), function.strip(" `"))
    assert documented == BUILT_IN_SOURCES
