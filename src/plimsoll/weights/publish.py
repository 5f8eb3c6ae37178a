"""Folders that appear complete or not at all, written by all ranks together.

.NAME.tmp-PID is made (rank 0) ─▶ every rank writes in it ─▶ fsync ─▶ renamed to NAME ─▶ fsync of the parent
"""

import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.disk import format_bytes, free_bytes, fsync_folder, fsync_tree, make_folders, remove_empty

T = TypeVar("T")

REMEDY = "name another folder"
"""What to do when a folder that the user has named cannot be written."""


def check_free_name(out: Path) -> None:
    """RefusedError unless `out` does not exist or is an empty folder, which a rename can replace."""
    if out.is_dir() and any(out.iterdir()):
        raise RefusedError(f"{out} is not empty; name a folder that does not exist yet")
    if not out.is_dir() and os.path.lexists(out):
        raise RefusedError(f"{out} is a file; name a folder that does not exist yet")
    if os.path.ismount(out):
        raise RefusedError(f"{out} is where a file system is mounted, and is not replaced; name a folder in it")


def check_space(out: Path, num_bytes: int, free: Callable[[Path], int]) -> None:
    """RefusedError when fewer than `num_bytes` are free where `out` is to be."""
    found = free(_target(out).parent)
    if found < num_bytes:
        need, have = format_bytes(num_bytes), format_bytes(found)
        raise RefusedError(f"{out}: {need} are needed, {have} are free; name a folder on another disk")


def publish(out: Path, write: Callable[[Path], T], control: ControlGroup, *, remedy: str = REMEDY) -> T:
    """`write` fills a hidden folder beside `out`, which takes the name of `out` when it is complete (collective).

    Args:
        out: of a link to an empty folder, that folder is meant.
        write: called on every rank with the same folder, which all of them must see; it fails on every rank or on none
            (`ControlGroup.together`).
        remedy: what the user may do about a folder that cannot be written.

    Raises:
        what `write` raised, or CheckpointError; the same on every rank. Nothing partial stays, and no parent folder
        that was made for it.
    """
    target = _target(out)
    partial = target.with_name(f".{target.name}.tmp-{control.gather(os.getpid())[0]}")
    parents: list[Path] = []

    def make() -> None:
        with saying_why(out, remedy):
            if control.rank == 0:
                if partial.exists():  # of a killed process that had our number
                    shutil.rmtree(partial)
                parents.extend(make_folders(target.parent))
                partial.mkdir()

    def finish() -> None:
        with saying_why(out, remedy):
            if control.rank == 0:
                fsync_tree(partial)
                os.rename(partial, target)  # replaces an empty folder, fails on any other
                fsync_folder(target.parent)

    try:
        control.together(make)
        result = write(partial)
        control.together(finish)
    except BaseException as error:
        if control.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            remove_empty(parents)
        if isinstance(error, Exception):  # an interrupt is of one rank alone
            with suppress(RuntimeError):  # gloo's, when a rank has died: what went wrong first is what is told
                control.barrier()  # no rank speaks of the failure before the folder is gone
        raise
    return result


@contextmanager
def saying_why(out: Path, remedy: str = REMEDY) -> Generator[None]:
    """An OSError inside becomes a CheckpointError that names the folder, the cause, what is free and what to do."""
    try:
        yield
    except OSError as error:
        free = format_bytes(free_bytes(_target(out).parent))
        raise CheckpointError(f"{out} was not written: {error} ({free} are free there); {remedy}") from error


def _target(out: Path) -> Path:
    """The folder itself, on the disk that it is on."""
    return out.resolve()
