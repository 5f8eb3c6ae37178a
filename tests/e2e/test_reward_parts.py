"""Several rewards in one run, and rows of others scored by their data source."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plimsoll.cli import main
from tests.e2e.small import Small, last_line, metrics, rollouts

PARTS = """
def parity(prompts, completions, **columns):
    assert len(prompts) == 4 and len(set(map(str, prompts))) == 1, "a group, whole"
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [None if not text else float(sum(text.encode()) % 2) for text in texts]
"""
"""TRL's signature; the samples of a prompt must come together."""


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_parts_are_weighted_logged_and_in_the_rollouts(small: Small) -> None:
    small.reward.write_text(PARTS, encoding="utf-8")
    run = small.train(
        "reward.function=exact_match",  # its default
        f"reward.parts.parity.function={small.reward}:parity",
        "reward.parts.same={function: exact_match, weight: 0.25, options: {strip: false}}",
        "reward.parts.parity.weight=-2",
        "rollout.eval.correct_part=same",
        "data.eval=null",
    )
    rows = metrics(run)
    assert len(rows) == 2
    for step, row in enumerate(rows, start=1):
        samples = rollouts(run, step)
        assert len(samples) == 16
        for sample in samples:
            parts: dict[str, float] = sample["score_parts"]
            text = sample["response"]
            assert parts["same"] == float(text == sample["answer"])
            assert parts.get("parity") == (sum(text.encode()) % 2 if text else None)
            assert sample["score"] == pytest.approx(-2 * parts.get("parity", 0.0) + 0.25 * parts["same"])
        assert row["reward/part/same"] == pytest.approx(mean([s["score_parts"]["same"] for s in samples]))
        parities = [s["score_parts"]["parity"] for s in samples if "parity" in s["score_parts"]]
        assert row["reward/part/parity"] == pytest.approx(mean(parities))
        assert 0 < row["reward/part/parity"] < 1
        assert row["reward/mean"] == pytest.approx(mean([s["reward"] for s in samples]))
        assert row["reward/errors"] == 0


def verl_rows(folder: Path, source: str) -> Path:
    """As verl's preparation scripts write them."""
    rows: list[dict[str, Any]] = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{i}+{i}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(8)
    ]
    path = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_verls_rows_are_scored_by_their_data_source(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    rows = verl_rows(small.folder, "openai/gsm8k")
    settings = [f"data.train={rows}", f"data.eval={rows}", "data.task={}", "reward.function=by_source"]
    run = small.train(*settings, "reward.parts={}", "train.steps=1")
    assert all(
        sample["score"] is not None and sample["score_status"] == "ok" and sample["score_parts"] == {}
        for sample in rollouts(run, 1)
    )
    mine = small.folder / "mine.py"
    mine.write_text("def score(response): return {'score': 0.5, 'long': len(response)}\n")
    table = [f"reward.sources.openai/*.function={mine}:score", "rollout.eval.correct_part=long"]
    run = small.train(*settings, *table, "train.steps=1", "name=mine", "rollout.eval.correct_score=2")
    assert {sample["score"] for sample in rollouts(run, 1)} == {0.5}
    assert all(sample["score_parts"] == {"long": len(sample["response"])} for sample in rollouts(run, 1))
    evaluated = next(row for row in metrics(run) if "eval/part/long" in row)
    assert evaluated["eval/part/long"] > 0
    capfd.readouterr()
    assert main(["eval", str(small.model), "--recipe", str(run / "recipe.json"), "--json"]) == 0
    assert last_line(capfd)["parts"]["long"] > 0


def test_a_data_source_without_a_function_is_refused_before_the_run_folder_is_made(
    small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = verl_rows(small.folder, "somebody/else")
    settings = [f"data.train={rows}", "data.eval=null", "data.task={}", "reward.function=by_source"]
    run = small.train(*settings, expect=2)
    said = capfd.readouterr().err
    assert "'somebody/else' (8 rows)" in said
    assert "reward.sources" in said
    assert not run.exists()


def test_a_misspelt_part_ends_the_first_evaluation(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    small.train("rollout.eval.correct_part=accuracy", expect=1)
    said = capfd.readouterr().err
    assert "rollout.eval.correct_part=accuracy" in said
    assert "they have no parts" in said
    assert "Traceback" not in said


def test_recorded_recipes_keep_the_tables(small: Small) -> None:
    run = small.train(
        "reward.function=exact_match",
        "reward.parts={a: {function: exact_match}, b: {function: number, weight: 0.5}}",
        "data.eval=null",
        "train.steps=1",
    )
    recorded = json.loads((run / "recipe.json").read_text())["reward"]["parts"]
    assert recorded["b"] == {"function": "number", "options": {}, "weight": 0.5}
    small.train(
        "reward.function=exact_match",
        "reward.parts={a: {function: exact_match}, b: {function: number, weight: 0.5}}",
        "data.eval=null",
        "--resume",
        "train.steps=2",
    )
    assert [row["step"] for row in metrics(run)] == [1, 2]
