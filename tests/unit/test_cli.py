"""The command line: exit codes, what goes to which stream, and that nothing heavy is imported before a refusal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.cli import main
from plimsoll.config.presets import PRESETS
from plimsoll.config.schema import leaves, shown

ROOT = Path(__file__).parents[2]

RECIPE = """
name: small
run_root: {root}
model: {{path: {model}}}
data: {{train: "task:reverse_string"}}
"""

CHILD = """
import contextlib, io, json, sys
from plimsoll.cli import main
results = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    heavy = [name for name in ("torch", "transformers", "safetensors", "tokenizers") if name in sys.modules]
    results.append([code, out.getvalue(), err.getvalue(), heavy])
print(json.dumps(results))
"""

FAKE_RUN = """
import os, sys, types
from dataclasses import dataclass
from plimsoll.cli import main

@dataclass(frozen=True)
class Summary:
    def as_json(self):
        return {{"steps": 2, "eval_after": 0.123456789, "environment": os.environ["TOKENIZERS_PARALLELISM"]}}

def run(recipe, *, resume, overwrite):
    assert "torch" not in sys.modules
    assert "expandable_segments:True" in os.environ["PYTORCH_ALLOC_CONF"]
    print("a log line", file=sys.stderr)
    {body}

fake = types.ModuleType("plimsoll.train")
fake.run = run
sys.modules["plimsoll.train"] = fake
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe that passes every check; its model is an empty folder."""
    (tmp_path / "model").mkdir()
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE.format(root=tmp_path / "runs", model=tmp_path / "model"), encoding="utf-8")
    return path


def child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, env=env, check=False
    )


REFUSALS = (
    (["lerning_rate=1"], "`train.learning_rate`"),
    (["train.lerning_rate=1", "data.prompts_per_step=512", "cluster.ranks=6"], "section `train`"),
    (["data.prompts_per_step=512", "cluster.ranks=6"], "510 or 516"),
    (["data.prompts_per_step=1", "rollout.samples_per_prompt=1"], "a group needs at least 2"),
    (["model.path=nowhere"], "`model.path=nowhere` is not a folder"),
    (["data.eval=nowhere.jsonl"], "`data.eval=nowhere.jsonl` is not a file"),
    (["rollout.engine=vllm"], "plimsoll-rl[vllm]"),
    (["rollout.engine=sglang"], "not in this version"),
    (["--resume", "--overwrite"], "--overwrite"),
    (["--resume"], "--resume"),
    (["reward.function=nowhere:function"], "nowhere"),
)


def refusals(*commands: list[str]) -> list[str]:
    """What is said about each command, in one process; each must end with 2, print nothing and import no torch."""
    done = child(CHILD, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    said: list[str] = []
    for command, (code, out, err, heavy) in zip(commands, json.loads(done.stdout), strict=True):
        assert (code, out, heavy) == (2, "", []), (command, err)
        assert all(line.startswith("plimsoll: ") for line in err.splitlines()), (command, err)
        said.append(err)
    return said


def test_a_refusal_is_exit_code_2_before_torch(recipe: Path) -> None:
    said = refusals(*(["train", str(recipe), *arguments] for arguments, _ in REFUSALS))
    for text, (arguments, words) in zip(said, REFUSALS, strict=True):
        assert words in text, arguments


def test_every_cause_is_a_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", str(recipe), "train.stepz=1", "seed=-1", "rollout.top_p=2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("plimsoll: `") or "unknown key" in line for line in lines)


def test_a_run_folder_that_holds_anything_is_refused_before_torch(recipe: Path) -> None:
    folder = recipe.parent / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    (said,) = refusals(["train", str(recipe)])
    assert all(word in said for word in ("--resume", "--overwrite", "name="))
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_a_missing_run_of_a_neighbour_recipe_names_the_command_that_makes_it(recipe: Path) -> None:
    neighbour = recipe.parent / "warm_up_sft.yaml"
    neighbour.write_text("name: warm\n")
    (recipe.parent / "broken.yaml").write_text("name: [")
    (said,) = refusals(["train", str(recipe), f"model.path={recipe.parent / 'runs' / 'warm'}"])
    assert f"`plimsoll sft {neighbour}`" in said


def test_json_is_one_object_on_the_last_line_of_stdout(recipe: Path) -> None:
    done = child(FAKE_RUN.format(body="return Summary()"), "train", str(recipe), "--json", "train.steps=2")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line) == {"steps": 2, "eval_after": 0.123456789, "environment": "false"}
    assert "a log line" in done.stderr


def test_without_json_a_person_reads_one_line(recipe: Path) -> None:
    done = child(FAKE_RUN.format(body="return Summary()"), "train", str(recipe))
    assert done.stdout == "steps=2  eval_after=0.1235  environment=false\n"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("raise KeyboardInterrupt", 130, ""),
        (
            "import signal; from plimsoll.cluster.signals import Interrupted;"
            " raise Interrupted(signal.SIGTERM, abandoned=False)",
            143,
            "plimsoll: interrupted by SIGTERM",
        ),
        ("raise ValueError('a fault of ours')", 1, "ValueError: a fault of ours"),
        ("raise OSError(28, 'No space left on device', 'rollouts.jsonl')", 1, "plimsoll: the disk is full"),
        ("from plimsoll.errors import RewardError; raise RewardError('too many')", 1, "plimsoll: too many"),
        ("from plimsoll.errors import DataError; raise DataError(['a', 'b'])", 2, "plimsoll: a\nplimsoll: b"),
    ],
)
def test_exit_codes_of_a_run(recipe: Path, body: str, code: int, words: str) -> None:
    done = child(FAKE_RUN.format(body=body), "train", str(recipe))
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert ("Traceback" in done.stderr) == (code == 1 and "ValueError" in words)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_help_documents_every_key(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    for key, leaf in leaves().items():
        assert f"{key} (" in flat
        assert " ".join((leaf.info.description or "no description").split()) in flat
        assert leaf.accepts in flat
    presets = ", ".join(f"{name}={shown(preset['clip_high'])}" for name, preset in PRESETS.items())
    assert f"set by the preset: {presets}" in flat


def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert main(["train", "x.yaml", "--no-such-option"]) == 2
    assert main(["no-such-command"]) == 2
    assert main(["export", "nowhere", "out"]) == 2
    assert main(["eval", "nowhere"]) == 2
    assert "name a run folder" in capsys.readouterr().err


def test_evaluation_of_a_plain_model_asks_for_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert "--recipe" in capsys.readouterr().err


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "plimsoll", "plan"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "name a recipe" in done.stderr
