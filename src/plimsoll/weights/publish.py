"""Folders that appear complete or not at all, written by all ranks together.

.NAME.tmp-PID is made (rank 0) ─▶ every rank writes in it ─▶ fsync ─▶ renamed to NAME ─▶ fsync of the parent
"""

import errno
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.control import ControlGroup

T = TypeVar("T")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def check_free_name(out: Path) -> None:
    """RefusedError unless `out` does not exist or is an empty folder."""
    if out.is_dir() and any(out.iterdir()):
        raise RefusedError(f"{out} is not empty; name a folder that does not exist yet")
    if not out.is_dir() and os.path.lexists(out):
        raise RefusedError(f"{out} is a file; name a folder that does not exist yet")


def check_space(out: Path, num_bytes: int, free: Callable[[Path], int]) -> None:
    """RefusedError when fewer than `num_bytes` are free where `out` is to be."""
    found = free(out.parent)
    if found < num_bytes:
        need, have = format_bytes(num_bytes), format_bytes(found)
        raise RefusedError(f"{out}: {need} are needed, {have} are free; name a folder on another disk")


def publish(out: Path, write: Callable[[Path], T], control: ControlGroup) -> T:
    """`write` fills a hidden folder beside `out`, which takes the name of `out` when it is complete (collective).

    Args:
        write: called on every rank with the same folder, which all of them must see; it fails on every rank or on none
            (`ControlGroup.together`).

    Raises:
        what `write` raised, or CheckpointError; the same on every rank. Nothing partial stays.
    """
    out = out.absolute()
    partial = out.with_name(f".{out.name}.tmp-{control.gather(os.getpid())[0]}")

    def make() -> None:
        with saying_why(out):
            if control.rank == 0:
                if partial.exists():  # of a killed process that had our number
                    shutil.rmtree(partial)
                partial.mkdir(parents=True)

    def finish() -> None:
        with saying_why(out):
            if control.rank == 0:
                fsync_tree(partial)
                os.rename(partial, out)  # replaces an empty folder, fails on any other
                fsync_folder(out.parent)

    try:
        control.together(make)
        result = write(partial)
        control.together(finish)
    except BaseException as error:
        if control.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, Exception):  # an interrupt is of one rank alone
            control.barrier()  # no rank speaks of the failure before the folder is gone
        raise
    return result


@contextmanager
def saying_why(out: Path) -> Generator[None]:
    """An OSError inside becomes a CheckpointError that names the folder, the cause and what is free there."""
    try:
        yield
    except OSError as error:
        free = format_bytes(free_bytes(out.parent))
        raise CheckpointError(f"{out} was not written: {error} ({free} are free there); name another folder") from error


def format_bytes(num_bytes: int) -> str:
    """`1536` → `1.5 KiB`."""
    value = float(num_bytes)
    for unit in _UNITS[:-1]:
        if value < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write where `folder` is, or will be once it is made."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def fsync_folder(folder: Path) -> None:
    """Return when the folder's entries are on disk: without it a rename may be lost in a power cut."""
    try:
        _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        # Some network and FUSE file systems know no fsync of folders; their renames are durable by their own means.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def fsync_tree(folder: Path) -> None:
    """Return when everything below `folder`, and its own entries, are on disk."""
    for entry in folder.iterdir():
        if entry.is_dir():
            fsync_tree(entry)
        else:
            _fsync(entry, os.O_RDONLY)
    fsync_folder(folder)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
