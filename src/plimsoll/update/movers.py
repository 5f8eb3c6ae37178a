"""How what the trainer must keep leaves the device and comes back: parameters and moments, by their storages."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from plimsoll.memory import names
from plimsoll.model.policy import PackedPolicy
from plimsoll.update.construct import own_tensors
from plimsoll.update.optimizer import Optimizer
from plimsoll.weights.arena import HostArena
from plimsoll.weights.offload import Offloader, storages_of


def _ready() -> None:
    """Nothing has to be done before."""


class HostMover:
    """A `Mover` of tensors that must survive: to an arena of exactly their storages, and back.

    The arena is made at the first eviction that has something to move, not before. It stays until `close`, or until the
    tensors are others.
    """

    def __init__(
        self,
        name: str,
        tensors: Callable[[], Sequence[Tensor]],
        device: torch.device,
        *,
        before: Callable[[], None] = _ready,
    ) -> None:
        """`tensors`: asked at each eviction. `before`: called when they are about to leave."""
        self._name = name
        self._tensors = tensors
        self._device = device
        self._before = before
        self._arena: HostArena | None = None
        self._offloader: Offloader | None = None
        self._storages: list[torch.UntypedStorage] = []
        self._away = False

    @property
    def present(self) -> bool:
        """Whether the tensors can be used."""
        return not self._away

    @property
    def host_bytes(self) -> int:
        """Of the arena, whether the tensors are in it or not."""
        return 0 if self._arena is None else self._arena.num_bytes

    def evict(self) -> int:
        """Copy to the arena and free the device. RunError when the host has no room; everything is then as before."""
        if self._away:
            return 0
        self._before()
        self._follow()
        moved = self._offloader.offload().num_bytes if self._offloader is not None else 0
        self._away = True
        return moved

    def admit(self) -> int:
        """Copy back. When the device has no room, everything is still in the arena."""
        if not self._away:
            return 0
        moved = self._offloader.onload().num_bytes if self._offloader is not None else 0
        self._away = False
        return moved

    def close(self) -> None:
        """Give the arena back; what is in it is lost. An eviction after this takes a new one."""
        if self._offloader is not None:
            self._offloader.close()
        if self._arena is not None:
            self._arena.close()
        self._arena = self._offloader = None
        self._storages = []

    def _follow(self) -> None:
        """An offloader of the tensors as they are now: loading a checkpoint or a first step brings others."""
        tensors = list(self._tensors())
        storages = storages_of(tensors)
        if len(storages) == len(self._storages) and all(a is b for a, b in zip(storages, self._storages, strict=True)):
            return
        self.close()
        sizes = [storage.nbytes() for storage in storages]
        if sum(sizes) == 0:
            return
        self._arena = HostArena({self._name: sizes}, device=self._device)
        self._offloader = Offloader(self._arena, self._name, tensors)
        self._storages = storages


class TrainerMovers:
    """Of one worker. Make it when the model has had its first forward: FSDP2 exchanges storages in that."""

    def __init__(self, policy: PackedPolicy, optimizer: Optimizer, device: torch.device) -> None:
        # Taken while they are shards: a gathered module has its full parameters under the same names.
        own = own_tensors(policy.lm).values()
        self.parameters = tuple(tensor for tensor in own if isinstance(tensor, nn.Parameter))
        """Of the policy, this rank's shards. Buffers stay: they are small, and an engine may read them."""

        def leave() -> None:
            assert not optimizer.gradients(), "parameters leave the device while they have gradients"
            reshard(policy)

        self.actor = HostMover(names.ACTOR_PARAMETERS, lambda: self.parameters, device, before=leave)
        self.moments = HostMover(names.OPTIMIZER_STATE, optimizer.tensors, device)

    @property
    def host_bytes(self) -> int:
        """Of both arenas."""
        return self.actor.host_bytes + self.moments.host_bytes

    def forget(self) -> None:
        """Other values, or other tensors, take the place of those that were moved. They are on the device now."""
        for mover in (self.actor, self.moments):
            assert mover.present, "a state was loaded while the old one was away"
        self.close()

    def close(self) -> None:
        """Give host memory back. May be called again."""
        self.actor.close()
        self.moments.close()


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 has gathered in any part of the model, as a forward that failed leaves it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
