"""`plimsoll export`: a run's weights, or those of an older format, as a Hugging Face folder that transformers loads.

The checkpoint's model/ is such a folder already, in the dtype of the master weights. Export copies it file by file,
converting the weights one tensor at a time, so memory is bounded by the largest tensor. So are those of a GGUF file and
of pytorch_model.bin.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plimsoll.checkpoint.locate import Located, locate_model
from plimsoll.checkpoint.state import read_state
from plimsoll.errors import RefusedError
from plimsoll.gguf import find_gguf, open_gguf
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.convert import (
    TorchWeights,
    check_torch_weights,
    convert_torch_weights,
    converted_bytes,
    copy_config,
    find_torch_weights,
)
from plimsoll.weights.disk import free_bytes
from plimsoll.weights.publish import check_free_name, check_space, publish, saying_why
from plimsoll.weights.tensors import TensorFiles, TensorSpec, in_dtype, index_name, index_text, write_specs

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Dtypes that weights can be exported in."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class ExportSummary:
    """What was exported."""

    path: Path
    source: Path  # the checkpoint, the GGUF file, or the folder of pytorch_model.bin
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
        source: a run folder, one of its checkpoints/step_N, a .gguf file, or a folder with one and no other model, or
            with pytorch_model.bin and no safetensors.
        step: None: the newest complete checkpoint.
        out: must not exist, or be an empty folder; appears complete or not at all.
        dtype: a key of `DTYPES`. None: bfloat16 for a GGUF file and for a run that computed in bfloat16, float32 for
            other runs, and for pytorch_model.bin what each tensor has.

    Raises:
        RefusedError: nothing was written.
        CheckpointError: writing failed; nothing partial stays.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RefusedError(f"--dtype {dtype} is not known; the dtypes are {', '.join(DTYPES)}")
    check_free_name(out)
    weights = find_torch_weights(source) if source.is_dir() else None
    file = None if weights is not None else find_gguf(source)
    if step is not None and (weights or file):
        what = "holds pytorch_model.bin" if weights else "is a GGUF file"
        raise RefusedError(f"--step {step} is for runs, and {file or source} {what}; leave it out")
    if weights is not None:
        return _export_torch(weights, out, dtype)
    return _export_run(source, step, out, dtype) if file is None else _export_gguf(file, out, dtype)


def _export_run(run: Path, step: int | None, out: Path, dtype: str | None) -> ExportSummary:
    located = locate_model(run, step=step)
    if located.checkpoint is None or located.step is None:
        raise RefusedError(f"{run} is a Hugging Face folder already; export takes a run or one of its checkpoints")
    name = dtype if dtype is not None else _default_dtype(located.checkpoint)
    shards = _planned_shards(located, DTYPES[name])
    check_space(out, sum(spec.num_bytes for specs in shards.values() for spec in specs), free_bytes)

    def write(partial: Path) -> None:
        with saying_why(out):
            _write(partial, located.model, shards, DTYPES[name])

    publish(out, write, ControlGroup())
    return _summary(out, located.checkpoint, located.step, name, sum(len(specs) for specs in shards.values()))


def _export_gguf(file: Path, out: Path, dtype: str | None) -> ExportSummary:
    name = dtype if dtype is not None else "bfloat16"
    model = open_gguf(file, DTYPES[name])
    check_space(out, model.num_bytes, free_bytes)

    def write(partial: Path) -> None:
        with saying_why(out):
            model.write_companions(partial)
            model.write_weights(partial, logger.warning)

    publish(out, write, ControlGroup())
    return _summary(out, file, None, name, model.num_tensors)


def _export_torch(weights: TorchWeights, out: Path, dtype: str | None) -> ExportSummary:
    check_torch_weights(weights)
    wanted = None if dtype is None else DTYPES[dtype]
    check_space(out, weights.num_bytes if wanted is None else converted_bytes(weights, wanted), free_bytes)

    def write(partial: Path) -> int:
        with saying_why(out):
            return convert_torch_weights(weights, partial, logger.warning, dtype=wanted)

    num_tensors = publish(out, write, ControlGroup())
    return _summary(out, weights.folder, None, dtype or _main_dtype(out), num_tensors)


def _main_dtype(folder: Path) -> str:
    """That of the most bytes."""
    files = TensorFiles(sorted(folder.glob("*.safetensors")))
    sizes: Counter[torch.dtype] = Counter()
    for spec in map(files.spec, files):
        sizes[spec.dtype] += spec.num_bytes
    return str(sizes.most_common(1)[0][0]).removeprefix("torch.")


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
        shards[path.name] = [in_dtype(files.spec(name), dtype) for name in files]
    return shards


def _write(partial: Path, model: Path, shards: Mapping[str, list[TensorSpec]], dtype: torch.dtype) -> None:
    for name, specs in shards.items():
        write_specs(partial / name, specs)
    for entry in sorted(model.iterdir()):
        if entry.name in shards:
            continue
        if entry.is_dir():
            shutil.copytree(entry, partial / entry.name)
        elif entry.name == "config.json":
            copy_config(model, partial, dtype)
        elif entry.name == index_name():
            (partial / entry.name).write_text(index_text(shards), encoding="utf-8")
        else:
            shutil.copyfile(entry, partial / entry.name)
