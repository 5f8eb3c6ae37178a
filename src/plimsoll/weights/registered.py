"""Host memory of exact size that a device copies from and to at full speed.

torch's pinned memory (`pin_memory=True`) is rounded up to a power of two and kept after it is freed. This is an
anonymous private map of as many bytes as are asked for, registered with CUDA where there is one. Child processes do not
inherit it: a fork of a process with pinned pages would copy them.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.errors import RunError
from plimsoll.weights.numa import cpus_of_node, numa_node_of

_MOST_TOUCHING_THREADS = 8
_TOUCH_BYTES = 64 * 2**20  # by one thread at a time

_maps: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()

_registered: dict[int, int] = {}
"""First byte of what is registered with CUDA → bytes. Without a lock: a finalizer may come while anybody holds it."""


def registered_bytes() -> int:
    """Host memory that is registered with CUDA by this package in this process. torch's own counters do not see it."""
    return sum(list(_registered.values()))


def count_registered(pointer: int, num_bytes: int) -> None:
    """From now on `num_bytes` at `pointer` are in `registered_bytes`; 0: no longer."""
    if num_bytes:
        _registered[pointer] = num_bytes
    else:
        _registered.pop(pointer, None)


class HostBuffer:
    """Bytes on the host, zeros at first, rounded up to a page and no further.

    Every page is touched once, by threads on the device's NUMA node, so that it lies there.
    """

    def __init__(self, num_bytes: int, *, device: torch.device, numa_node: int | None = None) -> None:
        """`numa_node`: instead of the node that `device` hangs on. RunError when memory or registration fails."""
        self.num_bytes = num_bytes
        self.device = device
        try:
            # Not the default of Python's mmap, which is shared memory: that is counted, limited and dumped differently.
            memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise RunError(f"{num_bytes} bytes of host memory could not be mapped: {error}") from error
        memory.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # advice; a kernel may be built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        _maps.add(memory)
        # The tensor holds the map, not the other way round: the map goes with its last view, so that a view that is
        # used after `close` reads memory that is still there. (Closing the map itself would pull it from under them.)
        self._tensor: Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
        node = numa_node if numa_node is not None else numa_node_of(device)
        _touch(self._tensor, cpus_of_node(node) if node is not None else frozenset())
        self._unregister: weakref.finalize[..., HostBuffer] | None = None
        if device.type == "cuda" and num_bytes:
            pointer = self._tensor.data_ptr()
            _register(pointer, num_bytes, device)
            # Runs before the map can go: until then this object holds it.
            self._unregister = weakref.finalize(self, _unregister, pointer, device, os.getpid())
            # The system does it for a process that ends; waiting for a device that hangs would keep it from ending.
            self._unregister.atexit = False

    @property
    def tensor(self) -> Tensor:
        """All bytes, [num_bytes] uint8."""
        assert self._tensor is not None, "a host buffer is used after it was closed"
        return self._tensor

    @property
    def registered(self) -> bool:
        """Whether CUDA copies from and to it without a detour."""
        return self._unregister is not None and self._unregister.alive

    def close(self) -> None:
        """Wait for the device, unregister, and give the memory back as soon as the last view of it is gone.

        May be called again. An owner drops its views first.
        """
        if self._unregister is not None:
            self._unregister()
        self._tensor = None


def _touch(memory: Tensor, cpus: frozenset[int]) -> None:
    """Write every byte once. Threads of our own, whose affinity does not outlive them."""
    num_bytes = len(memory)
    starts = range(0, num_bytes, _TOUCH_BYTES)
    count = min(_MOST_TOUCHING_THREADS, len(cpus or os.sched_getaffinity(0)), len(starts))
    failures: list[BaseException] = []

    def work(own: Sequence[int]) -> None:
        try:
            if cpus:
                os.sched_setaffinity(0, cpus)  # 0: this thread
            for start in own:
                # Without the interpreter lock. `memory` is held here: it outlives an interrupted caller.
                ctypes.memset(memory.data_ptr() + start, 0, min(_TOUCH_BYTES, num_bytes - start))
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(starts[i::count],), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RunError(f"host memory could not be touched on the device's NUMA node: {failures[0]}") from failures[0]


def _register(pointer: int, num_bytes: int, device: torch.device) -> None:
    runtime = cast("Any", torch.cuda.cudart())  # torch does not type it
    with torch.cuda.device(device):
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(pointer, num_bytes, 0))
        except RuntimeError as error:
            raise RunError(
                f"{num_bytes / 2**20:.0f} MiB of host memory could not be registered with CUDA ({error}): the host or "
                "its container has too little memory, or its limit of locked memory is lower (ulimit -l)"
            ) from error
    count_registered(pointer, num_bytes)


def _unregister(pointer: int, device: torch.device, owner: int) -> None:
    if os.getpid() != owner:  # a forked child: the map is not there, and CUDA must not be used
        return
    count_registered(pointer, 0)
    runtime = cast("Any", torch.cuda.cudart())
    # A device that failed cannot be waited for, nor does it copy any more: the failure was raised where it happened.
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        torch.cuda.synchronize()
        torch.cuda.check_error(runtime.cudaHostUnregister(pointer))


def _keep_in_child() -> None:
    """Never unmap in a forked child: the map is not there, and other memory may have taken its addresses."""
    for memory in list(_maps):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


os.register_at_fork(after_in_child=_keep_in_child)
