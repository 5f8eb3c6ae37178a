"""A checkpoint into a model: every rank reads its own part, and nothing goes from rank to rank.

headers ─▶ tables (names, shapes) ─▶ memory for meta tensors ─▶ read ─▶ computed buffers, new heads ─▶ checks
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from plimsoll.errors import RefusedError
from plimsoll.weights.buffers import init_fresh, rebuild_buffers
from plimsoll.weights.checkpoint_tables import CheckpointTables, Mismatch, NamedShape, TiedPair, misfit_error
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.files import FileIdentity, StoredTensor, WeightFiles
from plimsoll.weights.names import checkpoint_tables, module_tensors, plain_name, uncompiled
from plimsoll.weights.pieces import ParameterTable, identity_table
from plimsoll.weights.read import check_dtypes, read_parameters
from plimsoll.weights.ring import StagingRing
from plimsoll.weights.ties import broken_ties, empty_on, shared_names

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, frozen=True)
class LoadReport:
    """What one rank did."""

    num_bytes_read: int
    """From the files."""
    seconds: float
    num_parameters: int
    """Elements of the full model's parameters; tied ones once."""
    files: Mapping[Path, FileIdentity]
    """What was read, as it was when it was opened."""
    fresh: tuple[str, ...]
    """Parameters that the checkpoint lacks: initialised from the seed."""
    left_out: tuple[str, ...]
    """Tensors that the checkpoint holds for another head: not read."""


def load_sharded(
    model: nn.Module,
    source: str | Path | Iterable[str | Path] | WeightFiles,
    *,
    device: torch.device | None = None,
    ring: StagingRing | None = None,
    threads: int | None = None,
    fresh: Sequence[str] = (),
    seed: int = 0,
    control: ControlGroup | None = None,
) -> LoadReport:
    """Load a Hugging Face folder (or safetensors files, or what is open already) into `model`, in place.

    The model may be on the meta device or not, sharded by `fully_shard`, tensor-parallel, both or neither. Tensors on
    the meta device get memory on `device` (None: that of the mesh, else the CPU). Where `fully_shard` wraps a module
    around `model`, call `to_empty` on that one before: it pads uneven shards, and would do so at the first forward.
    A module that is no transformers model takes tensors under the names of its state_dict.

    `fresh`: parameters of a transformers model that the checkpoint may lack and that are then initialised from `seed`
    (a new head). `ring`: staging memory to use instead of its own. `control`: every rank calls, and what fails on one
    is raised on all. Without it nothing goes from rank to rank: any rank may load alone, and one that fails raises
    alone, while the others go on to their next collective and wait there.

    RefusedError: names or shapes that do not match, all of them; nothing is written then. CheckpointError: a file that
    cannot be read, or changed meanwhile; what the model holds is then not to be used.
    """
    start = time.perf_counter()
    model = uncompiled(model)
    with ExitStack() as stack:

        def prepare() -> tuple[WeightFiles, CheckpointTables]:
            files = source if isinstance(source, WeightFiles) else stack.enter_context(WeightFiles(source))
            return files, fitting_tables(model, files, fresh)

        files, found = _together(control, prepare)
        _refuse_false_ties(model, files, found, control)
        num_bytes = _together(control, lambda: _fill(model, files, found, device, ring, threads, seed))
        _together(control, files.check_unchanged)
        return LoadReport(
            num_bytes_read=num_bytes,
            seconds=time.perf_counter() - start,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            files=dict(files.identities),
            fresh=tuple(entry.name for entry in found.missing),
            left_out=tuple(entry.name for entry in found.unexpected),
        )


def _together(control: ControlGroup | None, work: Callable[[], T]) -> T:
    return work() if control is None else control.together(work)


def fitting_tables(model: nn.Module, files: WeightFiles, fresh: Sequence[str] = ()) -> CheckpointTables:
    """How the files make the model, which may be on the meta device; neither is touched.

    RefusedError, with all causes at once: names, shapes or dtypes that do not fit.
    """
    if isinstance(model, PreTrainedModel):
        found = checkpoint_tables(model, files.tensors)
    else:
        # Only transformers' own modules know how to initialise what is missing.
        found, fresh = _identity_tables(model, files.tensors), ()
    error = misfit_error(found, _source_name(files), fresh)
    if error is not None:
        raise error
    parameters = list(model.parameters())
    if any(parameter.is_meta for parameter in parameters) and not all(parameter.is_meta for parameter in parameters):
        raise RefusedError(
            "some parameters of the model are on the meta device and some are not: build it as a whole on either"
        )
    members = _members(model)
    check_dtypes(found.tables, files.tensors, {name: members[name] for name in found.tables})
    return found


