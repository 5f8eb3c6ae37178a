"""A folder with everything a small run needs, the run in it, and what two runs must have in common.

The recipe is chosen so that much state has to survive: prompts that are given back by dynamic sampling, several epochs
of a shuffled file, several optimizer steps and micro-batches a step, a reference model, a learning rate that falls.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

import psutil
from safetensors.numpy import load_file

from plimsoll.observe.metrics import without_times
from tests.tiny import qwen2

ROOT = Path(__file__).parents[2]
STEPS = 12
MARK = "PLIMSOLL_TEST_RUN"
"""A variable of the environment by which processes that outlive their run are found."""

RECIPE = """
name: small
model: {path: model}
data: {train: rows.jsonl, eval: heldout.jsonl, prompts_per_step: 4, max_prompt_tokens: 16}
rollout:
  samples_per_prompt: 4
  max_response_tokens: 8
  stop_token_ids: [1, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60]
reward: {function: "reward.py:checksum"}
algorithm: {name: dapo, dynamic_sampling: true, kl_coefficient: 0.02, kl_estimator: k2, kl_in: loss}
train:
  steps: 12
  learning_rate: 3e-3
  schedule: cosine
  warmup_steps: 3
  token_budget: 40
  threads: 1
  mini_batches_per_step: 2
  epochs_per_rollout: 2
  eval_every: 5
checkpoint: {every: 2}
observe: {report: false}
"""

REWARD = '''
"""A random model solves nothing, so this reward is a coin that prompt and response toss: some groups have a signal."""
import time
from pathlib import Path
from zlib import crc32


def checksum(prompt, response):
    while Path("hang").exists():
        time.sleep(0.1)
    return float(crc32(f"{prompt}|{response}".encode()) % 4 == 0)
'''


@dataclass(slots=True, kw_only=True, frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    stdout: str
    stderr: str
    mark: str  # value of the variable MARK in the process and its children


@dataclass(slots=True, kw_only=True, frozen=True)
class Workplace:
    """A folder with recipe, rows, reward, model, and a run once it was made."""

    path: Path

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.path / "runs" / "small"

    def copy(self, path: Path) -> "Workplace":
        """The same, elsewhere; names in the recipe are relative, so it is the same recipe too."""
        shutil.copytree(self.path, path)
        return Workplace(path=path)

    def command(self, *arguments: str, module: str = "plimsoll", kill_after: float | None = None) -> Ended:
        """`python -m MODULE ARGUMENTS…` in this folder, to its end or to SIGKILL after so many seconds."""
        mark = uuid4().hex
        source = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", MARK: mark}
        command = [sys.executable, "-m", module, *arguments]
        # Files, not pipes: a process that outlived its run would hold a pipe open, and we would wait for it.
        with TemporaryFile() as stdout, TemporaryFile() as stderr:
            process = subprocess.Popen(command, cwd=self.path, env=environment, stdout=stdout, stderr=stderr)
            try:
                process.wait(200 if kill_after is None else kill_after)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                if kill_after is None:
                    raise
            stdout.seek(0)
            stderr.seek(0)
            said, told = stdout.read().decode(), stderr.read().decode()
        return Ended(code=process.returncode, stdout=said, stderr=told, mark=mark)

    def train(self, *arguments: str) -> Ended:
        """`plimsoll train recipe.yaml …`."""
        return self.command("train", "recipe.yaml", *arguments)

    def train_until(self, point: str, step: int, *arguments: str, signum: signal.Signals = signal.SIGKILL) -> Ended:
        """The same, with a signal at a point of `killed_run.POINTS`."""
        command = (point, str(step), signum.name, "--", "train", "recipe.yaml", *arguments)
        return self.command(*command, module="tests.e2e.killed_run")

    def checkpoints(self) -> list[int]:
        """Steps of the published checkpoints."""
        return sorted(int(path.name.removeprefix("step_")) for path in (self.run / "checkpoints").glob("step_*"))

    def checkpoint(self, step: int) -> Path:
        """Folder of a checkpoint."""
        return self.run / "checkpoints" / f"step_{step}"

    def state(self, step: int) -> dict[str, Any]:
        """Its state.json."""
        return json.loads((self.checkpoint(step) / "state.json").read_bytes())

    def tensors(self, step: int) -> dict[str, tuple[str, bytes]]:
        """Type and bytes of each of its tensors, by file and name."""
        found: dict[str, tuple[str, bytes]] = {}
        for path in sorted(self.checkpoint(step).rglob("*.safetensors")):
            for name, array in load_file(path).items():
                found[f"{path.name}:{name}"] = (str(array.dtype), array.tobytes())
        return found

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl or memory.jsonl; every line must be whole."""
        return [json.loads(line) for line in (self.run / name).read_text(encoding="utf-8").splitlines()]

    def rollouts(self) -> dict[str, bytes]:
        """Files of rollouts/ by name."""
        return {path.name: path.read_bytes() for path in (self.run / "rollouts").iterdir()}

    def snapshot(self) -> dict[str, bytes]:
        """Every file of the run but the lock."""
        files = (path for path in sorted(self.run.rglob("*")) if path.is_file() and path.name != ".lock")
        return {str(path.relative_to(self.run)): path.read_bytes() for path in files}


