"""docs/run-folder.md names every key that a run writes, and no other."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from plimsoll.memory.ledger import LedgerRow
from plimsoll.memory.phases import Phase
from tests.e2e.small import ROOT, Small, metrics, rollouts


def _placeholder(match: re.Match[str]) -> str:
    return match[1] + ("K" if match[1] == "pass_at_" else "NAME")


def documented(section: str) -> set[str]:
    """Names in the first column of the section's table."""
    text = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {re.escape(section)}$(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[Path]:
    """Runs that between them use every phase and every option that has a metric of its own."""
    small = Small(tmp_path_factory.mktemp("runs"), model)
    sampled = ["rollout.eval.samples=4", "rollout.eval.temperature=1", "checkpoint.every=1"]
    kl = ["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1"]
    parts = small.folder / "parts.py"
    parts.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {'score': 1.0, 'x': 2.0}\n"
    )
    return [
        small.sft("name=sft"),
        small.train("name=kl", "algorithm.kl_coefficient=0.1", *sampled),
        small.train("name=reward", *kl, "train.epochs_per_rollout=2"),
        small.train("name=parts", f"reward.function={parts}:compute_score", "train.steps=1"),
    ]


def test_metrics(runs: list[Path]) -> None:
    written = {key for run in runs for row in metrics(run) for key in row}
    phases = {f"time/{phase}" for phase in Phase}
    general = {"time/PHASE" if key in phases else re.sub(r"(pass_at_|part/)\w+$", _placeholder, key) for key in written}
    assert general == documented("metrics.jsonl")


def test_every_key_of_a_step_is_there_in_every_step_of_its_kind(runs: list[Path]) -> None:
    """Readers make columns of keys: a key that comes and goes would be a hole in every curve."""
    for run in runs:
        first, *rest = [row for row in metrics(run) if row["step"] > 0]
        for row in rest:
            assert {k for k in first if not k.startswith(("eval/", "time/"))} == {
                k for k in row if not k.startswith(("eval/", "time/"))
            }


def test_memory() -> None:
    assert {field.name for field in fields(LedgerRow)} == documented("memory.jsonl")


def test_rollouts(runs: list[Path]) -> None:
    (keys,) = {frozenset(row) for run in runs[1:] for row in rollouts(run, 1)}
    assert keys == documented("rollouts/step_N.jsonl")
