"""One piece of host memory for everything that a rank keeps off its device: laid out once, exact, named regions."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plimsoll.weights.limits import aligned
from plimsoll.weights.registered import HostBuffer


class HostArena:
    """Named regions of one host buffer, one run of bytes for each storage."""

    def __init__(
        self, storages: Mapping[str, Sequence[int]], *, device: torch.device, numa_node: int | None = None
    ) -> None:
        """Take memory for `storages`: bytes of each storage of each region. RunError when it cannot be had.

        `device`: the one that it is copied to and from. `numa_node`: instead of the device's own.
        """
        self.exact_bytes = sum(sum(sizes) for sizes in storages.values())
        self.device = device
        self._places: dict[str, list[tuple[int, int]]] = {}
        offset = 0
        for name, sizes in storages.items():
            places: list[tuple[int, int]] = []
            for num_bytes in sizes:
                places.append((offset, num_bytes))
                offset += aligned(num_bytes)
            self._places[name] = places
        self._buffer = HostBuffer(offset, device=device, numa_node=numa_node)

    @property
    def num_bytes(self) -> int:
        """Bytes taken: `exact_bytes` and the alignment."""
        return self._buffer.num_bytes

    def region(self, name: str) -> tuple[Tensor, ...]:
        """The storages of a region, each [bytes] uint8, in the order in which they were given."""
        memory = self._buffer.tensor
        return tuple(memory[offset : offset + num_bytes] for offset, num_bytes in self._places[name])

    def close(self) -> None:
        """Wait for the device and give the memory back, as soon as nobody holds a part of it. May be called again."""
        self._buffer.close()