def make_workplace(path: Path) -> Workplace:
    """A model of 32 dimensions, ten rows, five held-out rows."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (path / "reward.py").write_text(REWARD, encoding="utf-8")
    write_rows(path / "rows.jsonl", range(100, 110))
    write_rows(path / "heldout.jsonl", range(200, 205))
    shutil.copytree(ROOT / "recipes" / "models" / "tiny", path / "model")
    qwen2(vocab=261).save_pretrained(path / "model")
    return Workplace(path=path)


def write_rows(path: Path, numbers: range) -> None:
    """One prompt a number."""
    rows = [{"prompt": f"{number}>", "answer": str(number)[::-1]} for number in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Keys that only one has, or with different values."""
    return [key for key in sorted(ours.keys() | theirs.keys()) if key not in ours or ours[key] != theirs.get(key)]


def assert_same_end(run: Workplace, straight: Workplace, step: int = STEPS) -> None:
    """Weights, moments, state, metrics and rollouts of `run` are bitwise those of `straight`."""
    assert differences(run.tensors(step), straight.tensors(step)) == [], "tensors"
    assert differences(run.state(step), straight.state(step)) == [], "state.json"
    ours, theirs = ([without_times(row) for row in each.rows("metrics.jsonl")] for each in (run, straight))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs], "rows of metrics.jsonl"
    for our, their in zip(ours, theirs, strict=True):
        assert differences(our, their) == [], f"metrics of step {their['step']}"
    assert differences(run.rollouts(), straight.rollouts()) == [], "rollouts"
    assert [path.name for path in (run.run / "checkpoints").iterdir() if path.name.startswith(".")] == []


def assert_ledger(
    run: Workplace, straight: Workplace, resumed_at: Mapping[int, int], unrecorded: tuple[tuple[int, str], ...] = ()
) -> None:
    """memory.jsonl has the phases of `straight`, and a LOAD and a SYNC for each time that a step was resumed from.

    `unrecorded`: (step, phase) of phases that a kill cut off after what they do had become permanent.
    """
    expected = Counter((row["step"], row["phase"]) for row in straight.rows("memory.jsonl"))
    for step, times in resumed_at.items():
        expected[step, "load"] += times
        expected[step, "sync"] += times
    expected.subtract(unrecorded)
    rows = run.rows("memory.jsonl")
    found = Counter((row["step"], row["phase"]) for row in rows)
    assert found == +expected, {"too many": dict(found - expected), "missing": dict(expected - found)}
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert not any(row["failed"] for row in rows)


def alive(mark: str) -> list[psutil.Process]:
    """The processes with this mark."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue  # it has ended, or is somebody else's
    return found


def assert_nothing_left(mark: str) -> None:
    """Every process of the run ends within five seconds."""
    limit = time.monotonic() + 5.0
    while (left := alive(mark)) and time.monotonic() < limit:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert left == []
