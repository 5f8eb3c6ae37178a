"""A record of every allocation on a device during a stretch of code, for torch's memory_viz."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

MAX_EVENTS = 1_000_000
"""Allocations and frees that are kept; the oldest go first. A million are about 1 GB of host memory while recorded."""


@contextmanager
def recorded_allocations(path: Path) -> Generator[None]:
    """Write what was allocated and freed inside, with stack traces, to `path` (https://pytorch.org/memory_viz).

    torch has no public name for this (2.13); its documentation on memory names these two.
    """
    torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)  # pyright: ignore[reportPrivateUsage]
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))  # pyright: ignore[reportPrivateUsage]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)  # pyright: ignore[reportPrivateUsage]
