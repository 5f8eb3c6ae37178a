"""`plimsoll export`: a run's weights, or those of a GGUF file, as a Hugging Face folder that transformers loads.

The checkpoint's model/ is such a folder already, in the dtype of the master weights. Export copies it file by file,
converting the weights one tensor at a time, so memory is bounded by the largest tensor. So are those of a GGUF file.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.checkpoint.files import format_bytes, free_bytes, fsync_folder, fsync_tree
from plimsoll.checkpoint.locate import Located, locate_model
from plimsoll.checkpoint.state import read_state
from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.gguf import find_gguf, open_gguf
from plimsoll.weights.tensors import TensorFiles, TensorSpec, write_specs

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Dtypes that weights can be exported in."""

_INDEX = "model.safetensors.index.json"

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class ExportSummary:
    """What was exported."""

    path: Path
    source: Path  # the checkpoint, or the GGUF file
    step: int | None  # of the checkpoint
    dtype: str
    num_tensors: int
    num_bytes: int  # of the weight files

    def as_json(self) -> dict[str, Any]:
        """What `plimsoll export` prints."""
        return {
            "path": str(self.path),
            "source": str(self.source),
            "step": self.step,
            "dtype": self.dtype,
            "tensors": self.num_tensors,
            "bytes": self.num_bytes,
        }


def run(source: Path, step: int | None, out: Path, dtype: str | None) -> ExportSummary:
    """Write weights, tokenizer, chat template and generation config to `out`.

    Args:
        source: a run folder, one of its checkpoints/step_N, a .gguf file, or a folder with one and no other model.
        step: None: the newest complete checkpoint.
        out: must not exist, or be an empty folder; appears complete or not at all.
        dtype: a key of `DTYPES`. None: bfloat16 for a GGUF file and for a run that computed in bfloat16, else float32.

    Raises:
        RefusedError: nothing was written.
        CheckpointError: writing failed; nothing partial stays.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RefusedError(f"--dtype {dtype} is not known; the dtypes are {', '.join(DTYPES)}")
    if out.is_dir() and any(out.iterdir()):
        raise RefusedError(f"{out} is not empty; name a folder that does not exist yet")
    if out.exists() and not out.is_dir():
        raise RefusedError(f"{out} is a file; name a folder that does not exist yet")
    file = find_gguf(source)
    return _export_run(source, step, out, dtype) if file is None else _export_gguf(file, step, out, dtype)


def _export_run(run: Path, step: int | None, out: Path, dtype: str | None) -> ExportSummary:
    located = locate_model(run, step=step)
    if located.checkpoint is None or located.step is None:
        raise RefusedError(f"{run} is a Hugging Face folder already; export takes a run or one of its checkpoints")
    name = dtype if dtype is not None else _default_dtype(located.checkpoint)
    shards = _planned_shards(located, DTYPES[name])
    _check_space(out, sum(spec.num_bytes for specs in shards.values() for spec in specs))
    _publish(out, lambda partial: _write(partial, located.model, shards, name))
    return _summary(out, located.checkpoint, located.step, name, sum(len(specs) for specs in shards.values()))


def _export_gguf(file: Path, step: int | None, out: Path, dtype: str | None) -> ExportSummary:
    if step is not None:
        raise RefusedError(f"--step {step} is for runs, and {file} is a GGUF file; leave it out")
    name = dtype if dtype is not None else "bfloat16"
    model = open_gguf(file, DTYPES[name])
    _check_space(out, model.num_bytes)

    def write(partial: Path) -> None:
        model.write_companions(partial)
        model.write_weights(partial, logger.warning)

    _publish(out, write)
    return _summary(out, file, None, name, model.num_tensors)


def _check_space(out: Path, need: int) -> None:
    free = free_bytes(out.absolute().parent)
    if free < need:
        raise RefusedError(f"{out}: {format_bytes(need)} are needed, {format_bytes(free)} are free; name another disk")


def _summary(out: Path, source: Path, step: int | None, dtype: str, num_tensors: int) -> ExportSummary:
    num_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    return ExportSummary(path=out, source=source, step=step, dtype=dtype, num_tensors=num_tensors, num_bytes=num_bytes)


def _default_dtype(checkpoint: Path) -> str:
    return "bfloat16" if read_state(checkpoint).plan.get("compute_dtype") == "bfloat16" else "float32"


def _planned_shards(located: Located, dtype: torch.dtype) -> dict[str, list[TensorSpec]]:
    """What each weight file will hold; the cut into files stays as it is in the checkpoint."""
    paths = sorted(located.model.glob("*.safetensors"))
    if not paths:
        raise RefusedError(f"{located.model} holds no *.safetensors")
    shards: dict[str, list[TensorSpec]] = {}
    for path in paths:
        files = TensorFiles([path])
        shards[path.name] = [_converted(files.spec(name), dtype) for name in files]
    return shards


def _converted(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    if not spec.dtype.is_floating_point:
        return spec  # integer and boolean tensors (masks, index buffers) keep their dtype

    def read() -> Tensor:
        return spec.read().to(dtype)

    return TensorSpec(name=spec.name, dtype=dtype, shape=spec.shape, read=read)


def _publish(out: Path, write: Callable[[Path], None]) -> None:
    """`write` fills a folder beside `out`, which takes the name of `out` when it is complete."""
    out = out.absolute()
    partial = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        write(partial)
        fsync_tree(partial)
        os.rename(partial, out)  # replaces an empty folder, fails on any other
        fsync_folder(out.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        free = format_bytes(free_bytes(out.parent))
        raise CheckpointError(f"{out} was not written: {error} ({free} are free there); name another folder") from error


def _write(partial: Path, model: Path, shards: Mapping[str, list[TensorSpec]], dtype: str) -> None:
    for name, specs in shards.items():
        write_specs(partial / name, specs)
    for entry in sorted(model.iterdir()):
        if entry.name in shards:
            continue
        if entry.is_dir():
            shutil.copytree(entry, partial / entry.name)
        elif entry.name == "config.json":
            config = _with_dtype(json.loads(entry.read_bytes()), dtype)
            (partial / entry.name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        elif entry.name == _INDEX:
            index = json.loads(entry.read_bytes())
            index["metadata"]["total_size"] = sum(spec.num_bytes for specs in shards.values() for spec in specs)
            (partial / entry.name).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        else:
            shutil.copyfile(entry, partial / entry.name)


def _with_dtype(config: Any, dtype: str) -> Any:
    """config.json with `dtype` (older spelling: `torch_dtype`) replaced, in the configs of sub-models too."""
    if not isinstance(config, dict):
        return config
    document = cast("dict[str, Any]", config)
    changed = {key: _with_dtype(value, dtype) for key, value in document.items()}
    for key in ("dtype", "torch_dtype"):
        if isinstance(changed.get(key), str):
            changed[key] = dtype
    return changed
