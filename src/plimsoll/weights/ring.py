"""A few fixed buffers that all bytes between files and tensors go through.

They are made when they are first needed and given back to the system by `close`: on a CPU one by one, for a CUDA device
all at once in one piece of registered memory (copies are then asynchronous and at full speed, and a registration costs
the driver the same few milliseconds whatever its size).
"""

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from plimsoll.weights.limits import RING_BUFFER_BYTES, RING_BYTES
from plimsoll.weights.registered import HostBuffer


class StagingBuffer:
    """Memory of one transfer at a time. Made by a ring."""

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        """uint8 [buffer_bytes]."""
        self._used: torch.cuda.Event | None = None

    def release_after(self, stream: torch.cuda.Stream) -> None:
        """What was queued on the stream so far still reads or writes this buffer: it is lent again only after that."""
        event = torch.cuda.Event()
        event.record(stream)
        self._used = event

    @property
    def ready(self) -> bool:
        """Nothing is queued that uses it."""
        return self._used is None or self._used.query()

    def wait(self) -> None:
        """Until it is ready."""
        if self._used is not None:
            self._used.synchronize()
            self._used = None


class StagingRing:
    """At most `num_buffers` buffers of `buffer_bytes`, lent to any thread. `device`: the copies' other end.

    Without sizes: 192 MiB in all, in buffers of 8 MiB on a CPU and of 16 MiB for a CUDA device.
    """

    def __init__(
        self,
        *,
        buffer_bytes: int | None = None,
        num_buffers: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        if buffer_bytes is None:
            buffer_bytes = RING_BUFFER_BYTES[self.device.type]
        if num_buffers is None:
            num_buffers = max(1, RING_BYTES // buffer_bytes)
        assert min(buffer_bytes // 16, num_buffers) >= 1, f"{num_buffers} buffers of {buffer_bytes} bytes"
        self.buffer_bytes = buffer_bytes
        self.num_buffers = num_buffers
        self._changed = threading.Condition()
        self._blocks: list[HostBuffer] = []
        self._buffers: list[StagingBuffer] = []
        self._free: deque[StagingBuffer] = deque()
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Host memory that it takes when all of its buffers exist."""
        return self.buffer_bytes * self.num_buffers

    @property
    def num_bytes_made(self) -> int:
        """Host memory of the buffers that exist."""
        return sum(block.num_bytes for block in self._blocks)

    @contextmanager
    def buffer(self) -> Generator[StagingBuffer]:
        """Lend a buffer; waits until one is free and no copy from or to it is under way. Thread-safe."""
        lent = self._take()
        try:
            lent.wait()
            yield lent
        finally:
            with self._changed:
                self._free.append(lent)
                self._changed.notify_all()

    def close(self) -> None:
        """Give the memory back, after the copies that still use it. No buffer may be lent. May be called twice."""
        with self._changed:
            assert len(self._free) == len(self._buffers), "a buffer is still lent"
            self._closed = True
            for buffer in self._buffers:
                buffer.wait()
                buffer.bytes = torch.empty(0, dtype=torch.uint8)
            self._buffers.clear()
            self._free.clear()
            for block in self._blocks:
                block.close()
            self._blocks.clear()

    def _take(self) -> StagingBuffer:
        with self._changed:
            while True:
                assert not self._closed, "the ring is closed"
                # The one that waits longest is the likeliest to be ready. Further ones are made only where all are in
                # use, so a load that needs few takes few.
                if self._free and (self._free[0].ready or len(self._buffers) == self.num_buffers):
                    return self._free.popleft()
                if len(self._buffers) < self.num_buffers:
                    self._make()
                    return self._free.pop()
                self._changed.wait()

    def _make(self) -> None:
        count = self.num_buffers if self.device.type == "cuda" else 1
        block = HostBuffer(count * self.buffer_bytes, device=self.device)
        self._blocks.append(block)
        memory = block.tensor.view(count, self.buffer_bytes)
        made = [StagingBuffer(memory[i]) for i in range(count)]
        self._buffers += made
        self._free += made
        self._changed.notify_all()
