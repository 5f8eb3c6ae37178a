"""What saving needs from a file system: free bytes, bytes that are really on disk, hashes. No torch here."""

import errno
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_HASH_BLOCK = 1 << 20
_HASH_THREADS = 4


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


def sha256_of(path: Path, stop: threading.Event | None = None) -> str:
    """Hash of a file's bytes, read in blocks; of the bytes so far once `stop` is set."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
            if stop is not None and stop.is_set():
                break
    return digest.hexdigest()


def sha256_of_all(paths: Sequence[Path]) -> list[str]:
    """`sha256_of` for each, by several threads: hashing lets go of the interpreter's lock."""
    stop = threading.Event()

    def hash_one(path: Path) -> str:
        return sha256_of(path, stop)

    with ThreadPoolExecutor(max_workers=_HASH_THREADS, thread_name_prefix="plimsoll-hash") as pool:
        try:
            return list(pool.map(hash_one, paths))
        except BaseException:
            stop.set()  # leaving the pool waits for its threads, and an abandoned save must not wait for gigabytes
            raise


def files_below(folder: Path) -> Iterator[Path]:
    """Every plain file below `folder`, in the order of names.

    Raises:
        ValueError: something else than a file or folder: a link's target is not ours to hash and to keep.
    """
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            raise ValueError(f"{entry} is neither a plain file nor a folder")
        if entry.is_dir():
            yield from files_below(entry)
        else:
            yield entry


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
