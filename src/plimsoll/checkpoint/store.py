"""Checkpoints of one run: RUN/checkpoints/step_N, complete or absent.

    save:  .step_12.tmp-PID/ is written ─▶ fsync ─▶ manifest.json ─▶ renamed to step_12 ─▶ fsync of the parent
    then:  older ones beyond `keep`: step_8 renamed to .step_8.old-PID ─▶ deleted

A folder counts only under the name `step_N` and with a manifest that fits, so a process may be killed between any two
of these and the newest complete checkpoint is still found. Deletion comes after the new one is published, never before.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

from plimsoll.checkpoint.manifest import FileRecord, file_names, hash_files, why_incomplete, write_manifest
from plimsoll.errors import CheckpointError, PlimsollError, RunFolderError
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.disk import format_bytes, free_bytes, fsync_file, fsync_folder, fsync_tree, make_folders

T = TypeVar("T")

_STEP_NAME = re.compile(r"step_(0|[1-9]\d*)")
_LEFTOVER_NAME = re.compile(r"\.step_\d+\.(tmp|old)-\d+")


@dataclass(slots=True, kw_only=True, frozen=True)
class Skipped:
    """A folder that is not a complete checkpoint."""

    path: Path
    reason: str


@dataclass(slots=True, kw_only=True, frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int


@dataclass(slots=True, kw_only=True, frozen=True)
class Scan:
    """The newest complete checkpoint, if any, and what was passed over on the way to it."""

    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...]


@dataclass(slots=True, kw_only=True, frozen=True)
class Found:
    """The newest complete checkpoint, and what was passed over on the way to it, newest first."""

    path: Path
    step: int
    skipped: tuple[Skipped, ...]


def print_to_stderr(line: str) -> None:
    """The default way to say something."""
    print(line, file=sys.stderr, flush=True)


class _Refusal(CheckpointError):
    """Nothing was attempted, so there is nothing to clean up and no remedy to tell."""


class CheckpointStore:
    """Writes, finds and deletes checkpoints in one folder. Only the processes that train the run may save in it.

    On several ranks each has a store of the same folder. Rank 0's names the partial folder, writes the manifest,
    publishes and deletes; every rank writes and syncs its own bytes and hashes its share of the files.

    Args:
        folder: RUN/checkpoints; made by the first save.
        keep: newest complete checkpoints that stay; None: all.
        say: takes one line about leftovers that were removed.
        free: bytes free at a folder.
        control: the ranks that save together. Default: all of the run; its group is made by the first save.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None,
        say: Callable[[str], None] = print_to_stderr,
        free: Callable[[Path], int] = free_bytes,
        control: ControlGroup | None = None,
    ) -> None:
        assert keep is None or keep >= 1
        self.folder = folder
        self.keep = keep
        self._say = say
        self._free = free
        self._group = control
        self._open: Path | None = None  # the folder of a save that has begun and not ended
        self._damaged: set[int] = set()  # steps whose hashes did not fit: right sizes must not make them count again

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.folder / f"step_{step}"

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        estimate_bytes: int | None = None,
    ) -> Path:
        """Write, prove and publish the checkpoint of `step`, then delete those beyond `keep`. Every rank calls.

        A damaged checkpoint of the same step is replaced. A complete one is never overwritten: ask `holds` first.

        Args:
            write: on every rank, fills the one folder it is given, which is empty; its files must be plain ones.
            estimate_bytes: refuse before writing when fewer are free.

        Raises:
            CheckpointError: on every rank; nothing was published, nothing partial stays, older ones are untouched.
        """
        partial = self.begin(step, estimate_bytes=estimate_bytes)
        return self.finish(step, partial, lambda: write(partial))

    def begin(self, step: int, *, estimate_bytes: int | None = None) -> Path:
        """The first half of `save`: an empty folder, which only `finish` makes a checkpoint. Every rank calls.

        Until it was finished or discarded, no other save may begin.
        """
        assert self._open is None, f"{self._open} is still being written"
        partial = self.folder / f".step_{step}.tmp-{os.getpid()}"
        try:
            # Rank 0 decides: its process names the folder.
            partial = self._on_first(lambda: self._open_partial(partial, step, estimate_bytes))
            self._everywhere(lambda: self._see(partial))
        except BaseException as error:
            self._fail(step, partial, error)
        self._open = partial
        return partial

    def attempt(self, step: int, partial: Path, work: Callable[[], T]) -> T:
        """A part of a save: `work` on every rank; when it fails on one, the whole save has failed. Every rank calls.

        Raises:
            CheckpointError: as `save`.
        """
        try:
            return self._everywhere(work)
        except BaseException as error:
            self._fail(step, partial, error)

    def finish(self, step: int, partial: Path, write: Callable[[], None]) -> Path:
        """The second half of `save`, for the folder that `begin` gave. Every rank calls.

        Args:
            write: on every rank, returns when this rank has written all of its part, or raises.

        Raises:
            CheckpointError: as `save`.
        """
        self.attempt(step, partial, write)
        try:
            # Each rank its own bytes: what another node still holds in its cache no rank here could hash or sync.
            self._everywhere(lambda: fsync_tree(partial))
            names = self._on_first(lambda: file_names(partial))
            hashed = self._everywhere(lambda: hash_files(partial, self._share(names)))
            files = {name: record for part in self.gather(hashed) for name, record in part.items()}
            self._on_first(lambda: self._complete(partial, step, files))
        except BaseException as error:
            self._fail(step, partial, error)
        self._open = None
        self._damaged.discard(step)
        if self.first:
            self._retain(step)
        return self.path_of(step)

    def check_space(self, estimate_bytes: int) -> None:
        """Refuse a run that could not write a single checkpoint; what a killed save left is removed first. Collective.

        Raises:
            RunFolderError: on every rank; fewer than `estimate_bytes` are free.
        """

        def check() -> None:
            self.remove_leftovers()
            shortage = self._shortage(estimate_bytes)
            if shortage is not None:
                raise RunFolderError(f"no room for a checkpoint: {shortage}. {_REMEDY}")

        self._on_first(check)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes what all ranks have alike."""
        return self._control.rank == 0

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in rank order. Every rank calls."""
        return self._control.gather(value)

    def all_come(self, within: timedelta) -> bool:
        """Whether every rank calls this within that time: for a run that has failed, maybe not on all ranks."""
        return self._control.all_come(within)

    def discard(self, partial: Path) -> None:
        """Delete a folder of `begin` that will not be finished. Not collective: for a run that is being torn down."""
        self._open = None
        if self.first:
            self._remove(partial)

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of `step` is there and complete, hashes included."""
        path = self.path_of(step)
        return path.is_dir() and why_incomplete(path, step, verify=True) is None

    def complete_steps(self) -> list[int]:
        """Steps of complete checkpoints, ascending.

        Files are compared by presence and size, not hashed; a step that `scan` found damaged does not count.
        """
        return [
            step
            for step in self._steps()
            if step not in self._damaged and why_incomplete(self.path_of(step), step, verify=False) is None
        ]

    def scan(self, verify: bool = True) -> Scan:
        """Look for the newest complete checkpoint. Changes nothing on disk: any process may call it on any run.

        Args:
            verify: hash the files (else: presence and size).
        """
        skipped = [Skipped(path=path, reason="a save that did not finish") for path in self._leftovers("tmp")]
        for step in reversed(self._steps()):
            path = self.path_of(step)
            reason = why_incomplete(path, step, verify=verify)
            if reason is None:
                return Scan(checkpoint=Checkpoint(path=path, step=step), skipped=tuple(skipped))
            self._damaged.add(step)
            skipped.append(Skipped(path=path, reason=reason))
        return Scan(checkpoint=None, skipped=tuple(skipped))

    def newest(self, verify: bool = True) -> Found:
        """The newest complete checkpoint.

        Raises:
            RunFolderError: there is none; every candidate is named with its reason.
        """
        result = self.scan(verify)
        if result.checkpoint is None:
            causes = [f"{skipped.path}: {skipped.reason}" for skipped in result.skipped]
            raise RunFolderError([f"there is no complete checkpoint in {self.folder}", *causes])
        return Found(path=result.checkpoint.path, step=result.checkpoint.step, skipped=result.skipped)

    def remove_leftovers(self) -> None:
        """Delete what a killed save or a killed deletion left behind, and say so."""
        for path in self._leftovers("tmp", "old"):
            self._say(f"removing {path}, left by a process that was killed")
            self._remove(path)

    def _steps(self) -> list[int]:
        """Steps of folders named step_N, complete or not, ascending."""
        if not self.folder.is_dir():
            return []
        matches = (_STEP_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def _leftovers(self, *kinds: str) -> list[Path]:
        if not self.folder.is_dir():
            return []
        matches = ((path, _LEFTOVER_NAME.fullmatch(path.name)) for path in sorted(self.folder.iterdir()))
        return [path for path, match in matches if match and match[1] in kinds]

    @property
    def _control(self) -> ControlGroup:
        # Not in __init__: making a group is collective, and any process may look for checkpoints.
        self._group = self._group or ControlGroup()
        return self._group

    def _everywhere(self, work: Callable[[], T]) -> T:
        return self._control.together(work)

    def _on_first(self, work: Callable[[], T]) -> T:
        """Run on rank 0; every rank gets the result, or the error."""
        result = self._everywhere(lambda: work() if self.first else None)
        return self.gather(result)[0]  # pyright: ignore[reportReturnType]  # rank 0's

    def _share(self, names: Sequence[str]) -> Sequence[str]:
        """What this rank hashes."""
        return names[self._control.rank :: self._control.ranks]

    def _open_partial(self, partial: Path, step: int, estimate_bytes: int | None) -> Path:
        if self.holds(step):
            raise _Refusal(f"{self.path_of(step)} exists and is complete; it is not written again")
        self.remove_leftovers()  # before the question about space: they may be what takes it
        shortage = self._shortage(estimate_bytes)
        if shortage is not None:
            raise CheckpointError(shortage)
        make_folders(self.folder)
        partial.mkdir()
        return partial

    def _see(self, partial: Path) -> None:
        if not partial.is_dir():
            raise CheckpointError(
                f"rank {self._control.rank} does not see {partial}, which rank 0 made: "
                "run_root must be on a file system that all nodes share"
            )

    def _complete(self, partial: Path, step: int, files: Mapping[str, FileRecord]) -> None:
        fsync_file(write_manifest(partial, step, files))
        fsync_folder(partial)
        self._publish(partial, step)

    def _fail(self, step: int, partial: Path, error: BaseException) -> NoReturn:
        """In an `except` block, on every rank: no rank writes any more."""
        self._open = None
        if isinstance(error, _Refusal):
            raise CheckpointError(str(error)) from None
        # BaseException: an abandoned step (Interrupted) must not leave a partial either, but stays what it is.
        text = ""
        if self.first:
            self._remove(partial)
            reason = str(error) if isinstance(error, PlimsollError) else f"{type(error).__name__}: {error}"
            text = self._failure(step, reason)
        try:
            text = self.gather(text)[0]
        except RuntimeError as lost:  # gloo's: a rank has died
            text = f"the checkpoint of step {step} was not written: {lost}"
        if not isinstance(error, Exception):
            raise error
        raise CheckpointError(text) from error

    def _publish(self, partial: Path, step: int) -> None:
        final = self.path_of(step)
        damaged = self._trash(final) if final.exists() else None
        os.rename(partial, final)
        fsync_folder(self.folder)
        if damaged is not None:
            self._remove(damaged)

    def _retain(self, new: int) -> None:
        """Delete the oldest complete checkpoints beyond `keep`. The new one stands, so a failure is only said.

        Steps above `new` are those that a resume passed over: they neither count nor push the new one out.
        """
        if self.keep is None:
            return
        for step in [step for step in self.complete_steps() if step <= new][: -self.keep]:
            try:
                trash = self._trash(self.path_of(step))
            except OSError as error:
                self._say(f"could not delete {self.path_of(step)}: {error}")
            else:
                self._remove(trash)

    def _trash(self, path: Path) -> Path:
        """Take the name away first: a folder that is half deleted must not look like a checkpoint."""
        trash = path.with_name(f".{path.name}.old-{os.getpid()}")
        os.rename(path, trash)
        return trash

    def _remove(self, path: Path) -> None:
        if not path.exists():
            return
        try:
            shutil.rmtree(path)
        except OSError as error:
            self._say(f"could not delete {path}: {error}; it is not counted as a checkpoint")

    def _shortage(self, estimate_bytes: int | None) -> str | None:
        if estimate_bytes is None:
            return None
        free = self._free(self.folder)
        if free >= estimate_bytes:
            return None
        return f"{format_bytes(estimate_bytes)} are needed, {format_bytes(free)} are free in {self.folder}"

    def _failure(self, step: int, cause: str) -> str:
        steps = self.complete_steps()
        kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no older checkpoint"
        free = "" if "are free" in cause else f"{format_bytes(self._free(self.folder))} are free; "
        return f"the checkpoint of step {step} was not written to {self.folder}: {cause} ({free}{kept}). {_REMEDY}"


_REMEDY = "Free some space, lower checkpoint.keep, or set run_root to a larger disk that you may write to."
