"""Weights of older formats as safetensors: `pytorch_model.bin`, single or in shards, written anew tensor by tensor.

Weights are read by byte ranges of safetensors files; a pickle has none to offer. torch maps the file, so that what is
held is one tensor at a time, beside file pages that the system may drop. Nothing in a pickle is executed.
"""

import json
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll.errors import RefusedError
from plimsoll.weights.export import SHARD_BYTES, copy_companions
from plimsoll.weights.tensors import DTYPES, TensorSpec, write_specs

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
_WRITTEN_INDEX = "model.safetensors.index.json"
_UNREADABLE = (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, OSError)


@dataclass(slots=True, kw_only=True, frozen=True)
class TorchWeights:
    """The weight files of a Hugging Face folder that holds no safetensors. Made by `find_torch_weights`."""

    folder: Path
    files: tuple[Path, ...]  # in the order of their names
    names: frozenset[str] | None  # tensors that the index speaks of; None: one file, without an index

    @property
    def num_bytes(self) -> int:
        """Of the files: about what the safetensors files will take."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def sources(self) -> tuple[Path, ...]:
        """Every file that the converted folder follows from."""
        return (self.folder / "config.json", *self.files)


def find_torch_weights(folder: Path) -> TorchWeights | None:
    """The `pytorch_model*.bin` of `folder`; None where it has safetensors, which come first, or neither.

    RefusedError: shards without their index, an index that is not one or names files that are not there.
    """
    if any(folder.glob("*.safetensors")) or not (folder / "config.json").is_file():
        return None
    index = folder / _INDEX
    if not index.is_file():
        single = folder / _SINGLE
        if single.is_file():
            return TorchWeights(folder=folder, files=(single,), names=None)
        if any(folder.glob("pytorch_model-*.bin")):
            raise RefusedError(f"{folder} holds shards of pytorch_model.bin, and {_INDEX} is missing; add it")
        return None
    try:
        listed = cast("dict[str, str]", json.loads(index.read_bytes())["weight_map"])
        files = tuple(folder / name for name in sorted(set(listed.values())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"{index} is not an index of weight files ({type(error).__name__}: {error})") from error
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise RefusedError(f"{index} names files that are not there: {', '.join(absent)}; complete the download")
    return TorchWeights(folder=folder, files=files, names=frozenset(listed))


def check_torch_weights(weights: TorchWeights) -> None:
    """RefusedError where a file cannot be taken, every cause at once. Reads no tensor.

    Files of torch before 1.6 cannot be looked into without reading them whole; they are judged when they are converted.
    """
    causes: list[str] = []
    found: set[str] = set()
    legacy = False
    for path in weights.files:
        if not zipfile.is_zipfile(path):
            legacy = True
            continue
        try:
            found |= _open(path).keys()
        except RefusedError as error:
            causes += error.causes
    if weights.names is not None and not legacy and not causes and (lost := sorted(weights.names - found)):
        causes.append(f"{weights.folder}: {_INDEX} names tensors that no file holds: {', '.join(lost[:8])}")
    if causes:
        raise RefusedError(causes)


def convert_torch_weights(weights: TorchWeights, folder: Path, say: Callable[[str], None]) -> int:
    """Write `folder` (it exists) as a Hugging Face folder with safetensors, a file a shard; returns how many tensors.

    Names, shapes and dtypes stay. A tied weight that shares its memory with its source is left out, as transformers
    leaves it out of safetensors. Memory: the largest tensor; for a file of torch before 1.6, that file (said).
    """
    tied = _tied_names(weights.folder)
    written: dict[str, str] = {}
    total = 0
    for number, path in enumerate(weights.files, start=1):
        if not zipfile.is_zipfile(path):
            size = path.stat().st_size
            say(f"{path} is of a format before torch 1.6, which cannot be mapped: its {size} bytes are read at once")
        state = _without_tied(_open(path), tied)
        name = "model.safetensors" if len(weights.files) == 1 else _shard_name(number, len(weights.files))
        specs = [_as_it_is(key, tensor) for key, tensor in state.items()]
        write_specs(folder / name, specs)
        total += sum(spec.num_bytes for spec in specs)
        written.update(dict.fromkeys(state, name))
    if len(weights.files) > 1:
        _write_index(folder, written, total)
    shutil.copyfile(weights.folder / "config.json", folder / "config.json")
    copy_companions(weights.folder, folder)
    return len(written)


def write_in_shards(folder: Path, specs: Sequence[TensorSpec], shard_bytes: int = SHARD_BYTES) -> None:
    """Write safetensors files of at most `shard_bytes` (a larger tensor has one of its own), and an index for several.

    One tensor is held at a time.
    """
    shards: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if shards[-1] and used + spec.num_bytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.num_bytes
    if len(shards) == 1:
        write_specs(folder / "model.safetensors", shards[0])
        return
    written: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = _shard_name(number, len(shards))
        write_specs(folder / name, shard)
        written.update({spec.name: name for spec in shard})
    _write_index(folder, written, sum(spec.num_bytes for spec in specs))


def _open(path: Path) -> dict[str, Tensor]:
    """Tensors by name, mapped where the format allows it. RefusedError: anything else is in the file."""
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _UNREADABLE as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RefusedError(
            f"{path} cannot be read as plain tensors ({reason}); only tensors are taken from a pickle, since loading "
            "anything else runs code: take the model's safetensors, or convert the file yourself if you trust it"
        ) from error
    if not isinstance(loaded, Mapping):
        raise RefusedError(
            f"{path} holds a {type(loaded).__name__} and no tensors by name; take the model's safetensors"
        )
    entries = cast("Mapping[object, object]", loaded)
    strange = [str(name) for name, value in entries.items() if not (isinstance(name, str) and _is_plain(value))]
    if strange:
        raise RefusedError(
            f"{path} holds {len(strange)} entries that are no dense tensors of a dtype that safetensors knows: "
            f"{', '.join(strange[:8])}; save the model's state_dict alone"
        )
    return cast("dict[str, Tensor]", dict(entries))


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.dtype in DTYPES.values()
        and value.device.type == "cpu"
    )


def _as_it_is(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), read=tensor.detach)


def _tied_names(folder: Path) -> tuple[str, ...]:
    """Patterns of the names that a tied model of this config takes from another weight."""
    try:
        config = cast("Any", AutoConfig.from_pretrained(folder))
    except (ValueError, KeyError, OSError):
        return ()  # said with its reason where the model is built
    mapping: Any = AutoModelForCausalLM._model_mapping  # pyright: ignore[reportPrivateUsage]
    if type(config) not in mapping or not config.get_text_config().tie_word_embeddings:
        return ()
    return tuple(mapping[type(config)]._tied_weights_keys or ())


def _without_tied(state: dict[str, Tensor], tied: Sequence[str]) -> dict[str, Tensor]:
    """Leave out a tied name where another name has the very same elements of the same memory."""
    names: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name, tensor in state.items():
        if tensor.numel() > 0:
            names.setdefault((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()), []).append(name)
    dropped: set[str] = set()
    for group in names.values():
        sharers = {name for name in group if any(re.search(pattern, name) for pattern in tied)}
        if len(sharers) < len(group):
            dropped |= sharers
    return {name: tensor for name, tensor in state.items() if name not in dropped}


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def _write_index(folder: Path, written: Mapping[str, str], total: int) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": dict(written)}
    (folder / _WRITTEN_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
