"""Streams of a pipeline that takes host memory through slots on the device: load a slot, work on it, store it.

On CUDA loading, work and storing run beside each other, each on a stream of its own (work: the caller's). The host
queues everything and waits for nothing. On a CPU everything happens in the caller's order.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Lanes(Protocol):
    """Inside `pipeline`, and for each slot in this order: `loading`, `working`, `storing`, and again."""

    def pipeline(self) -> AbstractContextManager[None]:
        """Around all uses of the slots, which must be allocated outside and not freed inside."""
        ...

    def loading(self, slot: int) -> AbstractContextManager[None]:
        """Copies queued inside run once what was stored from this slot before has left it."""
        ...

    def working(self, slot: int) -> AbstractContextManager[None]:
        """Kernels queued inside run once the slot is loaded."""
        ...

    def storing(self, slot: int) -> AbstractContextManager[None]:
        """Copies queued inside run once the work on the slot is done."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that was stored has arrived: before the host reads or writes that memory."""
        ...


def lanes_of(device: torch.device, num_slots: int) -> Lanes:
    """The lanes of a device."""
    return CudaLanes(device, num_slots) if device.type == "cuda" else HostLanes()


class CudaLanes:
    """One stream to load, one to store; work is on the caller's current stream."""

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._device = device
        self._num_slots = num_slots
        self._load = torch.cuda.Stream(device)
        self._store = torch.cuda.Stream(device)
        self._loaded = self._events()
        self._worked = self._events()
        self._stored = self._events()

    @contextmanager
    def pipeline(self) -> Generator[None]:
        """As of `Lanes`. The current stream must be the same throughout."""
        current = torch.cuda.current_stream(self._device)
        # The slots' memory may still be in use by what was queued there before, and a pipeline before this one may
        # still be storing what this one loads.
        self._load.wait_stream(current)
        self._load.wait_stream(self._store)
        self._loaded, self._worked, self._stored = self._events(), self._events(), self._events()
        try:
            yield
        finally:
            # What frees a slot after this hands it to kernels of the current stream: they must come after the copies.
            current.wait_stream(self._load)
            current.wait_stream(self._store)

    @contextmanager
    def loading(self, slot: int) -> Generator[None]:
        """As of `Lanes`."""
        self._load.wait_event(self._stored[slot])  # one that was never recorded is not waited for
        with torch.cuda.stream(self._load):
            yield
        self._loaded[slot].record(self._load)

    @contextmanager
    def working(self, slot: int) -> Generator[None]:
        """As of `Lanes`."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._loaded[slot])
        yield
        self._worked[slot].record(current)

    @contextmanager
    def storing(self, slot: int) -> Generator[None]:
        """As of `Lanes`."""
        self._store.wait_event(self._worked[slot])
        with torch.cuda.stream(self._store):
            yield
        self._stored[slot].record(self._store)

    def synchronize(self) -> None:
        """As of `Lanes`."""
        self._store.synchronize()

    def _events(self) -> list[torch.cuda.Event]:
        return [torch.cuda.Event() for _ in range(self._num_slots)]


class HostLanes:
    """A CPU: everything at once and in order."""

    @contextmanager
    def pipeline(self) -> Generator[None]:
        """As of `Lanes`."""
        yield

    @contextmanager
    def loading(self, slot: int) -> Generator[None]:
        """As of `Lanes`."""
        yield

    @contextmanager
    def working(self, slot: int) -> Generator[None]:
        """As of `Lanes`."""
        yield

    @contextmanager
    def storing(self, slot: int) -> Generator[None]:
        """As of `Lanes`."""
        yield

    def synchronize(self) -> None:
        """Nothing is under way."""
