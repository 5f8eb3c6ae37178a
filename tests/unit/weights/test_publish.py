"""A folder that appears complete or not at all, and leaves no trace when it does not."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.disk import free_bytes, make_folders
from plimsoll.weights.publish import check_free_name, check_space, publish


def fill(folder: Path) -> str:
    assert folder.name.startswith(".")
    (folder / "file").write_text("whole")
    return "done"


def full(folder: Path) -> str:
    fill(folder)
    raise CheckpointError("the disk is full")


def interrupted(folder: Path) -> str:
    fill(folder)
    raise KeyboardInterrupt


def test_parents_are_made_and_stay_with_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "out"
    assert publish(out, fill, ControlGroup()) == "done"
    assert [path.name for path in out.iterdir()] == ["file"]
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize(("write", "kind"), [(full, CheckpointError), (interrupted, KeyboardInterrupt)])
def test_what_fails_takes_along_the_parents_that_were_made_for_it(
    write: Callable[[Path], str], kind: type[BaseException], tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(kind):
        publish(tmp_path / "there" / "a" / "b" / "out", write, ControlGroup())
    assert os.listdir(tmp_path) == ["there"]
    assert os.listdir(tmp_path / "there") == []


def test_a_parent_that_somebody_else_has_used_meanwhile_stays(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (tmp_path / "a" / "theirs").touch()
        full(folder)

    with pytest.raises(CheckpointError):
        publish(tmp_path / "a" / "b" / "out", write, ControlGroup())
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "theirs"]


def test_parents_that_cannot_all_be_made_are_not_half_made(tmp_path: Path) -> None:
    too_long = "x" * 300
    with pytest.raises(OSError, match="too long"):
        make_folders(tmp_path / "a" / too_long / "b")
    assert os.listdir(tmp_path) == []


def test_a_link_to_an_empty_folder_is_filled_on_the_disk_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "large" / "out").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "large" / "out")
    asked: list[Path] = []

    def free(folder: Path) -> int:
        asked.append(folder)
        return 10

    check_free_name(tmp_path / "out")
    check_space(tmp_path / "out", 10, free)
    publish(tmp_path / "out", fill, ControlGroup())

    assert asked == [tmp_path / "large"]
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "large" / "out" / "file").read_text() == "whole"
    assert os.listdir(tmp_path / "large") == ["out"]


def test_the_remedy_is_that_of_who_asks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"are free there\); set run_root$"):
        publish(tmp_path / "file" / "out", fill, ControlGroup(), remedy="set run_root")


def test_where_a_file_system_is_mounted_nothing_is_renamed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(RefusedError, match="name a folder in it"):
        check_free_name(tmp_path)


def test_free_bytes_are_those_of_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert abs(free_bytes(tmp_path / "not" / "yet") - status.f_bavail * status.f_frsize) < 1 << 30
