"""Publishing, damage, retention and disk space, without processes being killed (that is test_store_killed.py)."""

import errno
import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.errors import CheckpointError, RunFolderError

Writer = Callable[[Path], None]


def writer(text: str) -> Writer:
    """Two files, one of them in a folder."""

    def write(folder: Path) -> None:
        (folder / "a.bin").write_text(text)
        (folder / "model").mkdir()
        (folder / "model" / "b.bin").write_text(text * 2)

    return write


def full_disk(folder: Path) -> None:
    """The disk fills up at the second file."""
    (folder / "a.bin").write_text("half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "b.bin"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=None, say=said.append)


def test_a_save_is_published_whole_with_sizes_and_hashes(store: CheckpointStore) -> None:
    path = store.save(3, writer("x"))

    assert path == store.folder / "step_3"
    assert names(store.folder) == ["step_3"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["step"] == 3
    # SHA-256 of "x" and "xx", from coreutils' sha256sum.
    assert manifest["files"] == {
        "a.bin": {"bytes": 1, "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"},
        "model/b.bin": {"bytes": 2, "sha256": "5dde896887f6754c9b15bfe3a441ae4806df2fde94001311e08bf110622e0bbe"},
    }


def test_newest_is_by_number_and_not_by_name_or_time(store: CheckpointStore) -> None:
    for step in (10, 9, 100, 2):
        store.save(step, writer(str(step)))

    assert store.newest().step == 100
    assert store.complete_steps() == [2, 9, 10, 100]


def test_one_changed_byte_is_skipped_and_said(store: CheckpointStore) -> None:
    store.save(1, writer("one"))
    store.save(2, writer("two"))
    (store.path_of(2) / "a.bin").write_text("twO")

    found = store.newest()

    assert found.step == 1
    assert [skipped.path.name for skipped in found.skipped] == ["step_2"]
    assert "a.bin has changed" in found.skipped[0].reason
    assert store.newest(verify=False).step == 2


def cut_manifest(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:40])


def other_format(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 2, "step": 2, "files": {}}')


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "file missing": (lambda folder: (folder / "model" / "b.bin").unlink(), "model/b.bin is missing"),
    "file cut": (lambda folder: (folder / "a.bin").write_text("t"), "a.bin has 1 bytes, 3 were written"),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest cut": (cut_manifest, "manifest.json cannot be read"),
    "manifest of another format": (other_format, "this version reads format 1"),
    "manifest is a list": (lambda folder: (folder / "manifest.json").write_text("[]"), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_checkpoint_never_counts(store: CheckpointStore, damage: str, verify: bool) -> None:
    store.save(1, writer("one"))
    store.save(2, writer("two"))
    apply, reason = DAMAGES[damage]
    apply(store.path_of(2))

    found = store.newest(verify)

    assert found.step == 1
    assert reason in found.skipped[0].reason
    assert store.complete_steps() == [1]


def test_a_folder_under_the_number_of_another_step_does_not_count(store: CheckpointStore) -> None:
    store.save(1, writer("one"))
    store.path_of(1).rename(store.path_of(7))

    with pytest.raises(RunFolderError, match=r"step_7: manifest.json is of step 1"):
        store.newest()


def test_nothing_to_find_is_refused_with_every_reason(store: CheckpointStore) -> None:
    with pytest.raises(RunFolderError, match="no complete checkpoint"):
        store.newest()
    store.save(1, writer("one"))
    (store.path_of(1) / "a.bin").unlink()
    (store.folder / ".step_2.tmp-99").mkdir()

    with pytest.raises(RunFolderError) as refused:
        store.newest()

    assert len(refused.value.causes) == 3
    assert "a save that did not finish" in str(refused.value)
    assert store.scan().checkpoint is None


def test_a_full_disk_leaves_the_old_one_and_nothing_partial(tmp_path: Path, said: list[str]) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, say=said.append, free=lambda folder: 3 << 20)
    store.save(2, writer("two"))

    with pytest.raises(CheckpointError) as failed:
        store.save(4, full_disk)

    assert names(store.folder) == ["step_2"]
    assert store.newest().step == 2
    for fact in ("step 4", str(store.folder), "No space left on device", "3.0 MiB are free", "step 2 is kept"):
        assert fact in str(failed.value)
    for setting in ("checkpoint.keep", "run_root"):
        assert setting in str(failed.value)
    store.save(6, writer("six"))
    assert names(store.folder) == ["step_6"]


def test_whatever_a_writer_raises_is_told_and_nothing_partial_stays(store: CheckpointStore) -> None:
    def fails(folder: Path) -> None:
        (folder / "a.bin").write_text("half")
        raise ValueError("not a tensor")

    with pytest.raises(CheckpointError, match="ValueError: not a tensor"):
        store.save(1, fails)
    with pytest.raises(CheckpointError, match="no file was written"):
        store.save(1, lambda folder: None)
    with pytest.raises(CheckpointError, match="neither a plain file nor a folder"):
        store.save(1, lambda folder: (folder / "link").symlink_to("/etc/hostname"))

    assert names(store.folder) == []


def test_an_abandoned_save_is_cleaned_up_and_stays_an_interruption(store: CheckpointStore) -> None:
    def abandoned(folder: Path) -> None:
        (folder / "a.bin").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(1, abandoned)

    assert names(store.folder) == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)

    with pytest.raises(CheckpointError, match=r"FileExistsError.*run_root"):
        store.save(1, writer("x"))


