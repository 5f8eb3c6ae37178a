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

from plimsoll.memory.resident import Resident, Survival, storage_bytes
from plimsoll.model.build import build_rollout_skeleton, place
from plimsoll.parallel.tensors import full
from plimsoll.weights.names import plain_name


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
    """The engine's model and how its weights follow the trainer's."""

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

    @property
    def copied_bytes(self) -> int:
        """Bytes of parameters that are a copy; 0 when all are the trainer's own."""
        return storage_bytes(self._copied.values())

    def residents(self) -> tuple[Resident, ...]:
        """The copy, where there is one."""
        if not self._copied:
            return ()
        return (Resident(name="rollout_parameters", survival=Survival.REBUILD, measured=lambda: self.copied_bytes),)

    @torch.no_grad()
    def refresh(self, source: WeightSource) -> int:
        """Copy what is not shared; returns the bytes written. Collective on several ranks."""
        tensors = _parameters(source)
        for name, copy in self._copied.items():
            copy.copy_(full(tensors[name]))
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
