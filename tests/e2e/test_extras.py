"""What a recipe needs of an extra that is not installed is refused by name, before anything heavy starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.small import Small
from tests.extras import EXTRAS

BLOCKED = "import sys; sys.modules[sys.argv.pop(1)] = None; from plimsoll.cli import main; sys.exit(main(sys.argv[1:]))"
"""A plimsoll in which the import of one module fails, as if it were not installed."""

ASKS: dict[str, tuple[str, ...]] = {
    "data.train": ("tasks", "data.train=gym:chain_sum", "data.task={}", "data.eval=null"),
    "reward.function": ("tasks", "reward.function=reasoning_gym"),
    "reward.parts": ("math", "reward.parts={sums: {function: math}}", "reward.function=exact_match"),
    "math": ("math", "reward.function=math"),
    "wandb": ("wandb", "observe.wandb=offline"),
    "tensorboard": ("tensorboard", "observe.tensorboard=true"),
}


def refused(extra: str, arguments: list[str], folder: Path) -> str:
    """stderr of a run without the extra's module."""
    command = [sys.executable, "-c", BLOCKED, EXTRAS[extra], *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("asked", list(ASKS))
def test_a_recipe_that_needs_an_extra_is_refused_with_the_command_that_installs_it(asked: str, small: Small) -> None:
    extra, *settings = ASKS[asked]
    text = refused(extra, ["train", *small.arguments(settings)], small.folder)
    assert f"pip install 'plimsoll-rl[{extra}]'" in text
    assert "Traceback" not in text
    assert not small.runs.exists()


def test_a_gguf_file_is_refused_with_the_command_that_installs_its_reader(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    text = refused("gguf", ["export", str(file), str(tmp_path / "out")], tmp_path)
    assert "pip install 'plimsoll-rl[gguf]'" in text
    assert not (tmp_path / "out").exists()


def test_every_extra_that_a_test_belongs_to_is_one_of_the_distribution() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(EXTRAS) <= set(project["optional-dependencies"])
    dev = project["optional-dependencies"]["dev"][0]
    assert set(dev.partition("[")[2].rstrip("]").split(",")) == set(EXTRAS)
