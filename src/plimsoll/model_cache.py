"""RUN/model_cache: weights of other formats, converted once to safetensors, kept with the run.

    GGUF file, pytorch_model.bin ─▶ opened (shapes, config, tokenizer: no weights) ─▶ data and plan are checked
        ─▶ converted, tensor by tensor ─▶ RUN/model_cache/NAME-KEY, whole or absent ─▶ read as any Hugging Face folder

KEY follows from path, size and time of the source files and from the dtype: other files, another folder.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from plimsoll.errors import RefusedError
from plimsoll.gguf import GgufModel, find_gguf, open_gguf
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.convert import TorchWeights, check_torch_weights, convert_torch_weights, find_torch_weights
from plimsoll.weights.disk import format_bytes, free_bytes
from plimsoll.weights.publish import publish, saying_why

CACHE = "model_cache"
"""Folder of a run that holds converted weights."""

REMEDY = "name another disk with run_root="
"""For a run that has no room for its conversion."""

_FORMAT = 1  # of the key: raised when a conversion would give something else than before


@dataclass(slots=True, kw_only=True, frozen=True)
class Converted:
    """A model that is read from converted weights. Made by `open_model`."""

    setting: str  # key of the recipe that named it
    source: Path  # a .gguf file, or a folder with pytorch_model.bin
    folder: Path  # holds, or will hold, config, safetensors and tokenizer
    companions: Path  # config and tokenizer, there before the weights are converted
    opened: GgufModel | TorchWeights | None  # None: `folder` is whole

    @property
    def num_bytes(self) -> int:
        """Of the weights that are still to be written."""
        return 0 if self.opened is None else self.opened.num_bytes


def is_convertible(path: Path) -> bool:
    """Whether the model at `path` must be converted. RefusedError: it must be, and cannot, as it is."""
    if not path.is_dir():
        return path.suffix == ".gguf"
    return find_torch_weights(path) is not None or find_gguf(path) is not None


def open_model(setting: str, path: Path, cache: Path, scratch: Path, *, dtype: torch.dtype, reuse: bool) -> Converted:
    """Look into a convertible model without reading its weights.

    Args:
        dtype: master dtype of the run; a GGUF file is unpacked to it, or to float32, which holds all that is in it.
        cache: folder that holds, or will hold, the converted model. Nothing is written in it.
        scratch: an empty folder where config and tokenizer of a GGUF file may be written.
        reuse: a folder in `cache` that was converted from these very files is taken.

    Raises:
        RefusedError: the files cannot be converted.
    """
    weights = find_torch_weights(path) if path.is_dir() else None
    file = path if weights is not None else find_gguf(path)
    assert file is not None, "asked is_convertible first"
    unpacked = torch.float32 if dtype == torch.float64 else dtype
    if weights is None and not file.is_file():
        raise RefusedError(
            f"{setting}: {file} does not exist; name a .gguf file or a Hugging Face folder in `{setting}`"
        )
    sources = (file,) if weights is None else weights.sources
    folder = cache / f"{file.stem if weights is None else file.resolve().name}-{_key(sources, unpacked)}"
    if reuse and folder.is_dir():
        return Converted(setting=setting, source=file, folder=folder, companions=folder, opened=None)
    try:
        if weights is not None:
            check_torch_weights(weights)
            return Converted(setting=setting, source=path, folder=folder, companions=path, opened=weights)
        model = open_gguf(file, unpacked)
        model.write_companions(scratch)
    except RefusedError as error:
        raise RefusedError([f"{setting}: {cause}" for cause in error.causes]) from error
    return Converted(setting=setting, source=file, folder=folder, companions=scratch, opened=model)


def convert(
    models: Iterable[Converted],
    say: Callable[[str], None],
    *,
    control: ControlGroup | None = None,
    remedy: str = REMEDY,
) -> None:
    """Write what is not there yet; of a run of several processes the first writes and the others wait (collective).

    `remedy`: what the user may do where there is no room.
    RefusedError: too little space; an unreadable source. CheckpointError: writing failed. Nothing partial stays.
    """
    control = control or ControlGroup()
    for model in {model.folder: model for model in models}.values():
        if model.opened is None:
            say(f"{model.setting}: {model.folder} is used, converted from {model.source} before")
            continue
        control.together(lambda model=model: _check_space(model, remedy))
        start = time.monotonic()
        write = partial(_write_first, model, say=say, control=control, remedy=remedy)
        publish(model.folder, write, control, remedy=remedy)
        size = sum(path.stat().st_size for path in model.folder.glob("*.safetensors"))
        say(
            f"{model.setting}: converted {model.source} to {model.folder} ({format_bytes(size)}, "
            f"{time.monotonic() - start:.1f} s)"
        )


def clear(cache: Path, keep: Iterable[Path]) -> None:
    """Delete what `cache` holds besides `keep`: older conversions, and what was left half written."""
    kept = {path.resolve() for path in keep}
    for entry in cache.iterdir() if cache.is_dir() else ():
        if entry.resolve() not in kept:
            shutil.rmtree(entry)
    with suppress(OSError):  # not empty, or not there
        cache.rmdir()


def _key(files: Iterable[Path], dtype: torch.dtype) -> str:
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([_FORMAT, str(dtype), stats])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _check_space(model: Converted, remedy: str) -> None:
    free = free_bytes(model.folder.absolute().parent)
    if free < model.num_bytes:
        raise RefusedError(
            f"{model.setting}: converting {model.source} takes {format_bytes(model.num_bytes)} in "
            f"{model.folder.parent}, and {format_bytes(free)} are free; {remedy}"
        )


def _write_first(
    model: Converted, folder: Path, *, say: Callable[[str], None], control: ControlGroup, remedy: str
) -> None:
    def write() -> None:
        if control.rank > 0 or model.opened is None:
            return
        say(f"{model.setting}: converting {model.source} ({format_bytes(model.num_bytes)}) to safetensors …")
        with saying_why(model.folder, remedy):
            _write(model, folder, say)

    control.together(write)


def _write(model: Converted, folder: Path, say: Callable[[str], None]) -> None:
    if isinstance(model.opened, GgufModel):
        shutil.copytree(model.companions, folder, dirs_exist_ok=True)
        model.opened.write_weights(folder, say)
    elif model.opened is not None:
        convert_torch_weights(model.opened, folder, say)
