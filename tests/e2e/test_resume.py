"""A run that is stopped in whatever way and resumed ends bitwise where the run that nobody stopped does."""

import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.workplace import (
    RECIPE,
    STEPS,
    Ended,
    Workplace,
    assert_ledger,
    assert_nothing_left,
    assert_same_end,
    make_workplace,
    write_rows,
)

pytestmark = pytest.mark.timeout(300)  # each command imports torch and transformers anew


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """No run yet. To be copied."""
    return make_workplace(tmp_path_factory.mktemp("resume") / "fresh")


@pytest.fixture(scope="module")
def straight(fresh: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A finished run that was never stopped, with all its checkpoints."""
    workplace = fresh.copy(tmp_path_factory.mktemp("straight") / "work")
    ended = workplace.train("checkpoint.keep=null")
    assert ended.code == 0, ended.stderr
    assert_nothing_left(ended.mark)
    return workplace


@pytest.fixture(scope="module")
def stopped(fresh: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A run that was killed in its ninth step, with checkpoints of steps 6 and 8. To be copied."""
    workplace = fresh.copy(tmp_path_factory.mktemp("stopped") / "work")
    assert_killed(workplace.train_until("rollout", 9))
    assert workplace.checkpoints() == [6, 8]
    return workplace


def assert_killed(ended: Ended, *, children: int = 3) -> None:
    """It came to the point with its scoring processes (two and their guard), and none of them outlived it."""
    assert ended.code == -signal.SIGKILL, ended.stderr
    assert ended.stdout == f'{{"children": {children}}}\n'
    assert_nothing_left(ended.mark)


def test_the_recipe_has_the_state_that_can_be_lost(straight: Workplace) -> None:
    """Otherwise the other tests would prove little."""
    rows = straight.rows("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 5, 10, 12]
    assert all(row["rollout/rounds"] >= 2 and row["rollout/no_signal_groups"] > 0 for row in rows[1:])
    assert rows[-1]["actor/kl_ref"] > 0
    assert len({row["train/learning_rate"] for row in rows[1:]}) > STEPS / 2
    cursors = [straight.state(step)["cursor"] for step in straight.checkpoints()]
    assert cursors[2]["given_back"], "resumed from in the lineage below"
    assert cursors[-1]["epoch"] > 5
    assert straight.state(STEPS)["policy_version"] == 4 * STEPS


def test_a_run_killed_again_and_again_ends_like_one_that_was_not(
    fresh: Workplace, straight: Workplace, tmp_path: Path
) -> None:
    run = fresh.copy(tmp_path / "work")

    assert_killed(run.train_until("rollout", 2))  # there is no checkpoint yet
    assert run.checkpoints() == []
    assert [row["step"] for row in run.rows("metrics.jsonl")] == [0, 1]

    ended = run.train_until("update", 3, "--resume")
    assert_killed(ended)
    assert "no complete checkpoint yet" in ended.stderr

    assert_killed(run.train_until("manifest", 4, "--resume"))
    assert run.checkpoints() == [2]
    (partial,) = (run.run / "checkpoints").glob(".step_4.tmp-*")
    assert (partial / "model" / "model.safetensors").is_file()
    assert not (partial / "manifest.json").exists()

    ended = run.train_until("before save", 6, "--resume")
    assert_killed(ended)
    assert f"passed over {partial.relative_to(run.path)}: a save that did not finish" in ended.stderr
    assert run.checkpoints() == [2, 4]
    assert run.rows("metrics.jsonl")[-1]["step"] == 6  # a row ahead of its checkpoint

    assert_killed(run.train_until("evaluation", 5, "--resume"))
    assert run.checkpoints() == [2, 4]
    assert run.rows("metrics.jsonl")[-1]["step"] == 4

    assert_killed(run.train_until("reward", 7, "--resume"))  # nothing but a kill ends the reward functions here
    (run.path / "hang").unlink()
    assert run.checkpoints() == [4, 6]

    assert_killed(run.train_until("restore", 6, "--resume"), children=0)

    assert_killed(run.train_until("retention", 10, "--resume"))
    assert run.checkpoints() == [6, 8, 10]

    ended = run.train("--resume")
    assert ended.code == 0, ended.stderr
    assert_nothing_left(ended.mark)
    assert "resuming from runs/small/checkpoints/step_10" in ended.stderr
    assert run.checkpoints() == [10, 12]
    assert_same_end(run, straight)
    assert_ledger(run, straight, {2: 2, 4: 2, 6: 1, 10: 1}, unrecorded=((10, "save"),))


def test_checkpoints_written_in_the_background_are_those_of_the_foreground(
    fresh: Workplace, straight: Workplace, tmp_path: Path
) -> None:
    run = fresh.copy(tmp_path / "work")
    # The checkpoint of step 8 is published at the update of step 9, which is not reached.
    assert_killed(run.train_until("rollout", 9, "checkpoint.background=true"))
    assert run.checkpoints() == [4, 6]

    ended = run.train("--resume", "checkpoint.background=true", "checkpoint.keep=null")
    assert ended.code == 0, ended.stderr
    assert "resuming from runs/small/checkpoints/step_6" in ended.stderr
    assert run.checkpoints() == [4, 6, 8, 10, 12]
    for step in run.checkpoints():
        assert run.tensors(step) == straight.tensors(step), step
        assert run.state(step) == straight.state(step), step
    assert_same_end(run, straight)


@pytest.mark.parametrize(
    ("signum", "point", "step", "code"),
    [
        (signal.SIGINT, "update", 5, 130),  # a step with an evaluation, which the resumed run makes up for
        # The main thread waits for another one.
        pytest.param(signal.SIGTERM, "rollout", 3, 143, marks=pytest.mark.slow),
        # There is no step to finish.
        pytest.param(signal.SIGTERM, "load", 0, 143, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_keeps_the_finished_step_and_goes_on_from_it(
    fresh: Workplace, straight: Workplace, tmp_path: Path, signum: signal.Signals, point: str, step: int, code: int
) -> None:
    run = fresh.copy(tmp_path / "work")
    ended = run.train_until(point, step, signum=signum)
    assert ended.code == code, ended.stderr
    assert_nothing_left(ended.mark)
    assert f"interrupted by {signum.name}: the step was finished" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert run.checkpoints()[-1:] == ([step] if step else [])
    assert [row["step"] for row in run.rows("metrics.jsonl")][-1:] == ([step] if step else [])

    ended = run.train("--resume")
    assert ended.code == 0, ended.stderr
    assert_same_end(run, straight)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    stopped: Workplace, straight: Workplace, tmp_path: Path
) -> None:
    run = stopped.copy(tmp_path / "work")
    weights = run.checkpoint(8) / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)

    ended = run.train("--resume")
    assert ended.code == 0, ended.stderr
    said = "passed over runs/small/checkpoints/step_8: model/model.safetensors has changed since it was written"
    assert said in ended.stderr
    assert "resuming from runs/small/checkpoints/step_6" in ended.stderr
    assert_same_end(run, straight)


def test_a_run_is_not_resumed_with_other_mathematics(stopped: Workplace, tmp_path: Path) -> None:
    run = stopped.copy(tmp_path / "work")
    before = run.snapshot()
    changed = {"algorithm.clip_high": "0.3", "train.learning_rate": "0.001", "seed": "1", "data.train": "heldout.jsonl"}
    ended = run.train("--resume", "train.steps=14", *(f"{key}={value}" for key, value in changed.items()))
    assert ended.code == 2, ended.stderr
    causes = [line for line in ended.stderr.splitlines() if "cannot be resumed" in line]
    assert len(causes) == len(changed), causes
    for key, value in changed.items():
        assert any(f"{key} was " in cause and value in cause for cause in causes), causes
    assert run.snapshot() == before


def test_a_run_is_not_resumed_on_other_rows_of_the_same_name(stopped: Workplace, tmp_path: Path) -> None:
    run = stopped.copy(tmp_path / "work")
    write_rows(run.path / "rows.jsonl", range(300, 310))
    before = run.snapshot()
    ended = run.train("--resume", "train.steps=14")
    assert ended.code == 2, ended.stderr
    assert "data.train=rows.jsonl" in ended.stderr
    assert "is not the data of the saved run" in ended.stderr
    assert run.snapshot() == before


def test_a_finished_run_may_go_on(straight: Workplace, tmp_path: Path) -> None:
    run = straight.copy(tmp_path / "work")
    ended = run.train("--resume", f"train.steps={STEPS + 1}")
    assert ended.code == 0, ended.stderr
    assert run.checkpoints()[-1] == STEPS + 1
    *rows, last = run.rows("metrics.jsonl")
    assert rows == straight.rows("metrics.jsonl")
    assert last["step"] == STEPS + 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_killed_at_random_times_ends_like_one_that_was_not(fresh: Workplace, tmp_path: Path, seed: int) -> None:
    steps, kills = 60, 10
    straight, run = fresh.copy(tmp_path / "straight"), fresh.copy(tmp_path / "work")
    for workplace in (straight, run):
        text = RECIPE.replace("steps: 12", f"steps: {steps}").replace("every: 2", "every: 3")
        (workplace.path / "recipe.yaml").write_text(text, encoding="utf-8")
    start = time.monotonic()
    assert straight.train().code == 0
    span = sum(row["seconds"] for row in straight.rows("memory.jsonl"))
    startup = time.monotonic() - start - span

    draw = random.Random(seed)
    killed = 0
    for _ in range(kills):
        resume = ["--resume"] if (run.run / "recipe.json").exists() else []
        ended = run.command("train", "recipe.yaml", *resume, kill_after=draw.uniform(0.5 * startup, startup + span / 3))
        assert ended.code in (0, -signal.SIGKILL), ended.stderr
        killed += ended.code != 0
        assert_nothing_left(ended.mark)
    assert killed >= kills // 2
    assert (run.run / "recipe.json").exists(), "no run lived long enough to begin"
    ended = run.train("--resume")
    assert ended.code == 0, ended.stderr
    assert_same_end(run, straight, steps)
