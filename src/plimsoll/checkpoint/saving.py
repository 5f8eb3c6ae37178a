"""Saving a training state, at once or while training goes on.

    begin ─▶ prepare (rank 0: state.json, files of the final size) ─▶ write (a thread a rank) ─▶ manifest, publish
                                                                      └ tensors_read: weights may change from here on

In the background only the writing is: who trains calls `wait_read` before anything that changes weights or moments, and
`publish_written` where all ranks pass. A run that is killed in between has its older checkpoints.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from plimsoll.checkpoint.state import TrainingState
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import start_training_checkpoint
from plimsoll.errors import CheckpointError

SALVAGE_WITHIN = timedelta(minutes=1)
"""How long a rank that has failed waits for the others: they fail too, once they miss it, or they never come."""


class StateWriter(Protocol):
    """One rank's part of the tensors (`weights.write.ShardWriter`)."""

    tensors_read: threading.Event
    plan: str
    """Equal on all ranks, or their parts do not make a whole."""

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
    """Saves in a store, one save at a time. On several ranks each has one.

    Every method but `wait_read` and `abort` is collective.
    """

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
        plans = store.gather(writer.plan)
        store.attempt(step, partial, lambda: _check_alike(plans))
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
        return self.finish() if all(self._store.gather(not self._saving.thread.is_alive())) else None

    def finish(self) -> Path | None:
        """Wait for the save under way and publish it; its folder, or None when there is none.

        Raises:
            CheckpointError: on every rank; the save failed on one of them.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        return self._store.finish(saving.step, saving.partial, lambda: _wait(saving))

    def salvage(self, within: timedelta = SALVAGE_WITHIN) -> str | None:
        """After the run has failed for another reason: publish the save under way, if every rank comes here in time.

        Else it is dropped. Returns what there is to say; None: nothing was under way. Its own failure is only said, so
        that the first one stays the one that is raised.
        """
        step = self.saving
        if step is None:
            return None
        if not self._store.all_come(within):
            self.abort()
            return f"the checkpoint of step {step} was being written and is dropped: not every rank came to finish it"
        try:
            self.finish()
        except CheckpointError as error:
            return str(error)
        return f"the checkpoint of step {step}, which was being written, is complete"

    def abort(self) -> None:
        """Give up the save under way, if any. Not collective: for a run that is being torn down."""
        saving, self._saving = self._saving, None
        if saving:
            _stop(saving)
            self._store.discard(saving.partial)


def _check_alike(plans: list[str]) -> None:
    assert len(set(plans)) == 1, "ranks lay out different files"


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
