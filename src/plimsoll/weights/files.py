"""Weights files of a checkpoint: where every tensor lies, read from their headers alone, and whether they still are.

A file that is overwritten while it is read is a wrong model, so inode, size and time of change are kept from the moment
of opening; a new file under the old name is another inode.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.tensors import DTYPES

_MAX_HEADER_BYTES = 100 * 1000**2
"""The limit of the format's own reader."""

_POINTER = b"version https://git-lfs"

_DTYPES = DTYPES | {
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(slots=True, kw_only=True, frozen=True)
class StoredTensor:
    """A tensor in a file, row-major."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte, from the start of the file."""

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True, kw_only=True, frozen=True)
class FileIdentity:
    """What tells that a file is still the one that was opened."""

    inode: int
    size: int
    """Bytes."""
    mtime_ns: int
    """Time of the last change, nanoseconds since the epoch."""


class WeightFiles:
    """The safetensors files of a Hugging Face folder, or the ones given, held open for reading.

    Of a folder: `model.safetensors` alone where there is one (as transformers does), else the files that its index
    names, else every `*.safetensors`. A context manager. Its descriptors may be used by several threads (`pread`).

    RefusedError, with all causes at once: nothing to read, a file that an index names and that is absent, a file that
    is no safetensors file or not as long as its header says, a tensor stored twice.
    """

    def __init__(self, source: str | Path | Iterable[str | Path]) -> None:
        self.folder: Path | None = Path(source) if isinstance(source, (str, Path)) else None
        """None when files were given."""
        self._descriptors: dict[Path, int] = {}
        self._identities: dict[Path, FileIdentity] = {}
        self._causes: list[str] = []
        tensors: dict[str, StoredTensor] = {}
        try:
            paths, indexed = self._paths(source)
            for path in paths:
                self._open(path, tensors)
            for name, path in indexed.items():
                if path in self._identities and name not in tensors:
                    self._causes.append(f"the index says that {path} has {name}, and it has not")
            if self._causes:
                raise RefusedError(self._causes)
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(tensors)
        """Every tensor of every file, by name."""

    @property
    def identities(self) -> Mapping[Path, FileIdentity]:
        """Of every file, from when it was opened."""
        return MappingProxyType(self._identities)

    def descriptor(self, path: Path) -> int:
        """Open for reading; of one of `identities`' files."""
        return self._descriptors[path]

    def check_unchanged(self) -> None:
        """CheckpointError when a file is not the one that was opened: replaced, of another size, or written to."""
        for path, opened in self._identities.items():
            try:
                now = _identity(os.stat(path))
            except OSError as error:
                raise CheckpointError(f"{path} was there when it was opened, and now: {error.strerror}") from error
            for what, before, after in (
                ("inode", opened.inode, now.inode),
                ("size", opened.size, now.size),
                ("time of change", opened.mtime_ns, now.mtime_ns),
            ):
                if before != after:
                    raise CheckpointError(
                        f"{path} changed since it was opened: its {what} was {before} and is {after}. Weights that "
                        "were read from it are not to be trusted; leave a checkpoint alone while a run uses it"
                    )

    def close(self) -> None:
        """Close every file. What was read from the headers stays."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _paths(self, source: str | Path | Iterable[str | Path]) -> tuple[list[Path], dict[str, Path]]:
        """Files to open; and which file each tensor is in, as far as an index says so."""
        if not isinstance(source, (str, Path)):
            paths = [Path(path) for path in source]
            if not paths:
                self._causes.append("no weights file was given")
            return paths, {}
        folder = Path(source)
        single = folder / "model.safetensors"
        if single.is_file():
            return [single], {}
        index = _index_of(folder)
        if index is not None:
            indexed = self._read_index(index)
            return sorted(set(indexed.values())), indexed
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            self._causes.append(
                f"{folder} holds no *.safetensors file; `plimsoll export` makes them of pytorch_model.bin or GGUF"
                if folder.is_dir()
                else f"{folder} is not a folder"
            )
        return paths, {}

    def _read_index(self, index: Path) -> dict[str, Path]:
        try:
            content: Any = json.loads(index.read_text(encoding="utf-8"))
            return {str(name): index.parent / str(file) for name, file in content["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._causes.append(f"{index} is not an index of weights files ({type(error).__name__}: {error})")
            return {}

    def _open(self, path: Path, tensors: dict[str, StoredTensor]) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._causes.append(f"{path} cannot be read: {error.strerror}")
            return
        self._descriptors[path] = descriptor
        identity = _identity(os.fstat(descriptor))
        self._identities[path] = identity
        if os.pread(descriptor, len(_POINTER), 0) == _POINTER:
            self._causes.append(f"{path} is a pointer of Git LFS and not the weights: fetch them with `git lfs pull`")
            return
        try:
            found = _read_header(path, descriptor, identity.size)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._causes.append(f"{path} is not a safetensors file ({error})")
            return
        end = max((tensor.offset + tensor.num_bytes for tensor in found), default=identity.size)
        if end != identity.size:
            self._causes.append(
                f"{path} has {identity.size} bytes, and its header speaks of {end}: it is cut off or damaged"
            )
        for tensor in found:
            if tensor.name in tensors:
                self._causes.append(f"{tensor.name} is in {tensors[tensor.name].path} and again in {path}")
            tensors[tensor.name] = tensor


def _identity(stat: os.stat_result) -> FileIdentity:
    return FileIdentity(inode=stat.st_ino, size=stat.st_size, mtime_ns=stat.st_mtime_ns)


def _index_of(folder: Path) -> Path | None:
    usual = folder / "model.safetensors.index.json"
    if usual.is_file():
        return usual
    found = sorted(folder.glob("*.safetensors.index.json"))
    return found[0] if len(found) == 1 else None


def _read_header(path: Path, descriptor: int, size: int) -> list[StoredTensor]:
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header: Any = json.loads(os.pread(descriptor, length, 8).decode("utf-8"))
    header.pop("__metadata__", None)
    return [_entry(path, name, entry, 8 + length) for name, entry in header.items()]


def _entry(path: Path, name: str, entry: Any, data: int) -> StoredTensor:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(length) for length in entry["shape"])
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is of dtype {entry['dtype']}, which cannot be read")
    tensor = StoredTensor(name=name, path=path, dtype=_DTYPES[entry["dtype"]], shape=shape, offset=data + begin)
    if begin < 0 or min(shape, default=0) < 0 or end - begin != tensor.num_bytes:
        raise ValueError(f"{name} of shape {list(shape)} and {entry['dtype']} in bytes {begin} to {end}")
    return tensor
