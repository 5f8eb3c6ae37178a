"""What the trainer holds, for the ledger, and how it is moved between phases."""

from collections.abc import Callable, Iterable

from torch import Tensor

from plimsoll.memory import names
from plimsoll.memory.resident import Mover, Place, Resident, Survival, storage_bytes
from plimsoll.update.movers import TrainerMovers
from plimsoll.update.optimizer import Optimizer
from plimsoll.update.reference import FrozenReference


def trainer_residents(
    optimizer: Optimizer, reference: FrozenReference | None, movers: TrainerMovers, version: Callable[[], int]
) -> tuple[Resident, ...]:
    """Named groups of bytes, this rank's part. `version`: of the policy."""
    streamed = optimizer.location == "streamed"
    found = [
        _resident(names.ACTOR_PARAMETERS, Survival.KEEP, lambda: movers.parameters, movers.actor, version),
        _resident(names.ACTOR_GRADIENTS, Survival.SCRATCH, optimizer.gradients),
        Resident(
            name=names.OPTIMIZER_STATE,
            survival=Survival.KEEP,
            measured=lambda: storage_bytes(optimizer.tensors()),
            place=Place.HOST if streamed else Place.DEVICE,
            mover=None if streamed else movers.moments,  # streamed, it comes in by itself, within the step
        ),
    ]
    if movers.host_bytes:
        found.append(_on_host(names.HOST_ARENA, lambda: movers.host_bytes))
    if reference is not None:
        # Kept on the device it has nowhere to go.
        mover = None if reference.placement == "device" else reference
        found.append(_resident(names.REFERENCE_PARAMETERS, Survival.REBUILD, lambda: reference.parameters, mover))
        if reference.placement == "arena":
            found.append(_on_host(names.REFERENCE_ARENA, reference.host_bytes))
    return tuple(found)


def _resident(
    name: str,
    survival: Survival,
    tensors: Callable[[], Iterable[Tensor]],
    mover: Mover | None = None,
    version: Callable[[], int] | None = None,
) -> Resident:
    return Resident(
        name=name, survival=survival, measured=lambda: storage_bytes(tensors()), mover=mover, version=version
    )


def _on_host(name: str, measured: Callable[[], int]) -> Resident:
    return Resident(name=name, survival=Survival.KEEP, measured=measured, place=Place.HOST)
