"""What a plan makes of recipe, data and machine."""

from pathlib import Path

from plimsoll.sizing import clip_intervals
from tests.unit.config.recipes import MINIMAL, load


def test_intervals_longer_than_the_run_are_cut_and_said_once_each(tmp_path: Path) -> None:
    overrides = ["data.eval=task:add", "train.eval_every=100", "checkpoint.every=50"]
    recipe = load(tmp_path, MINIMAL, overrides)
    cut = clip_intervals(recipe, steps=2)
    assert (cut.eval_every, cut.checkpoint_every) == (2, 2)
    assert [note.split("`")[1] for note in cut.notes] == [
        "train.eval_every=100",
        "checkpoint.every=50",
    ]
    kept = clip_intervals(recipe, steps=100)
    assert (kept.eval_every, kept.checkpoint_every, kept.notes) == (100, 50, ())
    off = clip_intervals(load(tmp_path), steps=2)
    assert (off.eval_every, off.checkpoint_every, off.notes) == (None, None, ())
