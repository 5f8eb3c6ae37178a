"""`plimsoll plan --from-verl` as its users call it, and the recipe that it makes."""

import json
from pathlib import Path

import pytest

from plimsoll.cli import main
from plimsoll.memory.plan import capacity

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "unit" / "migrate" / "scripts" / "dapo_qwen3_next_80b_4x8.sh"
MACHINE = ("memory.device_memory=79GiB", "memory.host_memory=960GiB")


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is here would answer what a script does not say."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(capacity, "find_gpus", lambda: None)


def test_the_printed_recipe_is_planned_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "--from-verl", str(SCRIPT), *MACHINE])
    text = capsys.readouterr().out
    recipe = tmp_path / "recipe.yaml"
    part = text.partition("\n2. ")[2].partition("\n\nNot in the recipe")[0]
    recipe.write_text(part.split("\n", 2)[2] + "\n", encoding="utf-8")
    assert main(["plan", "--from-verl", str(SCRIPT), *MACHINE, "--json"]) == code
    compared = json.loads(capsys.readouterr().out)
    assert main(["plan", str(recipe), "--json"]) == code
    assert json.loads(capsys.readouterr().out) == compared["plan"]


def test_the_report_s_job(capsys: pytest.CaptureFixture[str]) -> None:
    """The reported job fits here, on equal nodes; verl's first nodes hold a whole fp32 model more while it loads."""
    assert main(["plan", "--from-verl", str(SCRIPT), *MACHINE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["choices"]["optimizer_state"] == "streamed"
    assert len(set(found["plan"]["host"]["node_peak_bytes"])) == 1
    loaded = found["verl"]["host"]["node_load_peak_bytes"]
    assert [round((node - min(loaded)) / 1e9) for node in loaded] == [319, 0, 319, 0]
    assert main(["plan", "--from-verl", str(SCRIPT), *MACHINE, "train.optimizer_state=device", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["plan"]["refusals"]


def test_what_a_script_does_not_say_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from-verl", str(SCRIPT)]) == 2
    assert "memory.device_memory" in capsys.readouterr().err
    broken = tmp_path / "broken.sh"
    broken.write_text("python3 -m verl.trainer.main_ppo data.train_files='x\n", encoding="utf-8")
    assert main(["plan", "--from-verl", str(broken), *MACHINE]) == 2
    assert f"{broken}, line 1: a single quote opens" in capsys.readouterr().err
    assert main(["plan", "--from-verl", str(tmp_path / "none.sh")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--curve", "--sft"])
def test_options_of_a_recipe_are_refused_for_a_script(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from-verl", str(SCRIPT), *MACHINE, option]) == 2
    assert "are for a recipe" in capsys.readouterr().err
