"""What writing needs to know of a file system: free bytes, bytes that are really on disk. No torch here."""

import errno
import os
from pathlib import Path

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


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
    while not os.path.exists(folder):  # unlike Path.exists it does not raise below a folder that is closed to us
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def make_folders(folder: Path) -> list[Path]:
    """Make `folder` and the parents that it lacks, for good also in a power cut; those that were made, outermost first.

    When it fails half-way, those that it made are removed.
    """
    missing = [] if folder.is_dir() else [folder]
    while missing and not missing[0].parent.is_dir():
        missing.insert(0, missing[0].parent)
    made: list[Path] = []
    try:
        for path in missing:
            path.mkdir(exist_ok=True)  # somebody else may be making it too
            made.append(path)
            fsync_folder(path.parent)
    except BaseException:
        remove_empty(made)
        raise
    return made


def remove_empty(folders: list[Path]) -> None:
    """Remove these folders, innermost first, as far as they are empty."""
    for path in reversed(folders):
        try:
            path.rmdir()
        except OSError:
            return  # somebody else has put something there


def fsync_file(path: Path) -> None:
    """Return when the file's bytes are on disk."""
    _fsync(path, os.O_RDONLY)


def fsync_folder(folder: Path) -> None:
    """Return when the folder's entries are on disk: without it a rename may be lost in a power cut."""
    try:
        _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        # Some network and FUSE file systems know no fsync of folders; their renames are durable by their own means.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def fsync_tree(folder: Path) -> None:
    """`fsync_file` and `fsync_folder` for everything below `folder`, and for itself last."""
    for entry in folder.iterdir():
        if entry.is_dir():
            fsync_tree(entry)
        else:
            fsync_file(entry)
    fsync_folder(folder)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
