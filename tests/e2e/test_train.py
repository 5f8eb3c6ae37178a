"""From random weights over supervised fine-tuning and reinforcement learning to an exported folder."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from plimsoll.cli import main
from plimsoll.config.derived import RunPlan
from plimsoll.config.load import load_recipe
from plimsoll.jsonl import read_jsonl
from plimsoll.observe.metrics import without_times
from plimsoll.weights.tensors import TensorFiles
from tests.e2e.small import ROOT, Small, environment, last_line, metrics, rollouts, weights


@dataclass
class Trained:
    """Both runs, and what they printed."""

    small: Small
    sft: Path
    run: Path
    printed_sft: list[str]
    printed: list[str]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.printed[-1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Trained:
    """Three steps of SFT from random weights, then two steps of RL from its run; evaluated, saved every step."""
    small = Small(tmp_path_factory.mktemp("trained"), model)
    outputs: list[list[str]] = []
    for run, overrides in (
        (small.sft, ["name=sft", "train.steps=3", "--json"]),
        (small.train, [f"model.path={small.runs / 'sft'}", "checkpoint.every=1", "--json"]),
    ):
        with redirect_stdout(io.StringIO()) as stdout:
            run(*overrides)
        outputs.append(stdout.getvalue().splitlines())
    return Trained(small, small.runs / "sft", small.runs / "rl", *outputs)


def test_the_only_output_is_one_json_object_with_what_was_measured(trained: Trained) -> None:
    rows = metrics(trained.run)
    assert len(trained.printed) == len(trained.printed_sft) == 1
    assert trained.summary == {
        "eval_before": rows[0]["eval/accuracy"],
        "eval_after": rows[2]["eval/accuracy"],
        "steps": 2,
        "run": str(trained.run),
    }
    sft_rows = metrics(trained.sft)
    assert json.loads(trained.printed_sft[-1]) == {"loss": sft_rows[-1]["loss"], "steps": 3, "run": str(trained.sft)}
    assert sft_rows[3]["loss"] < sft_rows[1]["loss"]


def test_reinforcement_starts_from_the_weights_that_supervision_ended_with(trained: Trained) -> None:
    last_of_sft, first = metrics(trained.sft)[3], metrics(trained.run)[0]
    of = {key: last_of_sft[key] for key in last_of_sft if key.startswith("eval/")}
    assert of == {key: first[key] for key in first if key.startswith("eval/")}
    assert of["eval/n"] == 7.0


def test_recipe_and_plan_of_the_run_folder_are_those_that_ran(trained: Trained) -> None:
    arguments = trained.small.arguments([f"model.path={trained.sft}", "checkpoint.every=1"])
    assert load_recipe(trained.run / "recipe.json", []) == load_recipe(Path(arguments[0]), arguments[1:])
    plan = RunPlan.model_validate_json((trained.run / "plan.json").read_bytes())
    assert (plan.steps, plan.optimizer_steps, plan.threads, plan.device) == (2, 2, 1, "cpu")
    assert (plan.num_slots, plan.slot_tokens) == (16, 12)  # 4 prompts x 4 samples; 3 digits and 3 marks, 6 more
    assert plan.stop_token_ids == (1,)


def test_every_step_has_a_row_a_file_of_rollouts_and_a_checkpoint(trained: Trained) -> None:
    rows = metrics(trained.run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(isinstance(value, int | float) for row in rows for value in row.values())
    assert sorted(path.name for path in (trained.run / "checkpoints").iterdir()) == ["step_1", "step_2"]
    assert sorted(path.name for path in (trained.run / "rollouts").iterdir()) == [
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]
    assert [row["speed/tokens_per_second"] > 0 for row in rows[1:]] == [True, True]


def test_rollouts_hold_what_was_scored_and_which_policy_said_it(trained: Trained) -> None:
    for step in (1, 2):
        rows, row = rollouts(trained.run, step), metrics(trained.run)[step]
        assert len(rows) == 16
        assert [r["score"] for r in rows] == [sum(r["response"].encode()) % 2 for r in rows]
        assert {r["version"] for r in rows} == {step - 1}
        assert {r["answer"] for r in rows} == {r["prompt"][2::-1] for r in rows}
        assert row["reward/mean"] == pytest.approx(sum(r["reward"] for r in rows) / 16)
        assert row["rollout/tokens"] == sum(r["response_length"] for r in rows)
        assert row["train/tokens"] == sum(r["response_length"] + r["prompt_length"] for r in rows)
    drawn = [row["group"] for step in (1, 2) for row in rollouts(trained.run, step)]
    assert len(set(drawn)) == 8


def test_the_ledger_has_a_row_a_phase_and_counts_residents_exactly(trained: Trained) -> None:
    rows = read_jsonl(trained.run / "memory.jsonl")
    assert [(row["step"], row["phase"]) for row in rows] == [
        (0, "load"),
        (0, "eval"),
        *((1, phase) for phase in ("rollout", "update", "sync", "save")),
        *((2, phase) for phase in ("rollout", "update", "sync", "eval", "save")),
    ]
    assert not any(row["failed"] for row in rows)
    num_bytes = sum(tensor.nbytes for tensor in weights(trained.run, 2).values())
    kv_bytes = 16 * 12 * (1 * 2 * 2 * 8 * 4)  # slots, tokens; layers, keys and values, heads, head size, float32
    for row in rows[1:]:
        assert row["residents"] == {
            "actor_parameters": num_bytes,
            "actor_gradients": 0,
            "optimizer_state": 2 * num_bytes,  # made with the optimizer
            "kv_cache": kv_bytes,
        }
        assert row["predicted"]["kv_cache"] == kv_bytes


def test_eval_of_run_checkpoint_and_exported_folder_gives_the_accuracy_of_training(
    trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = metrics(trained.run)
    assert main(["eval", str(trained.run), "--json"]) == 0
    of_run = last_line(capfd)
    assert of_run["accuracy"] == trained.summary["eval_after"]
    assert of_run["pass_at_k"] == {"1": of_run["accuracy"]}
    assert (of_run["n"], of_run["mean_length"]) == (7, rows[2]["eval/length_mean"])

    assert main(["eval", str(trained.run / "checkpoints" / "step_2"), "--json"]) == 0
    assert last_line(capfd) == of_run

    assert main(["export", str(trained.run), str(tmp_path / "out"), "--json"]) == 0
    assert last_line(capfd)["step"] == 2
    assert main(["eval", str(tmp_path / "out"), "--recipe", str(trained.run / "recipe.json"), "--json"]) == 0
    assert last_line(capfd) == {**of_run, "model": str(tmp_path / "out")}
    assert main(["eval", str(tmp_path / "out"), "--json"]) == 2
    assert "--recipe" in capfd.readouterr().err


def test_transformers_loads_the_exported_folder_bit_for_bit(
    trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(trained.run), str(out)]) == 0
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    capfd.readouterr()
    assert not any(report.values()), report
    state = loaded.state_dict()
    saved = weights(trained.run, 2)
    assert set(state) - set(saved) == {"lm_head.weight"}  # tied
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
    assert loaded.dtype == torch.float32
    assert set(TensorFiles(sorted(out.glob("*.safetensors")))) == set(saved)

    tokenizer = AutoTokenizer.from_pretrained(out)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "123>"}], tokenize=False)
    assert text == "<|user|>123>"
    assert tokenizer.decode(tokenizer("123>").input_ids) == "123>"


def test_a_learning_rate_of_zero_changes_no_weight_and_gains_nothing(
    trained: Trained, small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    run = small.train(f"model.path={trained.sft}", "train.learning_rate=0", "train.weight_decay=0.1", "--json")
    summary = last_line(capfd)
    assert summary["eval_after"] - summary["eval_before"] == 0
    before, after = weights(trained.sft, 3), weights(run, 2)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    changed = weights(trained.run, 2)
    assert not any(torch.equal(before[name], changed[name]) for name in before)


def test_the_same_recipe_gives_the_same_numbers_and_another_seed_does_not(small: Small) -> None:
    first, second, other = (small.train(f"name={n}", *o) for n, *o in (["a"], ["b"], ["c", "seed=1"]))
    assert [without_times(row) for row in metrics(first)] == [without_times(row) for row in metrics(second)]
    assert [r["response"] for r in rollouts(first, 1)] == [r["response"] for r in rollouts(second, 1)]
    assert [r["response"] for r in rollouts(first, 1)] != [r["response"] for r in rollouts(other, 1)]
    weights_of = [weights(run, 2) for run in (first, second)]
    assert all(torch.equal(weights_of[0][name], weights_of[1][name]) for name in weights_of[0])


def test_without_held_out_rows_the_accuracies_are_null(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    run = small.train("data.eval=null", "--json")
    assert last_line(capfd) == {"eval_before": None, "eval_after": None, "steps": 2, "run": str(run)}
    assert [row["step"] for row in metrics(run)] == [1, 2]


def test_evaluations_within_the_run_and_pass_at_k(small: Small) -> None:
    run = small.train("train.steps=3", "train.eval_every=2", "rollout.eval.samples=3", "rollout.eval.temperature=1")
    rows = metrics(run)
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 3]
    for row in (rows[0], rows[2], rows[3]):
        assert {key for key in row if "pass_at" in key} == {"eval/pass_at_1", "eval/pass_at_2", "eval/pass_at_3"}
        assert row["eval/pass_at_1"] == pytest.approx(row["eval/accuracy"])
        assert row["eval/pass_at_1"] <= row["eval/pass_at_2"] <= row["eval/pass_at_3"]


# ── the run folder ──────────────────────────────────────────────────────────────────────────────────────────────────


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_folder_that_holds_a_run_is_refused_with_the_three_ways_out(
    small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    run = small.train("data.eval=null", "train.steps=1")
    held = contents(run)
    small.train("data.eval=null", "train.steps=1", expect=2)
    said = capfd.readouterr().err
    assert all(way in said for way in ("--resume", "--overwrite", "name="))
    assert contents(run) == held


def test_refused_data_or_plan_leaves_the_run_that_overwrite_would_have_deleted(
    small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    run = small.train("data.eval=null", "train.steps=1")
    held = contents(run)
    rows = small.folder / "rows.jsonl"
    rows.write_text('{"prompt": "1>"}\n{"answer": "1"}\n', encoding="utf-8")
    small.train(f"data.train={rows}", "data.task={}", "data.eval=null", "--overwrite", expect=2)
    assert "row 0 (line 1): no answer" in capfd.readouterr().err
    assert contents(run) == held
    small.train("rollout.kv_memory=100", "--overwrite", expect=2)
    assert "rollout.kv_memory" in capfd.readouterr().err
    assert contents(run) == held
    small.train("data.eval=null", "train.steps=1", "train.learning_rate=1e-4", "--overwrite")
    assert load_recipe(run / "recipe.json", []).train.learning_rate == 1e-4
    assert [row["step"] for row in metrics(run)] == [1]


QUICKSTART_WITHOUT_ITS_WARM_UP = """
import sys
from plimsoll.cli import main
code = main(["train", "recipes/quickstart.yaml"])
assert "torch" not in sys.modules, "something heavy was imported before the refusal"
sys.exit(code)
"""


def test_the_quickstart_without_its_warm_up_names_the_command_before_anything_heavy(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    done = subprocess.run(
        [sys.executable, "-c", QUICKSTART_WITHOUT_ITS_WARM_UP],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "plimsoll sft recipes/quickstart_sft.yaml" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_key_value_memory_that_holds_no_sequence_is_refused(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    slot_bytes = 12 * (1 * 2 * 2 * 8 * 4)
    small.train(f"rollout.kv_memory={slot_bytes - 1}", expect=2)
    said = capfd.readouterr().err
    assert "rollout.kv_memory" in said
    assert f"{slot_bytes} bytes" in said
    assert not (small.runs / "rl").exists()
