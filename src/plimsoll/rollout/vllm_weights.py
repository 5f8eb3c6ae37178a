"""Weights of a checkpoint into a model of vLLM that runs already, bucket by bucket, all of them or an error.

vLLM keeps q, k and v in one parameter, experts stacked, and on some devices in the order that a kernel wants.
`model.load_weights` alone writes into what it finds, which is wrong where the layout was changed after loading (experts
for FlashInfer, the latent attention's absorbed projections). So the layers are put back into checkpoint format first
and processed again one by one as they become complete, into the memory that CUDA graphs have captured: vLLM's
layer-wise reload, as its own weight transfer uses it. It holds the tensors of a layer until all of them are there, and
makes the layer once more beside the old one: at most a bucket and two layers, if the names of a layer come together.

Imports no vLLM: its functions are given.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.errors import RunError

NAMES_SHOWN = 8


class LayerInfo(Protocol):
    """vLLM's notes about a layer during a reload."""

    load_numel: int
    """Elements that have come."""
    kernel_tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None
    """(parameters, buffers) that hold the weights while the layer is in checkpoint format."""

    def can_load(self) -> bool:
        """False before a reload, and when the layer is complete."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class ReloadCalls:
    """vLLM's layer-wise reload."""

    initialize: Callable[[nn.Module], None]
    """Put every layer into checkpoint format."""
    finalize: Callable[[nn.Module], None]
    """Process what is left and end."""
    info: Callable[[nn.Module], LayerInfo]
    """Notes of a layer."""
    padding_rows: Callable[[nn.Module], int]
    """Rows of a layer's parameters that no checkpoint has (a vocabulary rounded up)."""
    uncounted: frozenset[str]
    """Last parts of names that are written past the reload."""


class WeightReload:
    """One model, version after version."""

    def __init__(self, model: nn.Module, calls: ReloadCalls) -> None:
        """`model` has the `load_weights` that vLLM's models have."""
        self._model = model
        self._calls = calls
        self._names: set[str] = set()
        self._active = False

    def begin(self) -> None:
        """Buckets follow."""
        assert not self._active, "one sync at a time"
        self._active, self._names = True, set()
        self._calls.initialize(self._model)

    @torch.no_grad()
    def bucket(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Hand tensors over. RunError when vLLM knows no place for one, or has left one out."""
        assert self._active, "a bucket before `begin`"
        twice = [name for name, _ in tensors if name in self._names]
        assert not twice, f"weights came twice: {twice[:NAMES_SHOWN]}"
        self._names |= {name for name, _ in tensors}
        counter = _MetaCopies()
        try:
            with counter:
                cast("Any", self._model).load_weights(iter(tensors))
        except (ValueError, KeyError) as error:
            raise RunError(f"vLLM has no place for a weight of the policy: {error}") from error
        counted = [tensor.numel() for name, tensor in tensors if name.rpartition(".")[2] not in self._calls.uncounted]
        # Unknown biases are dropped without a word (some quantized checkpoints hold such), so elements are counted.
        if counter.elements < sum(counted):
            raise RunError(
                f"vLLM took {counter.elements} of {sum(counted)} elements of a bucket and left the rest out; it holds"
                f" {_shown([name for name, _ in tensors])}. The policy and vLLM's model of it do not fit; set"
                " rollout.engine=native"
            )

    def commit(self) -> None:
        """End. RunError that names what no bucket brought."""
        assert self._active, "a commit before `begin`"
        missing = self._missing()
        if missing:
            raise RunError(f"weights of the engine that no tensor of the policy has filled: {_shown(missing)}")
        self._calls.finalize(self._model)
        self._active = False

    def _missing(self) -> list[str]:
        """Parameters of layers that are not complete, tied ones left out if they came under another name."""
        layers: dict[str, nn.Module] = dict(cast("Any", self._model.named_modules()))
        waiting = {name: layer for name, layer in layers.items() if self._calls.info(layer).can_load()}
        # A layer that is complete has its own parameters back; one that only lacks padding holds them aside.
        given = {
            parameter.data_ptr()
            for layer in layers.values()
            for parameter in layer.parameters(recurse=False)
            if not parameter.is_meta
        }
        short: dict[str, nn.Module] = {}
        for name, layer in waiting.items():
            if self._calls.info(layer).load_numel < self._wanted(layer):
                short[name] = layer
            else:
                given |= {parameter.data_ptr() for parameter in self._held(layer).values()}
        return [
            f"{name}.{own}" if name else own
            for name, layer in short.items()
            for own, parameter in self._held(layer).items()
            if parameter.data_ptr() not in given
        ]

    def _held(self, layer: nn.Module) -> Mapping[str, Tensor]:
        tensors = self._calls.info(layer).kernel_tensors
        return {} if tensors is None else tensors[0]

    def _wanted(self, layer: nn.Module) -> int:
        rows = self._calls.padding_rows(layer)
        # What is not on the meta device is no part of the reload.
        parameters = [parameter for parameter in layer.parameters(recurse=False) if parameter.is_meta]
        return sum(parameter.numel() - rows * (parameter.numel() // parameter.shape[0]) for parameter in parameters)


class _MetaCopies(TorchDispatchMode):
    """Counts elements that are copied into tensors on the meta device: the reload's rehearsal of each load."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            self.elements += int(args[0].numel())
        return func(*args, **(kwargs or {}))


def _shown(names: Sequence[str]) -> str:
    more = f", and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
