"""New weights → an engine with weights of its own.

memory.enter(SYNC): weights awake → begin → bucket by bucket → commit; memory.enter(ROLLOUT): KV cache awake
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from plimsoll.sync.buckets import WeightBuckets


class Receiver(Protocol):
    """What weights are sent to; ColocatedEngine of the vocabulary is one."""

    def begin(self, version: int) -> None:
        """Weights of this version follow."""
        ...

    def bucket(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Some of the weights."""
        ...

    def commit(self, version: int) -> None:
        """That was all of them."""
        ...


def send(buckets: WeightBuckets, version: int, engine: Receiver) -> int:
    """Bring the engine to this version; returns the bytes sent. Collective on several ranks.

    When it fails in between, the engine has no version, and nothing can be sampled from it.
    """
    num_bytes = 0
    engine.begin(version)
    for tensors, size in buckets():
        engine.bucket(tensors)
        num_bytes += size
        del tensors  # one bucket at a time: the next is cast before this name would be bound again
    engine.commit(version)
    return num_bytes
