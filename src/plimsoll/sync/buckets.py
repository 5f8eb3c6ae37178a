"""The policy's weights by the names of its checkpoint, in buckets of bounded bytes.

What transformers stacks (experts) comes apart again into the stored tensors, as an export would write them: engines
read checkpoints. On one rank a tensor is a view of the trainer's where dtypes are equal, else a cast of its own, so a
bucket is what a sync takes on the device. On several ranks each parameter is gathered whole, once.
"""

from collections.abc import Generator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plimsoll.parallel.tensors import full
from plimsoll.weights.limits import SYNC_BUCKET_BYTES
from plimsoll.weights.names import ExportTensor, export_tables, module_tensors


class Bucket(NamedTuple):
    """Some of the weights."""

    tensors: list[tuple[str, Tensor]]
    """By the name in a checkpoint, in the engine's dtype."""
    num_bytes: int


class _Gathered(NamedTuple):
    name: str
    tensor: Tensor


class WeightBuckets:
    """One model's buckets, the same at every sync."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, bucket_bytes: int = SYNC_BUCKET_BYTES) -> None:
        """`dtype`: of floating-point tensors in the engine. RefusedError when the model cannot be taken apart."""
        self._model = model
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._tables: Mapping[str, ExportTensor] = export_tables(model, None)

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors; a tied weight has one."""
        return frozenset(self._tables)

    # Not under `torch.no_grad` as a whole: as a decorator it holds each bucket until the next is made.
    def __call__(self) -> Generator[Bucket]:
        """Bucket by bucket (collective on several ranks). A bucket may be dropped before the next is asked for."""
        members = module_tensors(self._model)
        held: list[tuple[str, Tensor]] = []
        size = 0
        last: _Gathered | None = None
        for stored in self._tables.values():
            num_bytes = prod(stored.shape) * self._kind(members[stored.parts[0][0]]).itemsize
            if held and size + num_bytes > self._bucket_bytes:
                yield Bucket(held, size)
                held, size = [], 0
            tensor, last = self._make(stored, members, last)
            held.append((stored.name, tensor))
            size += num_bytes
            del tensor  # else a cast would outlive its bucket in this frame
        if held:
            yield Bucket(held, size)

    @torch.no_grad()
    def _make(
        self, stored: ExportTensor, members: Mapping[str, Tensor], last: _Gathered | None
    ) -> tuple[Tensor, _Gathered | None]:
        views: list[Tensor] = []
        for name, piece in stored.parts:
            if last is None or last.name != name:
                last = None  # before the next one is gathered
                last = _Gathered(name, full(members[name]))
            views.append(piece.as_stored(last.tensor[piece.target_box.slices]))
        kind = self._kind(views[0])
        if len(views) == 1 and tuple(views[0].shape) == stored.shape:
            return views[0].to(kind), last
        whole = views[0].new_empty(stored.shape, dtype=kind)
        for view, (_, piece) in zip(views, stored.parts, strict=True):
            whole[piece.stored_box.slices].copy_(view)
        return whole, last

    def _kind(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype
