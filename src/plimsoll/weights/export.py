"""A Hugging Face folder: what `from_pretrained` of transformers reads, with nothing missing and nothing unexpected."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from plimsoll.errors import CheckpointError
from plimsoll.weights.tensors import TensorSpec, write_specs

SHARD_BYTES = 5 * 1000**3
"""Size of one weights file at most (a larger tensor has a file of its own)."""

_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "generation_config.json",
)
"""What is copied from the source folder as it is, where it exists."""


def write_hf_folder(
    folder: Path,
    model_state: Mapping[str, Tensor],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    architecture: str,
    tokenizer_folder: Path | None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write weights as `dtype`, config, tokenizer, chat template and generation config; returns the files written.

    `model_state`: full tensors by the names that transformers saves, a tied head left out. `architecture`: name of the
    model's class. Tensors are cast one at a time. The folder must exist or be creatable; files are overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = _write_weights(folder, model_state, dtype, shard_bytes)
    values = config.to_diff_dict()
    values |= {"architectures": [architecture], "dtype": str(dtype).removeprefix("torch.")}
    values.pop("_name_or_path", None)  # a path of the machine that trained
    target = folder / "config.json"
    target.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [*files, target, *(copy_companions(tokenizer_folder, folder) if tokenizer_folder else [])]


def _write_weights(folder: Path, state: Mapping[str, Tensor], dtype: torch.dtype, shard_bytes: int) -> list[Path]:
    shards = _cut(state, dtype, shard_bytes)
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    )
    for name, keys in zip(names, shards, strict=True):
        write_specs(folder / name, [_spec(key, state[key], dtype) for key in keys])
    files = [folder / name for name in names]
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(_num_bytes(tensor, dtype) for tensor in state.values())},
            "weight_map": {key: name for name, keys in zip(names, shards, strict=True) for key in keys},
        }
        files.append(folder / "model.safetensors.index.json")
        files[-1].write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files


def _cut(state: Mapping[str, Tensor], dtype: torch.dtype, shard_bytes: int) -> list[list[str]]:
    """Names a file, in order."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in state.items():
        size = _num_bytes(tensor, dtype)
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _spec(name: str, tensor: Tensor, dtype: torch.dtype) -> TensorSpec:
    """Cast only when its turn to be written has come; integers (buffers) stay what they are."""
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return TensorSpec(
        name=name, dtype=wanted, shape=tuple(tensor.shape), read=lambda: tensor.detach().to("cpu").to(wanted)
    )


def _num_bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.element_size())


def copy_companions(source: Path, folder: Path) -> list[Path]:
    """Copy what goes with the weights from `source`; returns the files written. CheckpointError when it is gone."""
    if not source.is_dir():
        raise CheckpointError(f"the tokenizer's folder {source} is gone, and its files belong into {folder}")
    written: list[Path] = []
    for name in _COMPANIONS:
        origin, target = source / name, folder / name
        if origin.is_file():
            shutil.copyfile(origin, target)
            written.append(target)
        elif origin.is_dir():
            shutil.copytree(origin, target, dirs_exist_ok=True)
            written += sorted(path for path in target.rglob("*") if path.is_file())
    return written
