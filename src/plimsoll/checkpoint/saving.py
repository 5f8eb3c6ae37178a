"""Saving a training state, at once or while training goes on.

    begin ─▶ prepare (rank 0: state.json, files of the final size) ─▶ write (a thread a rank) ─▶ manifest, publish
                                                                      └ tensors_read: weights may change from here on

In the background only the writing is: who trains calls `wait_read` before anything that changes weights or moments, and
`publish_written` where all ranks pass. A run that is killed in between has its older checkpoints.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plimsoll.checkpoint.state import TrainingState
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import start_training_checkpoint


class StateWriter(Protocol):
    """One rank's part of the tensors (`weights.write.ShardWriter`)."""

    tensors_read: threading.Event

    def run(self) -> None:
        """Write all of it; raises nothing."""
        ...

    def stop(self) -> None:
        """Write no more."""
        ...

    def check(self) -> None:
        """Raise what made `run` fail."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class _Saving:
    step: int
    partial: Path
    writer: StateWriter
    thread: threading.Thread


class TrainingSaver:
    """Saves in a store, one save at a time. On several ranks each has one; every method but `abort` is collective."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._saving: _Saving | None = None

    @property
    def saving(self) -> int | None:
        """Step of the save that is under way."""
        return self._saving.step if self._saving else None

    def save(
        self,
        state: TrainingState,
        prepare: Callable[[Path], StateWriter],
        *,
        background: bool,
        estimate_bytes: int | None = None,
    ) -> None:
        """Publish the checkpoint of `state.step`, or with `background` begin to write it.

        Args:
            state: rank 0's is written.
            prepare: on every rank, given the folder: makes this rank's writer; on rank 0, before that, all files but
                their bytes. It sends nothing to other ranks.
            estimate_bytes: refuse before writing when fewer are free.

        Raises:
            CheckpointError: on every rank, also for an earlier save in the background (which is finished first).
        """
        self.finish()
        store, step = self._store, state.step
        partial = store.begin(step, estimate_bytes=estimate_bytes)

        def start() -> StateWriter:
            if store.first:
                start_training_checkpoint(partial, state)
            return prepare(partial)

        writer = store.attempt(step, partial, start)
        # Always in a thread: an interrupt is raised in the main thread, and must not tear a writer that holds files.
        thread = threading.Thread(target=writer.run, name="plimsoll-save", daemon=True)
        self._saving = _Saving(step=step, partial=partial, writer=writer, thread=thread)
        thread.start()
        if not background:
            self.finish()

    def wait_read(self) -> None:
        """Return when the save under way, if any, has read the weights and moments. Not collective."""
        if self._saving:
            self._saving.writer.tensors_read.wait()

    def publish_written(self) -> Path | None:
        """Publish the save under way if every rank has written its part; its folder, or None.

        Raises:
            CheckpointError: on every rank; the save failed on one of them.
        """
        if self._saving is None:
            return None
        return self.finish() if self._store.all_ranks(not self._saving.thread.is_alive()) else None

    def finish(self) -> Path | None:
        """Wait for the save under way and publish it; its folder, or None when there is none.

        Raises:
            CheckpointError: on every rank; the save failed on one of them.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        return self._store.finish(saving.step, saving.partial, lambda: _wait(saving))

    def abort(self) -> None:
        """Give up the save under way, if any. Not collective: for a run that is being torn down."""
        saving, self._saving = self._saving, None
        if saving:
            _stop(saving)
            self._store.discard(saving.partial)


def _wait(saving: _Saving) -> None:
    try:
        saving.thread.join()
    except BaseException:
        _stop(saving)  # the folder is deleted next
        raise
    saving.writer.check()


def _stop(saving: _Saving) -> None:
    saving.writer.stop()
    if saving.thread.ident is not None:  # it was started
        saving.thread.join()