@contextmanager
def without_rights(folder: Path) -> Generator[None]:
    """As a user who may look into `folder` and not write there: root may do everything."""
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


def test_a_folder_that_may_not_be_written_is_told_and_the_older_one_stays() -> None:
    with TemporaryDirectory() as outer:  # pytest's own folders are closed to other users
        os.chmod(outer, 0o755)
        store = CheckpointStore(Path(outer) / "checkpoints", keep=1)
        store.save(2, writer("two"))
        with without_rights(store.folder), pytest.raises(CheckpointError) as failed:
            store.save(4, writer("four"))

        for fact in ("PermissionError", "Permission denied", "step 2 is kept", "run_root"):
            assert fact in str(failed.value)
        assert names(store.folder) == ["step_2"]
        store.save(4, writer("four"))
        assert store.complete_steps() == [4]


def test_too_little_space_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "new" / "checkpoints", keep=2, free=lambda folder: 1 << 20)

    with pytest.raises(RunFolderError, match=r"2.0 MiB are needed, 1.0 MiB are free"):
        store.check_space(2 << 20)
    with pytest.raises(CheckpointError, match=r"2.0 MiB are needed, 1.0 MiB are free"):
        store.save(1, writer("x"), estimate_bytes=2 << 20)

    assert not store.folder.exists()
    store.check_space(1 << 20)
    store.save(1, writer("x"), estimate_bytes=1 << 20)


def test_what_a_killed_save_has_left_is_not_what_lacks_for_the_next(tmp_path: Path, said: list[str]) -> None:
    left = tmp_path / ".step_4.tmp-123"

    def free(folder: Path) -> int:
        return 1 << 20 if left.exists() else 3 << 20

    store = CheckpointStore(tmp_path, keep=1, say=said.append, free=free)
    left.mkdir()
    store.check_space(2 << 20)  # a run that is resumed
    assert not left.exists()
    left.mkdir()
    store.save(4, writer("four"), estimate_bytes=2 << 20)
    assert names(tmp_path) == ["step_4"]
    assert len(said) == 2


def test_free_space_is_read_where_the_folder_will_be(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "not" / "yet", keep=None).check_space(1)


@pytest.mark.parametrize(("keep", "left"), [(1, [8]), (2, [6, 8]), (9, [2, 4, 6, 8]), (None, [2, 4, 6, 8])])
def test_retention_keeps_the_newest(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    store = CheckpointStore(tmp_path, keep=keep)
    for step in (2, 4, 6, 8):
        store.save(step, writer(str(step)))

    assert store.complete_steps() == left
    assert names(tmp_path) == sorted(f"step_{step}" for step in left)


def test_deletion_comes_after_the_new_one_is_published(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, writer("one"))

    def looks(folder: Path) -> None:
        writer("two")(folder)
        assert store.newest().step == 1

    store.save(2, looks)
    assert store.complete_steps() == [2]


def damage(store: CheckpointStore, step: int) -> None:
    """Right size, wrong bytes: only the hash tells."""
    path = store.path_of(step) / "a.bin"
    path.write_bytes(b"?" * path.stat().st_size)


def test_a_damaged_newer_one_does_not_push_out_the_new_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(8, writer("8"))
    CheckpointStore(tmp_path, keep=None).save(16, writer("16"))
    damage(store, 16)

    store.save(12, writer("12"))

    assert store.newest().step == 12
    assert not store.path_of(8).exists()


def test_one_that_was_found_damaged_does_not_count_for_keep(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(4, writer("4"))
    store.save(8, writer("8"))
    damage(store, 8)
    assert store.newest().step == 4

    store.save(12, writer("12"))

    assert store.complete_steps() == [4, 12]


def test_a_damaged_one_of_the_same_step_is_replaced(store: CheckpointStore, said: list[str]) -> None:
    store.save(1, writer("one"))
    store.save(2, writer("two"))
    (store.path_of(2) / "a.bin").write_text("bad")
    assert store.newest().step == 1
    assert not store.holds(2)

    store.save(2, writer("TWO"))

    assert store.newest().step == 2
    assert store.complete_steps() == [1, 2]
    assert (store.path_of(2) / "a.bin").read_text() == "TWO"
    assert names(store.folder) == ["step_1", "step_2"]
    assert said == []


def test_a_complete_one_is_never_written_again(store: CheckpointStore) -> None:
    store.save(2, writer("two"))
    assert store.holds(2)

    with pytest.raises(CheckpointError, match="exists and is complete"):
        store.save(2, writer("TWO"))

    assert (store.path_of(2) / "a.bin").read_text() == "two"


def test_leftovers_of_a_kill_are_removed_and_said_and_others_stay(store: CheckpointStore, said: list[str]) -> None:
    store.folder.mkdir()
    for name in (".step_4.tmp-123", ".step_2.old-123", "notes", ".hidden"):
        (store.folder / name).mkdir()
        (store.folder / name / "file").write_text("x")
    assert store.scan().skipped[0].path.name == ".step_4.tmp-123"
    assert said == []

    store.save(4, writer("four"))

    assert names(store.folder) == [".hidden", "notes", "step_4"]
    assert len(said) == 2
    assert ".step_4.tmp-123" in said[1]
