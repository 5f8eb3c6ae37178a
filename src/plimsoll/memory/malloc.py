"""Make glibc give freed memory back, so that host memory is what is in use."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
THRESHOLD = 2**20
"""Bytes. Blocks from here on are maps of their own, which go when they are freed."""


def trim_heap() -> None:
    """Give back what is freed and in pages of its own inside glibc's heap: tens of MiB after a backward."""
    if not sys.platform.startswith("linux"):
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim.argtypes = [ctypes.c_size_t]
    trim.restype = ctypes.c_int
    trim(0)


def return_freed_memory() -> bool:
    """Fix glibc's thresholds for this process; returns whether that was possible.

    glibc raises the threshold with each large block that is freed, up to 32 MiB, and keeps smaller ones in its heap:
    a process on a CPU then holds a third more than its tensors take, for the rest of its life, and no plan can say how
    much. Setting either threshold also stops it from moving. A block from the system has to be cleared, which costs a
    CPU run some time. Where there is another C library nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    mallopt.restype = ctypes.c_int
    return bool(mallopt(_M_MMAP_THRESHOLD, THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, THRESHOLD))
