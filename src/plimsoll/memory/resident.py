"""Residents: named groups of bytes with an owner who can say how large they are."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Survival(StrEnum):
    """What eviction may do to a resident."""

    KEEP = "keep"  # copied out and back: parameters of the policy, optimizer state
    REBUILD = "rebuild"  # dropped and made again: KV cache, rollout weights, a frozen reference
    SCRATCH = "scratch"  # lives inside one phase: gradients, activations, logits chunks


class Place(StrEnum):
    """Which memory a resident takes."""

    DEVICE = "device"  # memory of the worker's device; on a CPU run that is host memory
    HOST = "host"
    ENGINE = "engine"  # device memory in the pools of an engine in this process, which torch's counters misreport


class Mover(Protocol):
    """How a resident leaves the device and comes back. Only `memory.enter` calls it."""

    @property
    def present(self) -> bool:
        """Whether the resident can be used."""
        ...

    def evict(self) -> int:
        """Take it off the device (KEEP: to host memory; REBUILD: dropped). Returns bytes copied; 0 when it was away."""
        ...

    def admit(self) -> int:
        """Bring it back (REBUILD: memory for it, whose contents its owner makes anew). Returns bytes copied."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class Resident:
    """A named, owned group of bytes."""

    name: str  # of memory/names.py; unique in its process
    survival: Survival
    predicted_bytes: int | None = None  # from the config alone; None: nobody has predicted it
    measured: Callable[[], int]  # bytes now, by summing storages (`storage_bytes`) or by asking the engine
    place: Place = Place.DEVICE
    mover: Mover | None = None  # None: it stays where it is
    version: Callable[[], int] | None = None  # policy version of its contents (weights, KV cache); -1: none


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages under `tensors`, this rank's part.

    Views and tied tensors share a storage and count once, with the whole storage. A DTensor counts with its local
    shard, a tensor on the meta device or with a freed storage with 0.
    """
    sizes: dict[tuple[torch.device, int], int] = {}
    # Under no_grad `to_local` hands out the shard itself; with gradients it makes an autograd node for each tensor.
    with torch.no_grad():
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type == "meta":
                continue
            storage = local.untyped_storage()
            if storage.nbytes():
                sizes[local.device, storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
