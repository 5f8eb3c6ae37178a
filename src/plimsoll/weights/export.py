"""A Hugging Face folder: what `from_pretrained` of transformers reads, with nothing missing and nothing unexpected.

From a (sharded) model every rank writes its own byte ranges; no rank holds a full tensor that it does not have already.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.disk import free_bytes
from plimsoll.weights.file_layout import SHARD_BYTES
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.names import CheckpointTables, checkpoint_tables, export_tables, plain_name, uncompiled
from plimsoll.weights.publish import check_free_name, check_space, publish, saying_why
from plimsoll.weights.tensors import DTYPES
from plimsoll.weights.write import (
    BUDGET_BYTES,
    THREADS,
    FileLayout,
    Outgoing,
    ShardWriter,
    create_files,
    lay_out,
    reserve_space,
    whole,
    write_laid_out,
)

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


@dataclass(slots=True, kw_only=True, frozen=True)
class ExportReport:
    """What was exported; the same on every rank but for `own_bytes` and `seconds`."""

    path: Path
    files: tuple[Path, ...]
    """All of them, sorted."""
    num_bytes: int
    """Of the weights files, headers included."""
    num_tensors: int
    own_bytes: int
    """Of tensors that this rank wrote."""
    seconds: float


def export_sharded(
    model: nn.Module,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    source: Path | None = None,
    tokenizer_folder: Path | None = None,
    control: ControlGroup | None = None,
    max_file_bytes: float = SHARD_BYTES,
    budget_bytes: int = BUDGET_BYTES,
    threads: int = THREADS,
    free: Callable[[Path], int] = free_bytes,
    reserve: Callable[[int, int], None] = reserve_space,
) -> ExportReport:
    """Write a model as a Hugging Face folder, every rank what it holds (collective).

    Args:
        model: plain or sharded. One of transformers is written with its config, any other module without.
        folder: does not exist or is empty; appears complete or not at all. All ranks must see its file system.
        dtype: of floating-point tensors in the files; None: as the config of `source` says, else that of the model's
            config, else each tensor's own.
        source: the folder the model was loaded from; the export has the same names, and its tokenizer.
        tokenizer_folder: where tokenizer, chat template and generation config are; None: `source`.
        control: None: one is made for the length of the call.
        budget_bytes: of staging buffers, on each rank.
        free: bytes free at a folder.
        reserve: gives a file its size (see `create_files`).

    Raises:
        RefusedError: the folder is not empty, or the disk has no room; nothing was written.
        CheckpointError: writing failed; nothing partial stays. The same on every rank.
    """
    begin = time.perf_counter()
    model, folder = uncompiled(model), folder.absolute()
    with _closing(control) as group:
        layouts = group.together(lambda: _lay_out_model(model, dtype, source, max_file_bytes))
        group.together(lambda: _check(folder, layouts, free) if group.rank == 0 else None)
        tokens = tokenizer_folder or source

        def write(partial: Path) -> int:
            own_bytes = write_laid_out(
                partial,
                layouts,
                control=group,
                budget_bytes=budget_bytes,
                threads=threads,
                reserve=reserve,
                shown=folder,
            )
            kind = _dtype_of(layouts)
            group.together(lambda: _companions(partial, folder, model, kind, tokens) if group.rank == 0 else None)
            return own_bytes

        own_bytes = publish(folder, write, group)
    return _report(folder, layouts, own_bytes, time.perf_counter() - begin)


def _check(folder: Path, layouts: Sequence[FileLayout], free: Callable[[Path], int]) -> None:
    check_free_name(folder)
    check_space(folder, sum(layout.num_bytes for layout in layouts), free)


def _report(folder: Path, layouts: Sequence[FileLayout], own_bytes: int, seconds: float) -> ExportReport:
    return ExportReport(
        path=folder,
        files=tuple(sorted(path for path in folder.rglob("*") if path.is_file())),
        num_bytes=sum(layout.num_bytes for layout in layouts),
        num_tensors=sum(len(layout.tensors) for layout in layouts),
        own_bytes=own_bytes,
        seconds=seconds,
    )


@contextmanager
def _closing(control: ControlGroup | None) -> Generator[ControlGroup]:
    """The group given, or one that is closed at the end."""
    if control is not None:
        yield control
        return
    own = ControlGroup()
    try:
        yield own
    finally:
        own.close()


def _companions(partial: Path, out: Path, model: nn.Module, dtype: torch.dtype, tokens: Path | None) -> None:
    with saying_why(out):
        if isinstance(model, PreTrainedModel):
            write_config(partial, model.config, dtype, architecture_of(model))
        if tokens is not None:
            copy_companions(tokens, partial)


def _lay_out_model(
    model: nn.Module, dtype: torch.dtype | None, source: Path | None, max_file_bytes: float
) -> tuple[FileLayout, ...]:
    stored = dtype or _configured_dtype(model, source)
    return lay_out(model_outgoings(model, stored, _source_tables(model, source)), max_file_bytes=max_file_bytes)


def model_outgoings(
    model: nn.Module, dtype: torch.dtype | None, source: CheckpointTables | None = None
) -> list[Outgoing]:
    """What a model's files hold, a tied weight once; the same names, dtypes and shapes on every rank.

    `dtype`: of floating-point tensors in the files; None: each tensor's own. `source`: how the model was made of the
    files that it was loaded from, for the same names; None: those that transformers would give.
    """
    state = model.state_dict(keep_vars=True)  # the parameters themselves: a tie is seen by identity
    tensors = {plain_name(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    if not isinstance(model, PreTrainedModel):
        first: dict[int, str] = {}
        for name, tensor in tensors.items():
            first.setdefault(id(tensor), name)
        return [whole(name, tensors[name], _stored_dtype(tensors[name], dtype)) for name in first.values()]
    found: list[Outgoing] = []
    for stored in export_tables(model, source).values():
        parts = tuple((piece, tensors[name]) for name, piece in stored.parts)
        kind = _stored_dtype(parts[0][1], dtype)
        found.append(Outgoing(name=stored.name, dtype=kind, shape=stored.shape, parts=parts))
    return found


def _source_tables(model: nn.Module, source: Path | None) -> CheckpointTables | None:
    if source is None or not isinstance(model, PreTrainedModel):
        return None
    with WeightFiles(source) as files:
        return checkpoint_tables(model, files.tensors)


def _stored_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Integers (buffers) stay what they are."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _dtype_of(layouts: Sequence[FileLayout]) -> torch.dtype:
    """What config.json says: the dtype of the most bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for layout in layouts:
        for placed in layout.tensors:
            sizes[placed.outgoing.dtype] += placed.outgoing.num_bytes
    return sizes.most_common(1)[0][0]


