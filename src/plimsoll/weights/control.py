"""What ranks agree about while they read and write files: a group of its own with a long time-out.

Writing a checkpoint takes minutes, and the training group's time-out may be seconds: a barrier in it would end the run
while a slow disk is still busy. A failure on one rank becomes the same error on all of them, at once.
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from plimsoll.errors import CheckpointError, PlimsollError

T = TypeVar("T")

TIMEOUT = timedelta(hours=6)
"""Longer than any disk should take for one file; a rank that dies is seen at once all the same."""


class ControlGroup:
    """All ranks of the run, over gloo. Without torch.distributed: one rank, and nothing is sent.

    Making it is collective (every rank, in the same order as its other groups). Only one thread at a time may use it.
    """

    def __init__(self, timeout: timedelta = TIMEOUT) -> None:
        self.rank, self.ranks = 0, 1
        self._group: Any = None
        self._timeout = timeout
        # Where nobody has imported it there is no group, and who only looks for a checkpoint does not wait for torch.
        self._dist: Any = sys.modules.get("torch.distributed")
        if self._dist is not None and self._dist.is_initialized():
            self.rank, self.ranks = int(self._dist.get_rank()), int(self._dist.get_world_size())
            if self.ranks > 1:
                self._group = self._dist.new_group(backend="gloo", timeout=timeout)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self._group is not None:
            self._dist.monitored_barrier(self._group, timeout=self._timeout)

    def all_come(self, within: timedelta) -> bool:
        """Whether every rank calls this within that time. After False the group is not to be used any more."""
        if self._group is None:
            return True
        try:
            self._dist.monitored_barrier(self._group, timeout=within)
        except RuntimeError:  # gloo's: a rank that did not come, or has died
            return False
        return True

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in rank order, on every rank."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.ranks
        self._dist.all_gather_object(found, value, group=self._group)
        return found

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; its result, or on all ranks the error of the lowest rank that failed.

        The error keeps its class where it is one of ours, else it is a CheckpointError that names the rank. What is
        not an Exception (an interrupt) is told to the others as a failure and raised as it is here.
        """
        result: T | None = None
        own: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            own = error
        failures = self.gather(None if own is None else (self.rank, _portable(own, self.rank)))
        if own is not None and not isinstance(own, Exception):
            raise own
        first = next((failure for failure in failures if failure is not None), None)
        if first is not None:
            rank, error = first
            if rank == self.rank and own is not None:
                raise own
            raise error
        return result  # pyright: ignore[reportReturnType]  # None only where `work` returned it

    def close(self) -> None:
        """Give the group up; collective. Nothing to do for one rank."""
        if self._group is not None and self._dist.is_initialized():
            self._dist.destroy_process_group(self._group)
            self._group = None


def _portable(error: BaseException, rank: int) -> PlimsollError:
    if isinstance(error, PlimsollError):
        return error
    return CheckpointError(f"rank {rank} failed: {type(error).__name__}: {error}")
