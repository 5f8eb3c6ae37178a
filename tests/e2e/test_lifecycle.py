"""What happens to a run's folder over several commands: kept, refused, gone on with."""

import errno
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.cli import main
from plimsoll.errors import RewardError
from plimsoll.jsonl import read_jsonl
from plimsoll.update.worker import PolicyWorker
from plimsoll.weights.write import ShardWriter
from tests.e2e.small import Small, last_line, metrics, write_jsonl

NO_EVAL = "data.eval=null"


@pytest.fixture
def small(tmp_path: Path, model: Path) -> Small:
    return Small(tmp_path, model)


def test_checkpoints_have_their_tokenizer_after_resume_and_retention(
    small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    often = ("checkpoint.every=1", "checkpoint.keep=1", "train.eval_at_ends=false")
    run = small.train(*often, "train.steps=2")
    shutil.move(small.model, small.folder / "gone")  # a resumed run does not need the folder that it began with
    try:
        small.train(*often, "train.steps=5", "--resume")
        small.train(*often, "train.steps=6", "--resume")
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_6"]
        assert (run / "checkpoints" / "step_6" / "model" / "tokenizer.json").is_file()
        assert main(["eval", str(run), "--json"]) == 0
        assert last_line(capfd)["n"] == 7
    finally:
        shutil.move(small.folder / "gone", small.model)


@pytest.mark.parametrize("key", ["model.path", "model.tokenizer", "data.train"])
def test_a_run_cannot_begin_with_what_overwrite_would_delete(
    small: Small, capfd: pytest.CaptureFixture[str], key: str
) -> None:
    run = small.train(NO_EVAL, "train.steps=1")
    before = sorted(run.rglob("*"))
    rows = write_jsonl(run / "rows.jsonl", [{"prompt": "a", "answer": "b"}]) if key == "data.train" else run
    task = ["data.task={}"] if key == "data.train" else []
    small.train(NO_EVAL, f"{key}={rows}", *task, "--overwrite", expect=2)
    assert f"`{key}={rows}` lies in the folder of this very run" in capfd.readouterr().err
    assert set(before) <= set(run.rglob("*"))


def test_weights_that_are_cut_off_are_refused_before_the_folder_is_touched(
    small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = small.folder / "broken"
    shutil.copytree(small.model, broken)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    small.train(NO_EVAL, f"model.path={broken}", expect=2)
    assert "model.path:" in (said := capfd.readouterr().err)
    assert "it is cut off or damaged" in said
    assert not small.runs.exists()


def test_too_little_space_for_one_checkpoint_is_refused_before_the_first_step(
    small: Small, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = partial(CheckpointStore, free=lambda folder: 1000)
    monkeypatch.setattr("plimsoll.assemble.CheckpointStore", store)
    small.train(NO_EVAL, expect=2)
    said = capfd.readouterr().err
    for fact in ("no room for a checkpoint", "1000 B are free", "checkpoint.keep", "run_root"):
        assert fact in said
    assert metrics(small.runs / "rl") == []
    assert list((small.runs / "rl" / "checkpoints").iterdir()) == []


def test_a_run_that_fails_publishes_the_save_in_the_background_and_says_why_it_failed(
    small: Small, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    advantages = PolicyWorker.advantages
    batches: list[Any] = []

    def fails_later(worker: PolicyWorker, batch: Any) -> Any:
        batches.append(batch)
        if len(batches) == 2:
            raise RewardError("what really happened")
        return advantages(worker, batch)

    monkeypatch.setattr(PolicyWorker, "advantages", fails_later)
    write = ShardWriter.run

    def late(writer: ShardWriter) -> None:
        time.sleep(3)  # far longer than what is between the save and the failure
        write(writer)

    monkeypatch.setattr(ShardWriter, "run", late)
    run = small.train(NO_EVAL, "checkpoint.every=1", "checkpoint.background=true", "train.steps=3", expect=1)
    said = capfd.readouterr().err
    assert "what really happened" in said
    assert "the checkpoint of step 1, which was being written, is complete" in said
    assert CheckpointStore(run / "checkpoints", keep=None).newest().step == 1


def test_a_save_in_the_background_that_fails_ends_the_run_at_the_next_update_with_step_and_remedy(
    small: Small, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small.train(NO_EVAL, "checkpoint.every=1", "train.steps=1")
    monkeypatch.setattr(ShardWriter, "_work", no_space)
    options = ("checkpoint.every=1", "checkpoint.background=true", "train.steps=4")
    run = small.train(NO_EVAL, *options, "--resume", expect=1)
    said = capfd.readouterr().err
    for fact in ("the checkpoint of step 2 was not written", "No space left", "step 1 is kept", "checkpoint.keep"):
        assert fact in said
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_1"]


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_fewer_steps_than_done_are_refused_and_as_many_measure_what_is_missing(
    small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    run = small.train("train.steps=2", "train.eval_at_ends=false")
    assert not any("eval/accuracy" in row for row in metrics(run))
    before = metrics(run)[-1]
    small.train("train.steps=1", "--resume", expect=2)
    assert "train.steps=1: the run has done 2 steps already" in capfd.readouterr().err
    small.train("train.steps=2", "--resume", "--json")
    assert last_line(capfd)["eval_after"] == metrics(run)[-1]["eval/accuracy"]
    assert [row["step"] for row in metrics(run)] == [1, 2]
    kept = {key: value for key, value in before.items() if not key.startswith("time/")}
    assert kept.items() <= metrics(run)[-1].items()


def test_a_changed_recipe_without_a_checkpoint_is_told_to_start_again(
    small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    run = small.train(NO_EVAL, "train.steps=1")
    shutil.rmtree(run / "checkpoints")
    small.train(NO_EVAL, "train.steps=1", "train.learning_rate=1", "--resume", expect=2)
    assert "start again with --overwrite" in capfd.readouterr().err


def test_rows_of_a_trl_reward_need_no_answer(small: Small) -> None:
    rows = write_jsonl(small.folder / "rows.jsonl", [{"prompt": f"{i}>"} for i in range(8)])
    reward = small.folder / "trl.py"
    reward.write_text("def f(prompts, completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n")
    data = (NO_EVAL, f"data.train={rows}", "data.task={}", "train.steps=1")
    run = small.train(*data, f"reward.function={reward}:f")
    assert metrics(run)[-1]["reward/unscored"] == 0
    small.train(*data, "name=ours", expect=2)


def test_further_numbers_of_a_verl_reward_are_reported(small: Small) -> None:
    reward = small.folder / "verl.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(len(solution_str) % 2), 'long': float(len(solution_str))}\n"
    )
    run = small.train(NO_EVAL, f"reward.function={reward}:compute_score", "train.steps=1")
    sampled: list[dict[str, Any]] = list(read_jsonl(run / "rollouts" / "step_000001.jsonl"))
    lengths = [row["score_parts"]["long"] for row in sampled]
    assert lengths == [len(row["response"]) for row in sampled]
    assert metrics(run)[-1]["reward/part/long"] == pytest.approx(sum(lengths) / len(lengths))


def test_a_step_without_any_score_has_no_reward_and_says_so(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    reward = small.folder / "none.py"
    reward.write_text("def f(prompt, response, answer):\n    return None\n")
    run = small.train(NO_EVAL, f"reward.function={reward}:f", "train.steps=1", "observe.console=plain")
    row = metrics(run)[-1]
    assert "reward/mean" not in row
    assert (row["reward/unscored"], row["train/skipped_steps"]) == (16, 1)
    assert "no response of this step was scored" in capfd.readouterr().err


def test_a_supervised_run_without_evaluation_never_imports_the_reward_function(small: Small) -> None:
    broken = small.folder / "broken.py"
    broken.write_text("raise RuntimeError('imported')\n")
    small.sft(NO_EVAL, f"reward.function={broken}:f", "train.steps=1")


def test_a_tokenizer_that_was_half_copied_is_copied_again(small: Small) -> None:
    run = small.train(NO_EVAL, "train.steps=1")
    shutil.rmtree(run / "checkpoints")
    (run / "tokenizer").rename(run / "tokenizer.tmp")  # what a kill at the start of a run leaves
    (run / "tokenizer.tmp" / "tokenizer.json").unlink()
    small.train(NO_EVAL, "train.steps=1", "--resume")
    assert (run / "tokenizer" / "tokenizer.json").is_file()
    assert not (run / "tokenizer.tmp").exists()
    assert (run / "checkpoints" / "step_1" / "model" / "tokenizer.json").is_file()