def _configured_dtype(model: nn.Module, source: Path | None) -> torch.dtype | None:
    if source is not None:
        try:
            values: Any = json.loads((source / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise RefusedError(f"the config of the source {source} cannot be read: {error}") from error
        name = values.get("dtype", values.get("torch_dtype"))  # the older spelling
        if name is not None:
            return _dtype_named(str(name), source)
    if isinstance(model, PreTrainedModel) and model.config.dtype is not None:
        return _dtype_named(str(model.config.dtype), source)
    return None


def _dtype_named(name: str, source: Path | None) -> torch.dtype:
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    found = known.get(name.removeprefix("torch."))
    if found is None:
        raise RefusedError(f"the config of {source or 'the model'} has dtype {name}; known are {', '.join(known)}")
    return found


def architecture_of(model: nn.Module) -> str:
    """Name of the model's class, as config.json has it."""
    return type(model).__name__.removeprefix("FSDP")  # fully_shard renames the class


def write_config(folder: Path, config: PreTrainedConfig, dtype: torch.dtype, architecture: str) -> Path:
    """Write config.json, without paths of this machine."""
    values = config.to_diff_dict()
    values |= {"architectures": [architecture], "dtype": str(dtype).removeprefix("torch.")}
    values.pop("_name_or_path", None)  # a path of the machine that trained
    target = folder / "config.json"
    target.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return target


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
    """Write plain tensors from one process: weights as `dtype`, config, tokenizer, chat template, generation config.

    `model_state`: full tensors by the names that transformers saves, a tied head left out. `architecture`: name of the
    model's class. The folder must exist or be creatable; files are overwritten, and nothing is synced but the weights.
    Returns the files written.
    """
    assert not any(isinstance(tensor, DTensor) for tensor in model_state.values()), "sharded: see export_sharded"
    folder.mkdir(parents=True, exist_ok=True)
    layouts = lay_out(
        [whole(name, tensor, _stored_dtype(tensor, dtype)) for name, tensor in model_state.items()],
        max_file_bytes=shard_bytes,
    )
    files = create_files(folder, layouts)
    writer = ShardWriter(folder, layouts)
    writer.run()
    writer.check()
    files.append(write_config(folder, config, dtype, architecture))
    return [*files, *(copy_companions(tokenizer_folder, folder) if tokenizer_folder else [])]


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
