"""Files of a checkpoint: which there are, and their hashes. No torch here."""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_HASH_BLOCK = 1 << 20
_HASH_THREADS = 4


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