def _identity_tables(model: nn.Module, stored: Mapping[str, StoredTensor]) -> CheckpointTables:
    """Every tensor under its own name; tied ones under any of theirs."""
    members = _members(model)
    tables: dict[str, ParameterTable] = {}
    missing: list[NamedShape] = []
    mismatched: list[Mismatch] = []
    pairs: list[TiedPair] = []
    for name, *aliases in shared_names(members.items()):
        shape = tuple(members[name].shape)
        present = [one for one in (name, *aliases) if one in stored]
        wrong = [one for one in present if stored[one].shape != shape]
        mismatched += [Mismatch(name=one, stored=(one,), shape=shape, stored_shape=stored[one].shape) for one in wrong]
        if not present:
            missing.append(NamedShape(name=name, shape=shape, head=False))
        elif not wrong:
            first, *others = (identity_table(one, shape) for one in present)
            tables[name] = replace(first, name=name, aliases=tuple(aliases))
            pairs += [TiedPair(name=other.name, kept=name, table=other) for other in others]
    unexpected = [
        NamedShape(name=name, shape=tensor.shape, head=False) for name, tensor in stored.items() if name not in members
    ]
    return CheckpointTables(
        tables=tables,
        missing=tuple(missing),
        forgiven=(),
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
        tied_pairs_to_compare=tuple(pairs),
        stored_shapes={name: stored[name].shape for name in stored if name in members},
    )


def _members(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by plain name, tied ones under each of their names."""
    if isinstance(model, PreTrainedModel):
        return module_tensors(model)
    state = model.state_dict(keep_vars=True)
    return {plain_name(name): value for name, value in state.items() if isinstance(value, Tensor)}


def _refuse_false_ties(
    model: nn.Module, files: WeightFiles, found: CheckpointTables, control: ControlGroup | None
) -> None:
    """Two names of one parameter may both be stored, but only with the same values."""
    part, parts = (0, 1) if control is None else (control.rank, control.ranks)

    def differing() -> list[str]:
        if not found.tied_pairs_to_compare:
            return []
        return [pair.name for pair in broken_ties(files, found, _members(model), part=part, parts=parts)]

    own = _together(control, differing)
    every = [own] if control is None else control.gather(own)
    broken = {name for names in every for name in names}
    causes = [
        f"{pair.name} and {pair.kept} are one parameter of the model and differ in {_source_name(files)}: untie the "
        "model (plimsoll.weights.untie) before it is sharded, or set its tie_word_embeddings to false"
        for pair in found.tied_pairs_to_compare
        if pair.name in broken
    ]
    if causes:
        raise RefusedError(causes)


def _fill(
    model: nn.Module,
    files: WeightFiles,
    found: CheckpointTables,
    device: torch.device | None,
    ring: StagingRing | None,
    threads: int | None,
    seed: int,
) -> int:
    """Memory, values from the files, values that no file holds; returns the bytes read."""
    device = device or _device_of(model)
    ties = _ties(model)
    _make_memory(model, device)
    members = _members(model)
    num_bytes = read_parameters(
        files, found.tables, {name: members[name] for name in found.tables}, ring=ring, threads=threads
    )
    if isinstance(model, PreTrainedModel):
        rebuild_buffers(model, device)
        # Whatever else was missing has been refused.
        init_fresh(model, [*(entry.name for entry in found.missing), *found.forgiven], seed)
    assert _ties(model) == ties, "loading lost or made a tie"
    return num_bytes


def _make_memory(model: nn.Module, device: torch.device) -> None:
    """For a model on the meta device; what it holds elsewhere stays as it is."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    persistent = {plain_name(name) for name in model.state_dict()}
    buffers = list(model.named_buffers(remove_duplicate=False))
    lost = [plain_name(name) for name, buffer in buffers if buffer.is_meta and plain_name(name) not in persistent]
    if lost and not isinstance(model, PreTrainedModel):
        raise RefusedError(
            f"{', '.join(lost)}: no checkpoint holds this buffer, and on the meta device it has no value; build the "
            "module's buffers on a real device"
        )
    empty_on(model, device)
    for name, buffer in buffers:
        if not buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            stays = plain_name(name) in persistent
            model.get_submodule(owner).register_buffer(leaf, buffer.to(device), persistent=stays)


def _device_of(model: nn.Module) -> torch.device:
    """Where this rank's part belongs."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
        if isinstance(parameter.data, DTensor) and parameter.data.device_mesh.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _ties(model: nn.Module) -> set[tuple[str, ...]]:
    return set(shared_names(model.named_parameters(remove_duplicate=False)))


def _source_name(files: WeightFiles) -> str:
    return str(files.folder or next(iter(files.identities)))
