"""Rows of three schemas with the reward functions that belong to them, and what becomes of every row."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from plimsoll.config.data import DataConfig
from plimsoll.data.load import load_dataset
from plimsoll.data.tokenizer import load_tokenizer
from plimsoll.plane.local import LocalPlane
from plimsoll.rollout.native import NativeEngine
from plimsoll.types import Completion, DataRef, Request
from tests.e2e.small import TOKENIZER, Small, metrics, rollouts, write_jsonl

NO_TASK = "data.task={}"
NO_EVAL = "data.eval=null"

VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info["index"] >= 0, (data_source, extra_info)
    value = float((sum(solution_str.encode()) + len(ground_truth)) % 2)
    return {"score": value, "parity": value}
"""

OURS = """
def reward(prompt, response, answer, level, **extra):
    assert prompt.endswith("=") and level == len(prompt), (prompt, level)
    return float(len(response.encode()) + int(answer)) / 20
"""

TRL = """
def reward(prompts, completions, level, **columns):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    assert len(prompts) == len(texts) == len(level) and all(isinstance(p, str) for p in prompts), prompts
    return [float(sum(text.encode()) % 2) for text in texts]
"""

OUR_ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": 4} for i in range(8)]


def verl_rows(path: Path) -> Path:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i}+{i}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_parquet_of_verl_with_its_compute_score(small: Small) -> None:
    rows = verl_rows(small.folder / "train.parquet")
    small.reward.write_text(VERL, encoding="utf-8")
    run = small.train(
        f"data.train={rows}", f"data.eval={rows}", NO_TASK, f"reward.function={small.reward}:compute_score"
    )
    assert metrics(run)[0]["eval/n"] == 8
    for step in (1, 2):
        for row in rollouts(run, step):
            assert int(row["answer"]) == 2 * int(row["prompt"][0])
            assert row["score"] == (sum(row["response"].encode()) + len(row["answer"])) % 2


def test_jsonl_of_ours_with_further_columns(small: Small) -> None:
    rows = write_jsonl(small.folder / "train.jsonl", OUR_ROWS)
    small.reward.write_text(OURS, encoding="utf-8")
    run = small.train(f"data.train={rows}", NO_TASK, NO_EVAL)
    for step in (1, 2):
        for row in rollouts(run, step):
            assert row["score"] == pytest.approx((len(row["response"].encode()) + int(row["answer"])) / 20)


def test_a_function_of_trl_gets_lists_and_columns(small: Small) -> None:
    rows = write_jsonl(small.folder / "train.jsonl", OUR_ROWS)
    small.reward.write_text(TRL, encoding="utf-8")
    run = small.train(f"data.train={rows}", NO_TASK, NO_EVAL)
    for step in (1, 2):
        assert [r["score"] for r in rollouts(run, step)] == [
            sum(r["response"].encode()) % 2 for r in rollouts(run, step)
        ]


def test_supervision_reads_responses_and_counts_their_tokens(small: Small) -> None:
    """Ten tokens for the row's own response, its end included; the answer where there is none."""
    rows = [{"prompt": "1>", "answer": "x", "response": "123456789"}, {"prompt": "22>", "answer": "4444"}]
    path = write_jsonl(small.folder / "train.jsonl", rows)
    run = small.sft(f"data.train={path}", NO_TASK, NO_EVAL, "data.prompts_per_step=2", "train.steps=1")
    assert metrics(run)[0]["train/tokens"] == (2 + 2 + 10) + (3 + 2 + 5)  # a mark before and after each prompt


def test_a_smaller_last_batch_is_a_step_with_denominators_of_its_own(small: Small) -> None:
    path = write_jsonl(small.folder / "train.jsonl", OUR_ROWS[:5])
    run = small.train(
        f"data.train={path}", NO_TASK, NO_EVAL, "data.drop_last=false", "train.steps=null", "train.epochs=1"
    )
    first, second = metrics(run)
    assert (first["rollout/groups"], second["rollout/groups"]) == (4, 1)
    groups = [{row["group"] for row in rollouts(run, step)} for step in (1, 2)]
    assert groups[0] | groups[1] == {f"0:{i}" for i in range(5)}
    rows = rollouts(run, 2)
    assert second["train/tokens"] == sum(row["prompt_length"] + row["response_length"] for row in rows)
    # Equal lengths and a group's advantages sum to 0: so does the loss, under the right denominator and any other. The
    # entropy bonus does not: it is the mean over the tokens of this step.
    run = small.train(
        f"data.train={path}",
        NO_TASK,
        NO_EVAL,
        "data.drop_last=false",
        "train.steps=null",
        "algorithm.entropy_coefficient=1",
        "algorithm.importance_correction=none",
        "name=entropy",
    )
    for row in metrics(run):
        assert row["loss"] == pytest.approx(-row["actor/entropy"], abs=1e-5)


