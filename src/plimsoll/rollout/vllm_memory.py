"""vLLM's sleep pool: memory that is unmapped and mapped again at the same addresses, part by part.

vLLM drops weights and KV cache together only, and at that brings back the buffers of the model and nothing else that
lies in the pool. Here each part goes by itself, and everything in it that nobody makes anew (buffers, tables of rotary
embeddings, block tables, whatever a later version puts there) is kept on the host meanwhile. Imports no vLLM.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plimsoll.errors import RunError
from plimsoll.types import EnginePart

SAVED_LIMIT = 2 * 1024**3
"""Bytes to keep on the host over a sleep. More means that weights or KV cache were not recognised as such."""


class Allocation(Protocol):
    """One entry of the pool, as vLLM's allocator keeps it."""

    handle: tuple[int, int, int, Any]
    """(device, bytes, address, what the driver needs)."""
    tag: str
    """The part."""
    is_asleep: bool


@dataclass(slots=True, kw_only=True, frozen=True)
class PoolCalls:
    """The calls of vLLM's allocator."""

    allocations: Mapping[int, Allocation]
    """By address; alive: it follows the pool."""
    blocks: Callable[[str], Iterable[tuple[int, int]]]
    """Tag → (address, bytes) of every block of it that holds a tensor."""
    map: Callable[[Any], None]
    """Take memory for a handle."""
    unmap: Callable[[Any], None]
    """Give the memory of a handle back."""
    copy: Callable[[int, int, int], None]
    """(to address, from address, bytes), host or device, done on return."""


class SleepPool:
    """The parts of one engine's pool."""

    def __init__(self, calls: PoolCalls) -> None:
        self._calls = calls
        self._asleep: set[EnginePart] = set()
        # One host buffer an address, for the whole run: made anew at each sleep they would show up as growth.
        self._kept: dict[int, Tensor] = {}
        self._saved: dict[EnginePart, list[tuple[int, int]]] = {}

    def awake(self, part: EnginePart) -> bool:
        """Whether a part has memory."""
        return part not in self._asleep

    def mapped_bytes(self, part: EnginePart | None = None) -> int:
        """Bytes on the device now, of a part or of all."""
        return self._sum(part, lambda allocation: not allocation.is_asleep)

    def counted_bytes(self) -> int:
        """Bytes that torch's counters include, awake or asleep."""
        return self._sum(None, lambda allocation: True)

    @property
    def host_bytes(self) -> int:
        """Of what is kept on the host."""
        return sum(buffer.numel() for buffer in self._kept.values())

    def sleep(self, part: EnginePart, dropped: Iterable[Tensor]) -> None:
        """Give the memory of a part back. `dropped`: tensors whose contents come anew; all else of the part is kept.

        Nothing may run on the device that uses it. RunError, with the part awake, when too much would be kept.
        """
        assert part not in self._asleep, f"{part} is asleep already"
        addresses = {tensor.untyped_storage().data_ptr() for tensor in dropped}
        saved = [(address, size) for address, size in self._calls.blocks(part) if address not in addresses]
        total = sum(size for _, size in saved)
        if total > SAVED_LIMIT:
            raise RunError(
                f"{total} bytes of the engine's {part} are neither weights nor KV cache, which is more than buffers"
                " take: this version of vLLM keeps them in a way that plimsoll does not know; set rollout.engine=native"
            )
        for address, size in saved:
            buffer = self._kept.get(address)
            if buffer is None or buffer.numel() != size:
                buffer = self._kept[address] = torch.empty(size, dtype=torch.uint8)
            self._calls.copy(buffer.data_ptr(), address, size)
        for allocation in self._of(part):
            self._calls.unmap(allocation.handle)
            allocation.is_asleep = True
        self._saved[part] = saved
        self._asleep.add(part)

    def wake(self, part: EnginePart) -> None:
        """Take memory for a part again, and put back what was kept."""
        assert part in self._asleep, f"{part} is awake already"
        for allocation in self._of(part):
            self._calls.map(allocation.handle)
            allocation.is_asleep = False
        self._asleep.remove(part)
        for address, size in self._saved.pop(part):
            self._calls.copy(address, self._kept[address].data_ptr(), size)

    def _of(self, part: EnginePart) -> list[Allocation]:
        return [allocation for allocation in self._calls.allocations.values() if allocation.tag == part]

    def _sum(self, part: EnginePart | None, counts: Callable[[Allocation], bool]) -> int:
        every = self._calls.allocations.values() if part is None else self._of(part)
        return sum(int(allocation.handle[1]) for allocation in every if counts(allocation))


def blocks_of_segments(segments: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(address, bytes) of the blocks with a tensor in them, from a snapshot of torch's allocator."""
    return [
        (int(block["address"]), int(block["size"]))
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
