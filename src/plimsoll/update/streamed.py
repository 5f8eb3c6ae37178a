"""AdamW with its moments in host memory, taken through the device group by group within the step.

    load stream      moments of group i + 1: arena → slot
    current stream   fused AdamW on group i, in its slot
    store stream     moments of group i - 1: slot → arena

AdamW is elementwise: a flat slice of parameter, gradient and moments gives the bits that the whole would give.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from plimsoll.parallel.tensors import local
from plimsoll.update.adamw import MOMENTS, AdamWSettings
from plimsoll.weights.arena import HostArena
from plimsoll.weights.lanes import lanes_of
from plimsoll.weights.limits import STREAM_GROUP_BYTES, STREAM_SLOTS, aligned

_REGION = "optimizer_state"
_SLICE_ALIGNMENT = 1024
"""Elements. Slices that start at vectors of a kernel leave the same elements to its scalar remainder, at the end."""

Place: TypeAlias = tuple[int, int]
"""Storage of the arena's region, and the first byte in it."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Slice:
    """Elements start … stop - 1 of a flat parameter, whose moments lie in a slot."""

    name: str
    start: int
    stop: int
    offsets: tuple[int, int]
    """First byte in the slot of `exp_avg` and of `exp_avg_sq`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Run:
    """Bytes that are copied at once."""

    place: Place
    num_bytes: int
    offset: int
    """First byte in the slot."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Group:
    """What is in a slot at one time."""

    slices: tuple[Slice, ...]
    runs: tuple[Run, ...]


