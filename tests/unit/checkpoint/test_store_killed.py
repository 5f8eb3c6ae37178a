"""SIGKILL before every single call that a save makes into the file system."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("keep", [1, 2])
def test_a_complete_checkpoint_is_found_wherever_a_save_is_killed(tmp_path: Path, keep: int) -> None:
    folder = tmp_path / "checkpoints"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.checkpoint.killed_saves", str(folder), str(keep)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    outcomes = json.loads(ran.stdout)

    old, new = keep, keep + 1
    renamed = next(i for i, outcome in enumerate(outcomes) if outcome["killed_at"][0] == "os.rename") + 1
    places = [f"{event} {Path(path).name}" for event, path in (outcome["killed_at"] for outcome in outcomes)]
    # The sweep really passed the places that matter.
    files = [f"{part}-0000{i}-of-00002.safetensors" for part in ("model", "optimizer") for i in (1, 2)]
    opened = [f"open {name}" for name in ("state.json", *files, "model.safetensors.index.json", "manifest.json")]
    for place in (*opened, "shutil.rmtree .step_1.old", "os.remove state.json"):
        assert any(name.startswith(place) for name in places), places
    for i, outcome in enumerate(outcomes):
        assert outcome["whole"], outcome
        assert outcome["found"] == (old if i < renamed else new), outcome
        assert len(outcome["complete"]) >= keep, outcome  # deletion never comes first
        assert outcome["after"][-keep:] == list(range(2, new + 1)), outcome  # the next save finds nothing in its way
        assert outcome["partial"] == [], outcome
    assert {outcome["found"] for outcome in outcomes} == {old, new}
