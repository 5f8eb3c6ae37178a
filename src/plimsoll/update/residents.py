"""What the trainer holds, for the ledger."""

from collections.abc import Callable, Iterable

from torch import Tensor

from plimsoll.memory.resident import Resident, Survival, storage_bytes
from plimsoll.model.policy import PackedPolicy
from plimsoll.update.construct import own_tensors
from plimsoll.update.optimizer import Optimizer


def trainer_residents(
    policy: PackedPolicy, optimizer: Optimizer, reference: PackedPolicy | None
) -> tuple[Resident, ...]:
    """Named groups of bytes, this rank's part."""
    parameters = list(own_tensors(policy.lm).values())
    found = [
        _resident("actor_parameters", Survival.KEEP, lambda: parameters),
        _resident("actor_gradients", Survival.SCRATCH, optimizer.gradients),
        _resident("optimizer_state", Survival.KEEP, optimizer.tensors),
    ]
    if reference is not None:
        frozen = list(own_tensors(reference.lm).values())
        found.append(_resident("reference_parameters", Survival.REBUILD, lambda: frozen))
    return tuple(found)


def _resident(name: str, survival: Survival, tensors: Callable[[], Iterable[Tensor]]) -> Resident:
    return Resident(name=name, survival=survival, measured=lambda: storage_bytes(tensors()))
