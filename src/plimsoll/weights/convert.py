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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll.errors import RefusedError
from plimsoll.weights.export import SHARD_BYTES, copy_companions
from plimsoll.weights.tensors import (
    DTYPES,
    TensorSpec,
    cut_by_size,
    file_names,
    in_dtype,
    index_name,
    index_text,
    write_specs,
)

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
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


def converted_bytes(weights: TorchWeights, dtype: torch.dtype) -> int:
    """What the weights take at most as `dtype`. Reads no tensor."""
    total = 0
    for path in weights.files:
        if zipfile.is_zipfile(path):
            total += sum(in_dtype(_as_it_is(name, tensor), dtype).num_bytes for name, tensor in _open(path).items())
        else:  # of torch before 1.6, when two bytes were the fewest of a weight
            total += path.stat().st_size * dtype.itemsize // 2
    return total


def convert_torch_weights(
    weights: TorchWeights, folder: Path, say: Callable[[str], None], *, dtype: torch.dtype | None = None
) -> int:
    """Write `folder` (it exists) as a Hugging Face folder with safetensors, a file a shard; returns how many tensors.

    Names and shapes stay; dtypes too, unless `dtype` says what floating-point tensors become. A tied weight that shares
    its memory with its source is left out, as transformers leaves it out of safetensors. Memory: the largest tensor;
    for a file of torch before 1.6, that file (said).
    """
    tied = _tied_names(weights.folder)
    names = file_names("model", len(weights.files))
    written: dict[str, list[TensorSpec]] = {}
    for name, path in zip(names, weights.files, strict=True):
        if not zipfile.is_zipfile(path):
            size = path.stat().st_size
            say(f"{path} is of a format before torch 1.6, which cannot be mapped: its {size} bytes are read at once")
        state = _without_tied(_open(path), tied)
        specs = [_as_it_is(key, tensor) for key, tensor in state.items()]
        if dtype is not None:
            specs = [in_dtype(spec, dtype) for spec in specs]
        write_specs(folder / name, specs)
        written[name] = [replace(spec, read=_already_written) for spec in specs]  # lets go of the map
    _write_index(folder, written)
    copy_config(weights.folder, folder, dtype)
    copy_companions(weights.folder, folder)
    return len({spec.name for specs in written.values() for spec in specs})


def copy_config(source: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """Copy config.json; with a `dtype` that is what it says then, for sub-models too."""
    origin, target = source / "config.json", folder / "config.json"
    if dtype is None:
        shutil.copyfile(origin, target)
        return
    name = str(dtype).removeprefix("torch.")
    config = _saying(json.loads(origin.read_bytes()), name)
    if not config.keys() & {"dtype", "torch_dtype"}:
        config["dtype"] = name
    target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _saying(config: Any, dtype: str) -> Any:
    """`dtype` (older spelling: `torch_dtype`) replaced in a config and in the configs of its sub-models."""
    if not isinstance(config, dict):
        return config
    changed = {key: _saying(value, dtype) for key, value in cast("dict[str, Any]", config).items()}
    for key in ("dtype", "torch_dtype"):
        if isinstance(changed.get(key), str):
            changed[key] = dtype
    return changed


def write_in_shards(folder: Path, specs: Sequence[TensorSpec], shard_bytes: int = SHARD_BYTES) -> None:
    """Write safetensors files of at most `shard_bytes` (a larger tensor has one of its own), and an index for several.

    One tensor is held at a time.
    """
    shards = cut_by_size(specs, shard_bytes)
    written = dict(zip(file_names("model", len(shards)), shards, strict=True))
    for name, shard in written.items():
        write_specs(folder / name, shard)
    _write_index(folder, written)


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


def _already_written() -> Tensor:
    raise AssertionError("a tensor is written once")


def _write_index(folder: Path, written: Mapping[str, Sequence[TensorSpec]]) -> None:
    if len(written) > 1:
        (folder / index_name()).write_text(index_text(written), encoding="utf-8")
