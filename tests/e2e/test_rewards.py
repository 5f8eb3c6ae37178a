"""Rewards without signal, rewards that fail, rewards that are missing."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll.checkpoint.state import read_state
from plimsoll.cli import main
from tests.e2e.small import Small, last_line, metrics, rollouts, tensors, weights

LOGGING = """
import json, os

def reward(prompt, response, answer, **extra):
    line = json.dumps([prompt, response]) + "\\n"
    log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, line.encode())
    os.close(log)
    {body}
"""
"""Writes down what it is asked: how often, and about which prompts."""

NO_EVAL = "data.eval=null"


def give(small: Small, body: str) -> Path:
    """Let `body` decide about rewards; the log of its calls."""
    log = small.folder / "calls.jsonl"
    small.reward.write_text(LOGGING.format(log=str(log), body=body), encoding="utf-8")
    return log


def asked(log: Path) -> list[str]:
    """Prompts of the calls, in no particular order."""
    return [json.loads(line)[0] for line in log.read_text(encoding="utf-8").splitlines()]


def cursor(run: Path, step: int) -> dict[str, Any]:
    return dict(read_state(run / "checkpoints" / f"step_{step}").cursor)


DYNAMIC = ["algorithm.dynamic_sampling=true", "algorithm.dynamic_max_rounds=3"]


def test_dynamic_sampling_without_any_signal_ends_after_its_rounds_and_keeps_a_checkpoint(
    small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    log = give(small, "return 1.0")
    run = small.train(*DYNAMIC, NO_EVAL, expect=1)
    said = capfd.readouterr().err
    assert "step 1: 0 of 4 groups with a signal after 3 rounds" in said
    assert "all-correct 12 groups" in said
    assert "algorithm.dynamic_max_rounds" in said
    assert "Traceback" not in said
    assert set(Counter(asked(log)).values()) == {4}
    assert len(asked(log)) == 3 * 4 * 4
    assert metrics(run) == []
    assert (cursor(run, 0)["position"], cursor(run, 0)["given_back"]) == (12, [])

    held_out = ["data.eval=task:reverse_string", "--json"]
    assert main(["eval", str(run), *held_out]) == 0
    assert last_line(capfd)["accuracy"] == 1.0


def test_prompts_with_a_signal_are_not_lost_when_dynamic_sampling_gives_up(
    small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    log = give(small, "return 0.0 if answer[0] in '01234' else float(sum(response.encode()) % 2)")
    run = small.train(*DYNAMIC[:1], "algorithm.dynamic_max_rounds=1", NO_EVAL, expect=1)
    said = capfd.readouterr().err
    prompts = set(asked(log))
    hopeless = {prompt for prompt in prompts if prompt[2] in "01234"}
    assert 0 < len(hopeless) < 4
    state = cursor(run, 0)
    lucky = 4 - len(state["given_back"]) - len(hopeless)  # groups that happened to be all equal
    assert lucky >= 0
    assert len(state["given_back"]) > 0
    assert f"{len(state['given_back'])} of 4 groups" in said
    assert state["position"] == 4


def test_groups_without_signal_are_replaced_and_surplus_groups_come_first_next_time(small: Small) -> None:
    log = give(small, "return 0.0 if answer[0] in '01234' else float(sum(response.encode()) % 2)")
    run = small.train("algorithm.dynamic_sampling=true", NO_EVAL, "train.steps=3", "data.task.train_size=40")
    rows = metrics(run)
    trained: list[str] = []
    for step, row in enumerate(rows, start=1):
        groups: dict[str, list[float]] = {}
        for r in rollouts(run, step):
            groups.setdefault(r["group"], []).append(r["reward"])
            assert r["version"] == step - 1
        assert len(groups) == 4
        assert all(len(rewards) == 4 and len(set(rewards)) == 2 for rewards in groups.values())
        assert row["advantage/no_signal_groups"] == 0
        assert row["train/tokens"] == sum(r["prompt_length"] + r["response_length"] for r in rollouts(run, step))
        trained += groups
    assert len(set(trained)) == 12
    assert max(row["rollout/rounds"] for row in rows) > 1
    assert sum(row["rollout/groups"] for row in rows) == len(asked(log)) / 4
    assert sum(row["rollout/tokens"] for row in rows) == 6 * len(asked(log))
    state = cursor(run, 3)
    handed_out = sum(row["rollout/groups"] for row in rows)
    # A surplus group is sampled twice, and every other one that was handed out is trained, dropped or given back.
    dropped = sum(row["rollout/no_signal_groups"] for row in rows)
    surplus = handed_out - dropped - 12
    assert surplus >= len(state["given_back"])
    position = state["epoch"] * 40 + state["position"]
    assert position == 12 + dropped + len(state["given_back"])
    assert not set(trained) & {f"{epoch}:{row}" for epoch, row in state["given_back"]}


def test_a_reward_function_that_always_fails_ends_the_run_with_its_traceback(
    small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    give(small, "raise ValueError('broken on purpose')")
    run = small.train(NO_EVAL, expect=1)
    said = capfd.readouterr().err
    assert "ValueError: broken on purpose" in said
    assert "checksum.py" in said
    assert "reward.max_error_share" in said
    assert metrics(run) == []
    assert list((run / "rollouts").iterdir()) == []


def test_failures_under_the_limit_are_counted_and_left_out(small: Small) -> None:
    give(small, "assert sum(response.encode()) % 5, 'bad luck'\n    return float(sum(response.encode()) % 2)")
    run = small.train(NO_EVAL, "reward.max_error_share=0.9")
    rows = [row for step in (1, 2) for row in rollouts(run, step)]
    failed = [row for row in rows if sum(row["response"].encode()) % 5 == 0]
    assert 0 < len(failed) < 16
    assert all(row["score"] is None and row["reward"] is None and row["score_status"] == "error" for row in failed)
    assert all("bad luck" in row["score_detail"] for row in failed)
    assert sum(row["reward/errors"] for row in metrics(run)) == len(failed)


def test_responses_without_a_score_are_counted_and_out_of_group_and_loss(small: Small) -> None:
    give(small, "return None if sum(response.encode()) % 3 == 0 else float(sum(response.encode()) % 2)")
    run = small.train(NO_EVAL)
    for step, row in enumerate(metrics(run), start=1):
        rows = rollouts(run, step)
        scored = [r for r in rows if r["score"] is not None]
        assert 0 < len(scored) < 16
        assert row["reward/unscored"] == row["advantage/unscored_samples"] == 16 - len(scored)
        assert (row["reward/errors"], row["reward/timeouts"]) == (0, 0)
        assert row["reward/mean"] == pytest.approx(sum(r["reward"] for r in scored) / len(scored))
        assert row["train/tokens"] == sum(r["prompt_length"] + r["response_length"] for r in scored)


def test_when_nothing_is_scored_the_step_is_skipped_and_the_weights_stay(small: Small, model: Path) -> None:
    give(small, "return None")
    run = small.train(NO_EVAL)
    for row in metrics(run):
        assert (row["reward/unscored"], row["advantage/unscored_groups"]) == (16, 4)
        assert (row["train/skipped_steps"], row["train/tokens"], row["loss"]) == (1, 0, 0)
        assert "train/grad_norm" not in row
    after = weights(run, 2)
    assert all(torch.equal(tensor, after[name]) for name, tensor in tensors(model).items())
