"""Make glibc give freed memory back, so that host memory is what is in use."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
THRESHOLD = 2**20
"""Bytes. Blocks from here on are maps of their own, which go when they are freed."""


def trim_heap() -> None:
    """Give back what is freed and in pages of its own inside glibc's heap: tens of MiB after a backward."""
    trim = _of_glibc("malloc_trim", ctypes.c_size_t)
    if trim is not None:
        trim(0)


def return_freed_memory() -> bool:
    """Fix glibc's thresholds for this process; returns whether that was possible.

    glibc raises the threshold with each large block that is freed, up to 32 MiB, and keeps smaller ones in its heap:
    a process on a CPU then holds a third more than its tensors take, for the rest of its life, and no plan can say how
    much. Setting either threshold also stops it from moving. A block from the system has to be cleared, which costs a
    CPU run some time. Where there is another C library nothing happens.
    """
    mallopt = _of_glibc("mallopt", ctypes.c_int, ctypes.c_int)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, THRESHOLD))


def _of_glibc(name: str, *arguments: Any) -> Callable[..., int] | None:
    """A function of the C library of this process; None: it has none by that name."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None)[name]
    except (OSError, AttributeError):
        return None
    function.argtypes = list(arguments)
    function.restype = ctypes.c_int
    return function
