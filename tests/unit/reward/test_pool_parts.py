"""Several rewards through the real processes: what one function is promised holds for parts too."""

from dataclasses import replace
from pathlib import Path

import pytest

from plimsoll.config.reward import RewardConfig, RewardPart, RewardRule
from plimsoll.errors import RewardError
from plimsoll.reward.pool import ScoringPool
from tests.unit.reward.requests import requests_for, write_function

RANK_AND_SLOW = """
    import os, time
    def rank(completions, **columns):
        texts = [completion[0]["content"] for completion in completions]
        return [float(sorted(texts).index(text)) for text in texts]
    def slow(response):
        if response == "slow":
            time.sleep(60)
        if response == "dies":
            os._exit(3)
        return 1.0
    def short(completions):
        return [1.0]
"""


def config(folder: Path, *names: str, **settings: float) -> RewardConfig:
    file = write_function(folder, RANK_AND_SLOW).rpartition(":")[0]
    parts = {name: RewardPart(function=f"{file}:{name}", weight=10.0 if name == "rank" else 1.0) for name in names}
    return RewardConfig.model_validate({"parts": parts, "workers": 2, **settings})


def test_groups_stay_together_and_parts_come_back_by_name(tmp_path: Path) -> None:
    with ScoringPool(config(tmp_path, "slow", "rank")) as pool:
        scores = pool.score(requests_for(["d", "c", "b", "a", "f", "h", "e", "g"]))
    assert [score.value for score in scores] == [31.0, 21.0, 11.0, 1.0, 11.0, 31.0, 1.0, 21.0]
    assert scores[0].parts == {"slow": 1.0, "rank": 3.0}


def test_a_part_that_hangs_or_dies_costs_its_response_only(tmp_path: Path) -> None:
    settings = {"timeout": 1.0, "max_error_share": 1.0}
    with ScoringPool(config(tmp_path, "rank", "slow", **settings)) as pool:
        scores = pool.score(requests_for(["a", "slow", "c", "dies", "e"]))
    assert [score.status for score in scores] == ["ok", "timeout", "ok", "error", "ok"]
    assert [score.value is None for score in scores] == [False, True, False, True, False]


def test_a_wrong_number_of_values_of_a_part_stops_at_once(tmp_path: Path) -> None:
    with (
        ScoringPool(config(tmp_path, "slow", "short")) as pool,
        pytest.raises(RewardError, match=r"^reward\.parts: .*:short: expected 4 rewards, got 1"),
    ):
        pool.score(requests_for(["a", "b", "c", "d"]))


def test_too_many_failures_name_the_parts(tmp_path: Path) -> None:
    strict = config(tmp_path, "slow", "rank", max_error_share=0.0)
    with ScoringPool(strict) as pool, pytest.raises(RewardError, match=r"^reward\.parts slow, rank failed for 1 of 4"):
        pool.score(requests_for(["a", "b", "c", "dies"], group_size=1))


def test_options_longer_than_an_argument_of_a_process_may_be(tmp_path: Path) -> None:
    spec = write_function(tmp_path, "def score(response, *, table): return float(len(table[response]))")
    options = {"table": {"a": "x" * 3_000_000, "b": "y"}}
    with ScoringPool(RewardConfig(function=spec, options=options)) as pool:  # pyright: ignore[reportArgumentType]
        assert [score.value for score in pool.score(requests_for(["a", "b"]))] == [3e6, 1.0]


def test_a_function_that_rows_need_for_the_first_time_is_imported_outside_of_their_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker imports what the built-in table names; here that import takes longer than a response may."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'plimsoll.reward.rules':\n"
        "            import time; time.sleep(1.5)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    own = write_function(tmp_path, "def score(response): return 5.0")
    by_source = RewardConfig(
        function="by_source", sources={"mine": RewardRule(function=own)}, timeout=0.5, workers=1, max_error_share=0.0
    )
    sources = ["mine", "openai/gsm8k", "mine"]
    requests = [replace(r, data_source=s) for r, s in zip(requests_for(["1"] * 3), sources, strict=True)]
    with ScoringPool(by_source) as pool:
        assert [score.value for score in pool.score(requests)] == [5.0, 1.0, 5.0]


def test_a_data_source_without_a_function_stops_at_once() -> None:
    with (
        ScoringPool(RewardConfig(function="by_source", workers=1)) as pool,
        pytest.raises(RewardError, match=r"^reward\.function: by_source has no function for data_source 'tests'"),
    ):
        pool.score(requests_for(["1"]))
