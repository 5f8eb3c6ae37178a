"""Sizes of the fixed buffers that weights and moments go through. Without torch, for the plan."""

from collections.abc import Mapping

RING_BYTES = 192 * 2**20
"""Host memory of a staging ring when all of its buffers exist."""

RING_BUFFER_BYTES: Mapping[str, int] = {"cpu": 8 * 2**20, "cuda": 16 * 2**20}
"""Of one buffer. Many small ones rather than few large ones: each reader needs one at a time, and one reader alone is
far slower than the bus. On an H200 eight readers brought 20 GB/s from the page cache with 16 MiB, 18 with 8 MiB, 16
with 32 MiB; a CPU, which makes as many as it needs, takes less memory with smaller ones."""

READERS: Mapping[str, int] = {"cpu": 4, "cuda": 8}
"""Threads that read a checkpoint: so many buffers does a CPU make, which makes them one by one. More than 8 were slower
on a machine of 16 cores."""

STREAM_GROUP_BYTES = 256 * 2**20
"""Moments of one group of a streamed optimizer: enough to keep the bus busy, little beside the parameters."""

STREAM_SLOTS = 3
"""Groups on the device at once. One is loaded, one worked on, one stored."""

ARENA_ALIGNMENT = 64
"""Bytes; every storage of a host arena starts at a multiple of it (a cache line, and more than any dtype needs)."""


def aligned(num_bytes: int) -> int:
    """What a storage of so many bytes takes in a host arena."""
    return -(-num_bytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT


SYNC_BUCKET_BYTES = 256 * 2**20
"""Weights on their way to an engine that has its own copy: so much of them exists twice at one time, in the engine's
dtype. One larger tensor goes alone."""