def test_all_held_out_rows_are_measured_once(small: Small) -> None:
    path = write_jsonl(small.folder / "eval.jsonl", OUR_ROWS[:7])
    run = small.train(f"data.eval={path}", "train.steps=1", "rollout.kv_memory=4KiB")
    assert [row["eval/n"] for row in metrics(run)] == [7, 7]
    for row in metrics(run):
        assert (row["eval/accuracy"] * 7) % 1 == pytest.approx(0, abs=1e-9)
    few = small.train(f"data.eval={path}", "train.steps=1", "data.max_eval_rows=3", "name=few")
    assert [row["eval/n"] for row in metrics(few)] == [3, 3]


class Spy:
    """What went into the engine, what came out of it, and what the trainer was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, tuple[int, ...]] = {}
        self.said: dict[str, Completion] = {}
        self.rows: dict[str, dict[str, torch.Tensor]] = {}
        spy = self

        class Engine(NativeEngine):
            def add(self, requests: Iterable[Request]) -> None:
                requests = list(requests)
                spy.asked |= {str(r.sample_id): r.token_ids for r in requests}
                super().add(requests)

            def step(self) -> list[Completion]:
                finished = super().step()
                spy.said |= {str(c.sample_id): c for c in finished}
                return finished

        class Plane(LocalPlane):
            def put(self, ref: DataRef, **columns: torch.Tensor) -> None:
                spy.rows.setdefault(ref.key.partition("@")[0], {}).update(columns)
                super().put(ref, **columns)

        monkeypatch.setattr("plimsoll.engines.NativeEngine", Engine)
        monkeypatch.setattr("plimsoll.assemble.LocalPlane", Plane)


def test_the_trainer_is_given_the_ids_that_the_engine_read_and_sampled(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    rows = [{"prompt": f"{i}0123456789>", "answer": "1"} for i in range(4)]
    path = write_jsonl(small.folder / "train.jsonl", rows)
    run = small.train(
        f"data.train={path}",
        NO_TASK,
        NO_EVAL,
        "train.steps=1",
        "data.max_prompt_tokens=5",
        "data.overlong=truncate_left",
        f"rollout.stop_token_ids={[1, *range(5, 261, 4)]}",
    )
    tokenizer = load_tokenizer(TOKENIZER)
    assert len(spy.rows) == 16
    for key, row in spy.rows.items():
        prompt, completion = spy.asked[key], spy.said[key]
        assert tokenizer.decode(prompt) == "789><|assistant|>"
        assert tuple(row["token_ids"].tolist()) == prompt + completion.token_ids
        assert row["sampled"].tolist() == [False] * 5 + [True] * len(completion.token_ids)
        assert row["rollout_logprobs"].tolist() == pytest.approx([0.0] * 5 + list(completion.logprobs))
        assert {len(column) for column in row.values()} == {5 + len(completion.token_ids)}
    for row in rollouts(run, 1):
        completion = spy.said[f"{row['group']}:{row['sample']}"]
        ids = completion.token_ids[:-1] if row["finish_reason"] == "stop" else completion.token_ids
        assert row["response"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert row["response_length"] == len(completion.token_ids)


def test_rows_that_are_dropped_are_said_and_never_trained(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [*OUR_ROWS, {"prompt": "9" * 50, "answer": "0"}, {"prompt": "no answer"}]
    path = write_jsonl(small.folder / "train.jsonl", rows)
    run = small.train(f"data.train={path}", NO_TASK, NO_EVAL, "data.bad_rows=drop", "data.max_bad_share=0.1")
    said = capfd.readouterr().err
    assert "10 rows read, 8 kept" in said
    assert "data.max_prompt_tokens=24" in said
    assert {row["prompt"] for step in (1, 2) for row in rollouts(run, step)} == {row["prompt"] for row in OUR_ROWS}


def test_the_fingerprint_of_the_data_is_kept(small: Small) -> None:
    run = small.train(NO_EVAL, "train.steps=1")
    recipe = json.loads((run / "recipe.json").read_text())
    state: dict[str, Any] = json.loads((run / "checkpoints" / "step_1" / "state.json").read_text())
    config = DataConfig.model_validate(recipe["data"])
    tokenizer = load_tokenizer(TOKENIZER)
    dataset = load_dataset(config.train, config, tokenizer, split="train", seed=0, need="answer")
    assert state["cursor"]["fingerprint"] == dataset.fingerprint
