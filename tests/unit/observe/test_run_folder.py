"""Who may use a run folder, and whether a recipe may go on in it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plimsoll.config.load import load_recipe
from plimsoll.config.recipe import Recipe
from plimsoll.errors import RunFolderError
from plimsoll.observe.run_folder import CHANGEABLE, RunFolder, changed_keys, read_recipe

RECIPE = """
name: run
model: {config: model}
data: {train: rows.jsonl}
rollout: {kv_memory: 1GiB}
"""


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return load_recipe(path, [f"run_root={tmp_path / 'runs'}", *overrides])


def prepare(root: Path, *, resume: bool = False, overwrite: bool = False) -> RunFolder:
    return RunFolder.prepare(root, "run", resume=resume, overwrite=overwrite)


def finished_run(tmp_path: Path) -> Path:
    with prepare(tmp_path / "runs") as folder:
        folder.record_recipe(recipe(tmp_path))
        folder.metrics.write_text('{"step": 1}\n')
        (folder.checkpoints / "step_1").mkdir()
        (folder.checkpoints / "step_1" / "manifest.json").write_text("{}")
    return folder.path


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_new_folder_is_made_with_its_subfolders_and_recipe(tmp_path: Path) -> None:
    given = recipe(tmp_path)
    with prepare(tmp_path / "deep" / "runs") as folder:
        folder.record_recipe(given)
        assert folder.path == tmp_path / "deep" / "runs" / "run"
        assert folder.rollouts.is_dir()
        assert folder.checkpoints.is_dir()
        assert read_recipe(folder.recipe) == given
        assert json.loads(folder.recipe.read_text())["rollout"]["kv_memory"] == 1024**3


def test_a_folder_that_holds_anything_is_refused_with_the_three_ways_out(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    (path / "notes.txt").write_text("mine")
    before = contents(path)
    with pytest.raises(RunFolderError) as caught:
        prepare(tmp_path / "runs")
    assert caught.value.exit_code == 2
    assert all(way in str(caught.value) for way in ("--resume", "--overwrite", "name="))
    assert contents(path) == before


def test_overwrite_deletes_a_run(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    with prepare(tmp_path / "runs", overwrite=True) as folder:
        assert set(contents(path)) == {".lock"}
        assert not list(folder.checkpoints.iterdir())


def test_overwrite_of_nothing_or_of_an_empty_folder_is_a_new_run(tmp_path: Path) -> None:
    prepare(tmp_path / "runs", overwrite=True).close()
    (tmp_path / "other" / "run").mkdir(parents=True)
    prepare(tmp_path / "other", overwrite=True).close()


@pytest.mark.parametrize("text", [None, "pancakes", "{}", '{"name": "pancakes", "model": 1}', "[1]"])
def test_overwrite_refuses_what_is_not_a_run_folder(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("years of work")
    if text is not None:
        (path / "recipe.json").write_text(text)
    before = contents(path)
    with pytest.raises(RunFolderError, match="not deleted"):
        prepare(tmp_path / "runs", overwrite=True)
    assert contents(path) == before


def test_overwrite_does_not_follow_links_out_of_the_folder(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep.txt").write_text("keep")
    (path / "link").symlink_to(outside)
    prepare(tmp_path / "runs", overwrite=True).close()
    assert (outside / "keep.txt").read_text() == "keep"
    assert not (path / "link").exists()


def test_a_deletion_that_was_cut_short_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = finished_run(tmp_path)

    def fail(entry: Path) -> None:
        raise OSError(5, f"cannot delete {entry}")

    with monkeypatch.context() as patch:
        patch.setattr("plimsoll.observe.run_folder.shutil.rmtree", fail)
        with pytest.raises(RunFolderError, match="cannot delete"):
            prepare(tmp_path / "runs", overwrite=True)
    assert (path / "recipe.json").exists()
    prepare(tmp_path / "runs", overwrite=True).close()


def test_what_a_run_killed_before_its_recipe_leaves_counts_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    (path / ".lock").write_text("123\n")
    (path / "recipe.json.tmp").write_text('{"na')
    (path / "rollouts").mkdir()
    (path / "checkpoints").mkdir()
    prepare(tmp_path / "runs").close()


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="--resume"):
        prepare(tmp_path / "runs", resume=True)
    assert not (tmp_path / "runs").exists()


def test_resume_and_overwrite_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="exclude"):
        prepare(tmp_path / "runs", resume=True, overwrite=True)


def test_resume_goes_on_with_the_same_recipe_and_keeps_everything(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    before = contents(path)
    with prepare(tmp_path / "runs", resume=True) as folder:
        folder.record_recipe(recipe(tmp_path))
    after = contents(path)
    assert {k: v for k, v in after.items() if k != ".lock"} == {k: v for k, v in before.items() if k != ".lock"}


def test_resume_takes_what_may_change_and_records_it(tmp_path: Path) -> None:
    finished_run(tmp_path)
    given = recipe(
        tmp_path,
        "train.steps=500",
        "checkpoint.every=7",
        "observe.console=plain",
        "data.eval=held_out.jsonl",
        "rollout.eval.samples=4",
    )
    with prepare(tmp_path / "runs", resume=True) as folder:
        folder.record_recipe(given)
    assert read_recipe(folder.recipe) == given


def test_resume_refuses_what_changes_the_mathematics_naming_each_key(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    before = (path / "recipe.json").read_bytes()
    given = recipe(tmp_path, "train.learning_rate=0.5", "seed=3", "train.steps=500", "rollout.kv_memory=2GiB")
    with prepare(tmp_path / "runs", resume=True) as folder, pytest.raises(RunFolderError) as caught:
        folder.record_recipe(given)
    *causes, advice = caught.value.causes
    assert len(causes) == 3
    assert "rollout.kv_memory was 1073741824 and is now 2147483648" in causes[0]
    assert "seed was 0 and is now 3" in causes[1]
    assert "train.learning_rate was 1e-06 and is now 0.5" in causes[2]
    assert "name=OTHER" in advice
    assert (path / "recipe.json").read_bytes() == before


def test_a_recipe_of_another_version_is_refused_with_its_keys(tmp_path: Path) -> None:
    path = finished_run(tmp_path) / "recipe.json"
    content: dict[str, Any] = json.loads(path.read_text())
    content["train"]["warp"] = 9
    path.write_text(json.dumps(content))
    with pytest.raises(RunFolderError, match=r"train\.warp"):
        read_recipe(path)
    with pytest.raises(RunFolderError, match="not a run folder"):
        read_recipe(tmp_path / "recipe.json")


def test_every_changeable_key_exists(tmp_path: Path) -> None:
    known = json.loads(recipe(tmp_path).model_dump_json())
    for entry in CHANGEABLE:
        section: Any = known
        for part in entry.rstrip(".").split("."):
            assert part in section, entry
            section = section[part]
        assert isinstance(section, dict) == entry.endswith("."), entry


def test_a_run_may_go_on_with_other_capacities(tmp_path: Path) -> None:
    other = recipe(tmp_path, "memory.host_memory=64GiB", "memory.residual_tolerance=1GiB")
    assert changed_keys(recipe(tmp_path), other) == []
    assert changed_keys(recipe(tmp_path), recipe(tmp_path, "rollout.kv_memory=64GiB")) != []


def test_equal_recipes_differ_in_nothing(tmp_path: Path) -> None:
    assert changed_keys(recipe(tmp_path), recipe(tmp_path, "run_root=elsewhere")) == []


HOLD = """
import sys, pathlib, time
from plimsoll.observe.run_folder import RunFolder
folder = RunFolder.prepare(pathlib.Path(sys.argv[1]), "run", resume=False, overwrite=True)
print("held", flush=True)
time.sleep(60)
"""


def test_two_processes_cannot_use_one_folder_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    finished_run(tmp_path)
    root = tmp_path / "runs"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=rf"in use by process {holder.pid}\b"):
            prepare(root, overwrite=True)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    prepare(root, overwrite=True).close()


def test_check_refuses_early_and_makes_nothing(tmp_path: Path) -> None:
    RunFolder.check(tmp_path / "runs", "run", resume=False, overwrite=False)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(RunFolderError, match="--resume"):
        RunFolder.check(tmp_path / "runs", "run", resume=True, overwrite=False)
    finished_run(tmp_path)
    with pytest.raises(RunFolderError, match="not empty"):
        RunFolder.check(tmp_path / "runs", "run", resume=False, overwrite=False)
    RunFolder.check(tmp_path / "runs", "run", resume=True, overwrite=False)
    RunFolder.check(tmp_path / "runs", "run", resume=False, overwrite=True)


def test_a_place_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunFolderError, match="run_root="):
        prepare(tmp_path / "runs")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run").write_text("a file")
    with pytest.raises(RunFolderError, match="not a folder"):
        prepare(tmp_path / "other")
