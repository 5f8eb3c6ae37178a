"""What a path to a model means, and what is said when it means nothing."""

from pathlib import Path

import pytest

from plimsoll.checkpoint.locate import locate_model
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.errors import RefusedError


def save(run: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(run / "checkpoints", keep=None)

    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")

    for step in steps:
        store.save(step, write)
    return store


def refused(path: Path, **options: object) -> str:
    with pytest.raises(RefusedError) as error:
        locate_model(path, **options)  # pyright: ignore[reportArgumentType]
    return str(error.value)


def test_a_hugging_face_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    located = locate_model(str(tmp_path))

    assert (located.model, located.checkpoint, located.step) == (tmp_path, None, None)


def test_a_run_is_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    store = save(tmp_path, 2, 10)
    (store.path_of(10) / "model" / "config.json").write_text("[]")  # as long, but not the same

    located = locate_model(tmp_path)

    assert located.model == store.path_of(2) / "model"
    assert (located.checkpoint, located.step) == (store.path_of(2), 2)
    assert [skipped.path for skipped in located.skipped] == [store.path_of(10)]
    assert locate_model(tmp_path, verify=False).step == 10


def test_a_step_is_taken_by_number_or_by_folder(tmp_path: Path) -> None:
    store = save(tmp_path, 2, 10)

    assert locate_model(tmp_path, step=2).step == 2
    assert locate_model(store.path_of(2)).model == store.path_of(2) / "model"
    assert locate_model(store.path_of(2), step=2).step == 2
    assert locate_model(store.path_of(2) / "model").model == store.path_of(2) / "model"
    assert "no checkpoint of step 3; complete ones: 2, 10" in refused(tmp_path, step=3)
    assert "is the checkpoint of step 2, not of step 3" in refused(store.path_of(2), step=3)


def test_a_checkpoint_that_is_not_complete_is_refused_with_the_reason(tmp_path: Path) -> None:
    store = save(tmp_path, 2)
    (store.path_of(2) / "model" / "config.json").unlink()

    assert "model/config.json is missing" in refused(store.path_of(2))
    assert "model/config.json is missing" in refused(tmp_path, step=2)
    assert "model/config.json is missing" in refused(tmp_path)


def test_a_complete_checkpoint_without_a_model_is_refused(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path / "checkpoints", keep=None).save(1, lambda folder: folder.joinpath("x").touch())

    assert f"{path} holds no model" in refused(path)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 2).path_of(2).rename(tmp_path / "best")

    assert "is not named step_N" in refused(path)


def test_a_folder_that_is_neither_says_what_each_would_need(tmp_path: Path) -> None:
    message = refused(tmp_path, setting="model.path")

    assert message.startswith(f"model.path: {tmp_path} ")
    assert "config.json is missing" in message
    assert "checkpoints/ is missing" in message
    assert "has no checkpoints/ to take step 4 from" in refused(tmp_path, step=4)
