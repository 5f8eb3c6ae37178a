"""What the trainer holds, for the ledger."""

from collections.abc import Callable, Iterable

from torch import Tensor

from plimsoll.memory.resident import Place, Resident, Survival, storage_bytes
from plimsoll.model.policy import PackedPolicy
from plimsoll.update.construct import own_tensors
from plimsoll.update.optimizer import Optimizer
from plimsoll.update.reference import FrozenReference


def trainer_residents(
    policy: PackedPolicy, optimizer: Optimizer, reference: FrozenReference | None
) -> tuple[Resident, ...]:
    """Named groups of bytes, this rank's part."""
    parameters = list(own_tensors(policy.lm).values())
    found = [
        _resident("actor_parameters", Survival.KEEP, lambda: parameters),
        _resident("actor_gradients", Survival.SCRATCH, optimizer.gradients),
        _resident("optimizer_state", Survival.KEEP, optimizer.tensors, _place_of(optimizer)),
    ]
    if reference is not None:
        frozen = list(own_tensors(reference.policy.lm).values())
        found.append(_resident("reference_parameters", Survival.REBUILD, lambda: frozen))
        if reference.placement == "arena":
            found.append(
                Resident(
                    name="reference_arena", survival=Survival.KEEP, measured=reference.host_bytes, place=Place.HOST
                )
            )
    return tuple(found)


def _place_of(optimizer: Optimizer) -> Place:
    return Place.HOST if optimizer.location == "streamed" else Place.DEVICE


def _resident(
    name: str, survival: Survival, tensors: Callable[[], Iterable[Tensor]], place: Place = Place.DEVICE
) -> Resident:
    return Resident(name=name, survival=survival, measured=lambda: storage_bytes(tensors()), place=place)
