"""manifest.json: size and SHA-256 of every file of a checkpoint. It is written last, and makes a folder complete."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll.checkpoint.files import files_below, sha256_of_all

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(slots=True, kw_only=True, frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    num_bytes: int
    sha256: str  # lower-case hex


@dataclass(slots=True, kw_only=True, frozen=True)
class Manifest:
    """What a complete checkpoint consists of."""

    step: int
    files: Mapping[str, FileRecord]  # by path relative to the checkpoint's folder, with "/"


def file_names(folder: Path) -> list[str]:
    """Every file below `folder`, relative to it, with "/".

    Raises:
        ValueError: there is none, or something that is neither a plain file nor a folder.
    """
    names = [path.relative_to(folder).as_posix() for path in files_below(folder)]
    if not names:
        raise ValueError("no file was written")
    return names


def hash_files(folder: Path, names: Sequence[str]) -> dict[str, FileRecord]:
    """Size and hash of these files, several at a time."""
    paths = [folder / name for name in names]
    hashes = sha256_of_all(paths)
    return {
        name: FileRecord(num_bytes=path.stat().st_size, sha256=digest)
        for name, path, digest in zip(names, paths, hashes, strict=True)
    }


def write_manifest(folder: Path, step: int, files: Mapping[str, FileRecord]) -> Path:
    """Write manifest.json beside the files that it is about."""
    document = {
        "format": FORMAT,
        "step": step,
        "files": {name: {"bytes": files[name].num_bytes, "sha256": files[name].sha256} for name in sorted(files)},
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json.

    Raises:
        ValueError: absent, cut short, or of a format that this version does not know.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{MANIFEST} is missing")
    try:
        document: Any = json.loads(path.read_bytes())
        if document["format"] != FORMAT:
            raise ValueError(f"{MANIFEST} has format {document['format']!r}; this version reads format {FORMAT}")
        files = {
            str(name): FileRecord(num_bytes=int(record["bytes"]), sha256=str(record["sha256"]))
            for name, record in document["files"].items()
        }
        return Manifest(step=int(document["step"]), files=files)
    except (
        json.JSONDecodeError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from error


def why_incomplete(folder: Path, step: int, *, verify: bool) -> str | None:
    """Why `folder` is not the complete checkpoint of `step`; None when it is.

    Args:
        verify: also hash every file; else only presence and size are compared.
    """
    try:
        manifest = read_manifest(folder)
        if manifest.step != step:
            return f"{MANIFEST} is of step {manifest.step}"
        for name, record in manifest.files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != record.num_bytes:
                return f"{name} has {path.stat().st_size} bytes, {record.num_bytes} were written"
        found = hash_files(folder, list(manifest.files)) if verify else {}
        changed = next((name for name, record in found.items() if record.sha256 != manifest.files[name].sha256), None)
        if changed is not None:
            return f"{changed} has changed since it was written (its SHA-256 differs)"
    except (ValueError, OSError) as error:
        return str(error)
    return None
