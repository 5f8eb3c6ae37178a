"""New weights → an engine in the same process.

The engine gets a plain model of the same class. On one rank with equal dtypes its parameters *are* the trainer's (the
optimizer steps in place), so a sync moves nothing. Otherwise they are a copy in the compute dtype, refreshed here, and
its bytes are counted as a resident.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from plimsoll.memory import names
from plimsoll.memory.resident import Resident, Survival, storage_bytes
from plimsoll.model.build import build_rollout_skeleton, place
from plimsoll.parallel.tensors import full
from plimsoll.weights.names import plain_name
from plimsoll.weights.offload import storage_sizes, storages_of


class WeightSource(Protocol):
    """What the trainer offers; PolicyWorker is one."""

    @property
    def lm(self) -> PreTrainedModel:
        """The (sharded) model."""
        ...

    @property
    def version(self) -> int:
        """Policy version of its weights."""
        ...


class VersionedEngine(Protocol):
    """What an engine must accept."""

    def set_version(self, version: int) -> None:
        """Weights of this policy version are in place; everything computed with older ones (KV cache) is void."""
        ...


class RolloutWeights:
    """The engine's model and how its weights follow the trainer's; the mover of the copy, where there is one."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        """`dtype`: what the engine computes in."""
        buffers = {plain_name(name): buffer for name, buffer in source.lm.named_buffers()}
        self.model = build_rollout_skeleton(source.lm.config, dtype, buffers)
        """A plain model of transformers, without gradients."""
        self._copied: dict[str, Tensor] = {}
        placed: dict[int, nn.Parameter] = {}
        for name, parameter in _parameters(source).items():
            if id(parameter) not in placed:
                placed[id(parameter)] = self._own_or_borrow(name, parameter, dtype)
            # The same object under every name: tied weights stay tied.
            place(self.model, name, placed[id(parameter)])
        left = [name for name, parameter in self.model.named_parameters() if parameter.device.type == "meta"]
        assert not left, f"the trainer has no weights for {left}"
        self._storages = storages_of(self._copied.values())
        self._sizes = storage_sizes(self._copied.values())
        self._version = source.version
        self._present = True

    @property
    def copied_bytes(self) -> int:
        """Device bytes of parameters that are a copy; 0 when all are the trainer's own, or while the copy is away."""
        return storage_bytes(self._copied.values())

    @property
    def borrowed(self) -> bool:
        """Whether the engine samples with the trainer's own parameters, so that a rollout needs those."""
        return not self._copied

    @property
    def version(self) -> int:
        """Policy version of the last refresh; -1: the copy has left the device since."""
        return self._version

    @property
    def present(self) -> bool:
        """Whether the copy has memory."""
        return self._present

    def evict(self) -> int:
        """Drop the copy: the next refresh overwrites it anyway."""
        self._version = -1
        self._present = False
        for storage in self._storages:
            storage.resize_(0)
        return 0

    def admit(self) -> int:
        """Take memory for the copy, all of it or, when the device has no room, none. `refresh` fills it."""
        try:
            for storage, num_bytes in zip(self._storages, self._sizes, strict=True):
                storage.resize_(num_bytes)
        except BaseException:
            for storage in self._storages:
                storage.resize_(0)
            raise
        self._present = True
        return 0

    def residents(self) -> tuple[Resident, ...]:
        """The copy, where there is one."""
        if self.borrowed:
            return ()
        return (
            Resident(
                name=names.ROLLOUT_PARAMETERS,
                survival=Survival.REBUILD,
                measured=lambda: self.copied_bytes,
                mover=self,
                version=lambda: self.version,
            ),
        )

    @torch.no_grad()
    def refresh(self, source: WeightSource) -> int:
        """Copy what is not shared; returns the bytes written. Collective on several ranks."""
        assert self._present, "weights were sent to a copy that is not on the device"
        self._version = -1  # a copy that fails half-way is of no version
        tensors = _parameters(source)
        for name, copy in self._copied.items():
            copy.copy_(full(tensors[name]))
        self._version = source.version
        return self.copied_bytes

    def _own_or_borrow(self, name: str, parameter: Tensor, dtype: torch.dtype) -> nn.Parameter:
        ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
        if ranks == 1 and parameter.dtype == dtype:
            return nn.Parameter(full(parameter), requires_grad=False)
        copy = full(parameter).to(dtype, copy=True)
        self._copied[name] = copy
        return nn.Parameter(copy, requires_grad=False)


def _parameters(source: WeightSource) -> dict[str, nn.Parameter]:
    """By the name that transformers saves, a tied one under each of its names."""
    tensors = source.lm.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}


def sync(source: WeightSource, weights: RolloutWeights, engine: VersionedEngine) -> int:
    """Bring the engine to the trainer's version; returns the bytes copied (0 when weights are shared)."""
    num_bytes = weights.refresh(source)
    engine.set_version(source.version)
    return num_bytes