@dataclass(slots=True, kw_only=True, frozen=True)
class StreamPlan:
    """Where all moments lie in the arena, and in which groups they go through the device."""

    storages: tuple[int, ...]
    """Bytes."""
    places: Mapping[str, tuple[Place, Place]]
    """Of each parameter's `exp_avg` and `exp_avg_sq`."""
    groups: tuple[Group, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest group."""
        return max((run.offset + run.num_bytes for group in self.groups for run in group.runs), default=0)


def plan_stream(parameters: Mapping[str, Tensor], group_bytes: int) -> StreamPlan:
    """Cut the moments of local tensors into groups of at most about `group_bytes`.

    Small parameters share a storage and a group, so that each group is one copy each way. A parameter that is larger
    than a group has two storages, one a moment, and goes through in slices.
    """
    storages: list[int] = []
    places: dict[str, tuple[Place, Place]] = {}
    groups: list[Group] = []
    shared: list[Slice] = []
    used = 0

    def close() -> None:
        nonlocal shared, used
        if shared:
            number = len(storages)
            for part in shared:
                places[part.name] = ((number, part.offsets[0]), (number, part.offsets[1]))
            storages.append(used)
            groups.append(Group(slices=tuple(shared), runs=(Run(place=(number, 0), num_bytes=used, offset=0),)))
        shared, used = [], 0

    for name, parameter in parameters.items():
        one = parameter.numel() * parameter.element_size()
        pair = 2 * aligned(one)
        if pair > group_bytes:
            places[name] = ((len(storages), 0), (len(storages) + 1, 0))
            groups += _cut(name, parameter, places[name], group_bytes)
            storages += [one, one]
            continue
        if used + pair > group_bytes:
            close()
        offsets = (used, used + pair // 2)
        shared.append(Slice(name=name, start=0, stop=parameter.numel(), offsets=offsets))
        used += pair
    close()
    return StreamPlan(storages=tuple(storages), places=places, groups=tuple(groups))


def _cut(name: str, parameter: Tensor, places: tuple[Place, Place], group_bytes: int) -> list[Group]:
    """Slices of one large parameter, each a group."""
    size, total = parameter.element_size(), parameter.numel()
    length = max(group_bytes // (2 * size) // _SLICE_ALIGNMENT, 1) * _SLICE_ALIGNMENT
    groups: list[Group] = []
    for start in range(0, total, length):
        stop = min(start + length, total)
        num_bytes = (stop - start) * size
        offsets = (0, aligned(num_bytes))
        runs = tuple(
            Run(place=(storage, first + start * size), num_bytes=num_bytes, offset=offset)
            for (storage, first), offset in zip(places, offsets, strict=True)
        )
        groups.append(Group(slices=(Slice(name=name, start=start, stop=stop, offsets=offsets),), runs=runs))
    return groups


class StreamedAdamW:
    """`AdamWPlace` with the moments in an arena of its own.

    Device memory: `STREAM_SLOTS` groups of moments, taken for the length of a step. Step counts are kept on the host.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: AdamWSettings, *, group_bytes: int = STREAM_GROUP_BYTES
    ) -> None:
        self._parameters = dict(parameters)
        self._settings = settings
        shards = {name: local(parameter) for name, parameter in self._parameters.items()}
        devices = {shard.device for shard in shards.values()}
        assert len(devices) == 1, f"parameters on one device, not on {devices}"
        assert len({id(p) for p in self._parameters.values()}) == len(shards), "a parameter under two names steps twice"
        assert all(shard.is_contiguous() for shard in shards.values()), "a flat slice needs contiguous parameters"
        self._device = devices.pop()
        self._plan = plan_stream(shards, group_bytes)
        self._arena = HostArena({_REGION: self._plan.storages}, device=self._device)
        self._region = self._arena.region(_REGION)
        self._lanes = lanes_of(self._device, STREAM_SLOTS)
        self._steps: dict[str, float] = {}

    @property
    def arena_bytes(self) -> int:
        """Host memory that the moments take, and what aligning them costs."""
        return self._arena.num_bytes

    @property
    def slots_bytes(self) -> int:
        """Device memory during a step."""
        return STREAM_SLOTS * self._plan.slot_bytes

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """As of `AdamWPlace`. Returns before the last moments are back in the arena."""
        gradients = {name: local(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        for name, gradient in gradients.items():
            dtype = self._parameters[name].dtype
            assert gradient.dtype == dtype, f"the gradient of {name} is {gradient.dtype}, the parameter {dtype}"
        groups = [group for group in self._plan.groups if any(part.name in gradients for part in group.slices)]
        slots = [
            torch.empty(self._plan.slot_bytes, dtype=torch.uint8, device=self._device)
            for _ in range(min(STREAM_SLOTS, len(groups)))
        ]
        with self._lanes.pipeline():
            for index, group in enumerate(groups):
                number = index % STREAM_SLOTS
                slot = slots[number]
                with self._lanes.loading(number):
                    for run in group.runs:
                        _part(slot, run).copy_(self._in_arena(run), non_blocking=True)
                with self._lanes.working(number):
                    stepping = [part for part in group.slices if part.name in gradients and part.stop > part.start]
                    self._work(stepping, slot, gradients, learning_rate)
                with self._lanes.storing(number):
                    for run in group.runs:
                        self._in_arena(run).copy_(_part(slot, run), non_blocking=True)
        for name in gradients:
            self._steps[name] = self._steps.get(name, 0.0) + 1.0

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """As of `AdamWPlace`: on the host, in the arena. Waits for the copies of the last step."""
        self._lanes.synchronize()
        return {name: self._moments_of(name) for name in self._parameters if name in self._steps}

    def steps_by_name(self) -> dict[str, float]:
        """As of `AdamWPlace`."""
        return {name: self._steps[name] for name in self._parameters if name in self._steps}

    def empty_moments(self) -> dict[str, dict[str, Tensor]]:
        """As of `AdamWPlace`."""
        self._lanes.synchronize()
        for storage in self._region:
            storage.zero_()
        self._steps = dict.fromkeys(self._parameters, 0.0)
        return self.moments()

    def finish_load(self, steps: Mapping[str, float]) -> None:
        """As of `AdamWPlace`."""
        for name in self._parameters:
            if name not in steps:
                for moment in self._moments_of(name).values():
                    local(moment).zero_()
        self._steps = {name: steps[name] for name in self._parameters if name in steps}

    def tensors(self) -> list[Tensor]:
        """As of `AdamWPlace`: all of the arena, from the start."""
        return list(self._region)

    def close(self) -> None:
        """As of `AdamWPlace`. The arena waits for the device, also for one that has failed."""
        self._region = ()
        self._arena.close()

    def _in_arena(self, run: Run) -> Tensor:
        storage, first = run.place
        return self._region[storage][first : first + run.num_bytes]

    def _work(
        self, slices: Sequence[Slice], slot: Tensor, gradients: Mapping[str, Tensor], learning_rate: float
    ) -> None:
        """The fused kernel, once for those that decay and once for the others."""
        by_decay: dict[float, list[Slice]] = {}
        for part in slices:
            by_decay.setdefault(self._settings.decay_of(self._parameters[part.name]), []).append(part)
        for decay, members in by_decay.items():
            averages, squares = zip(*(self._moments_in(part, slot) for part in members), strict=True)
            adamw(
                [local(self._parameters[part.name]).view(-1)[part.start : part.stop] for part in members],
                [gradients[part.name].reshape(-1)[part.start : part.stop] for part in members],
                list(averages),
                list(squares),
                [],
                # A count of its own for each: the function adds one to them, and a slice is not a step. Filled on the
                # device, because a copy from the host would wait.
                [self._count_of(part) for part in members],
                fused=True,
                amsgrad=False,
                beta1=self._settings.beta1,
                beta2=self._settings.beta2,
                lr=learning_rate,
                weight_decay=decay,
                eps=self._settings.epsilon,
                maximize=False,
            )

    def _count_of(self, part: Slice) -> Tensor:
        return torch.full((), self._steps.get(part.name, 0.0), dtype=torch.float32, device=self._device)

    def _moments_in(self, part: Slice, slot: Tensor) -> tuple[Tensor, Tensor]:
        dtype = self._parameters[part.name].dtype
        num_bytes = (part.stop - part.start) * dtype.itemsize
        average, square = (slot[offset : offset + num_bytes].view(dtype) for offset in part.offsets)
        return average, square

    def _moments_of(self, name: str) -> dict[str, Tensor]:
        parameter = self._parameters[name]
        shard = local(parameter)
        found: dict[str, Tensor] = {}
        for moment, (storage, first) in zip(MOMENTS, self._plan.places[name], strict=True):
            memory = self._region[storage][first : first + shard.numel() * shard.element_size()]
            found[moment] = _placed_as(parameter, memory.view(shard.dtype).view(shard.shape))
        return found


@torch.no_grad()
def _placed_as(parameter: Tensor, values: Tensor) -> Tensor:
    """`values` on the host as the local part of a tensor that is sharded as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return values
    # DTensor.from_local would copy them to the device of the mesh. A shard that only lives on the host may have them.
    placed = torch.empty_like(parameter, device="cpu", requires_grad=False)
    local(placed).set_(values.untyped_storage(), values.storage_offset(), values.shape, values.stride())
    return placed


def _part(slot: Tensor, run: Run) -> Tensor:
    return slot[run.offset : run.offset + run.num_bytes]
