"""The run folder: who may use it, what is in it, and whether a recipe may go on in it. No torch."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from plimsoll.config.recipe import Recipe
from plimsoll.errors import RunFolderError
from plimsoll.jsonl import write_json

_LOCK = ".lock"
_RECIPE = "recipe.json"
PLAN = "plan.json"
TOKENIZER = "tokenizer"
_LEFTOVERS = {_LOCK, f"{_RECIPE}.tmp"}
_SUBFOLDERS = {"rollouts", "checkpoints"}
# Sections of every recipe that this package has written: a recipe.json without them is somebody else's.
_MARKS = ("name", "model", "data", "algorithm", "train")

# Keys, and sections with a dot at the end, that may change when a run is resumed: they say how long it goes on, what
# it saves and shows, where its state lies, and how much it bears, and leave what the next step computes as it is.
CHANGEABLE = (
    "run_root",
    "model.reference_placement",
    "train.steps",
    "train.epochs",
    "train.eval_every",
    "train.eval_at_ends",
    "train.optimizer_state",
    "data.eval",
    "data.max_eval_rows",
    "rollout.eval.",
    "reward.workers",
    "reward.timeout",
    "reward.max_error_share",
    "algorithm.dynamic_max_rounds",
    "checkpoint.",
    "memory.",
    "observe.",
    "cluster.max_restarts",
    "cluster.min_ranks",
    "cluster.stall_timeout",
)


class RunFolder:
    """RUN_ROOT/NAME, held by this process until `close`. Made by `prepare`."""

    def __init__(self, path: Path, lock: int, *, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        self.recipe = path / _RECIPE
        self.plan = path / PLAN
        self.metrics = path / "metrics.jsonl"
        self.memory = path / "memory.jsonl"
        self.tokenizer = path / TOKENIZER
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self._lock = lock

    @classmethod
    def prepare(cls, run_root: Path, name: str, *, resume: bool, overwrite: bool) -> "RunFolder":
        """Take the folder: a new one, the one to resume, or an emptied one. Raises RunFolderError, changing nothing."""
        cls.check(run_root, name, resume=resume, overwrite=overwrite)
        path = run_root / name
        try:
            return cls._prepare(path, resume=resume, overwrite=overwrite)
        except OSError as error:
            raise _unusable(path, error) from error

    @staticmethod
    def check(run_root: Path, name: str, *, resume: bool, overwrite: bool) -> None:
        """Raise the RunFolderError that `prepare` would raise for what the folder holds; nothing is made or locked."""
        if resume and overwrite:
            raise RunFolderError("--resume and --overwrite exclude each other: go on with the run, or delete it.")
        path = run_root / name
        try:
            # The holder of a lock may be emptying the folder: what it holds says nothing then, and `prepare` will tell.
            if not _is_locked(path):
                _check(path, resume=resume, overwrite=overwrite)
        except OSError as error:
            raise _unusable(path, error) from error

    @classmethod
    def _prepare(cls, path: Path, *, resume: bool, overwrite: bool) -> "RunFolder":
        path.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path)
        try:
            # Again: only now can no other process change it any more.
            _check(path, resume=resume, overwrite=overwrite)
            if overwrite:
                _empty(path)
            folder = cls(path, lock, resumed=resume)
            folder.rollouts.mkdir(exist_ok=True)
            folder.checkpoints.mkdir(exist_ok=True)
        except BaseException:
            os.close(lock)
            raise
        return folder

    @staticmethod
    def check_resumable(recipe: Recipe) -> None:
        """RunFolderError unless the recipe goes on with the run that is in its folder. Touches nothing."""
        path = Path(recipe.run_root) / recipe.name
        causes = changed_keys(read_recipe(path / _RECIPE), recipe)
        if causes:
            advice = (
                f"Leave these as they were, or start a new run from this one's weights: name=OTHER model.path={path}"
            )
            if not any((path / "checkpoints").glob("step_*")):
                advice = "It has no checkpoint to go on from: leave these as they were, or start again with --overwrite"
            raise RunFolderError([f"{path} cannot be resumed: {cause}" for cause in causes] + [advice])

    def record_recipe(self, recipe: Recipe) -> None:
        """Write recipe.json; on resume checked again, now that no other process can change the folder."""
        if self.resumed:
            self.check_resumable(recipe)
        write_json(self.recipe, recipe.model_dump(mode="json"))

    def close(self) -> None:
        """Let the folder go; calling it again does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_recipe(path: Path) -> Recipe:
    """The recipe of a run, from its recipe.json. Raises RunFolderError when there is none or it cannot be used."""
    try:
        return Recipe.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise RunFolderError(f"{path.parent} is not a run folder: it has no {_RECIPE}.") from error
    except ValidationError as error:
        keys = ", ".join(".".join(str(part) for part in item["loc"]) for item in error.errors())
        raise RunFolderError(
            f"{path} was written by a version with other settings and cannot be used by this one ({keys})."
        ) from error


def changed_keys(saved: Recipe, given: Recipe) -> list[str]:
    """A text for every key that differs and would change what the next step computes, sorted by key."""
    old, new = _leaves(saved.model_dump(mode="json")), _leaves(given.model_dump(mode="json"))
    return [
        f"{key} was {json.dumps(old.get(key))} and is now {json.dumps(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not may_change(key)
    ]


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value of the key."""
    return any(key.startswith(entry) if entry.endswith(".") else key == entry for entry in CHANGEABLE)


def _leaves(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict):
            leaves.update(_leaves(cast("dict[str, Any]", value), f"{prefix}{key}."))
        else:
            leaves[prefix + key] = value
    return leaves


def _check(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise RunFolderError unless the folder, as it is now, may be used in this way."""
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is not a folder. Choose another name with name=.")
    held = _holds(path) if path.exists() else set[str]()
    if resume:
        if _RECIPE not in held:
            raise RunFolderError(
                f"--resume: there is no run in {path}. Start it without --resume, or say which run with name= and "
                f"run_root=."
            )
    elif held and not overwrite:
        raise RunFolderError(
            f"The run folder {path} is not empty. Go on with its run (--resume), delete it and start again "
            f"(--overwrite), or choose another name (name=OTHER)."
        )
    elif held and not _is_ours(path / _RECIPE):
        raise RunFolderError(
            f"--overwrite: {path} holds files but no {_RECIPE} of a run, so it is not deleted. Empty it yourself, or "
            f"choose another name (name=OTHER)."
        )


def _holds(path: Path) -> set[str]:
    """Names in the folder, without what a process leaves that ended before it had written its recipe."""
    return {
        entry.name
        for entry in path.iterdir()
        if entry.name not in _LEFTOVERS
        and not (entry.name in _SUBFOLDERS and entry.is_dir() and not any(entry.iterdir()))
    }


def _is_ours(recipe: Path) -> bool:
    try:
        content: Any = json.loads(recipe.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and all(mark in content for mark in _MARKS)


def _empty(path: Path) -> None:
    """Delete all but the lock; recipe.json goes last, so that a deletion cut short can be repeated."""
    entries = sorted(path.iterdir(), key=lambda entry: entry.name == _RECIPE)
    for entry in entries:
        if entry.name == _LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _unusable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(f"The run folder {path} cannot be used ({error}). Choose another place with run_root=.")


def _take_lock(path: Path) -> int:
    """The open lock file, which is locked until it is closed or the process dies. The number in it is for messages."""
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if not _try_lock(lock):
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        os.close(lock)
        raise RunFolderError(
            f"The run folder {path} is in use by process {holder or 'unknown'}. Wait for it, end it, or choose another "
            f"name (name=OTHER)."
        )
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode("ascii"), 0)
    return lock


def _is_locked(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return not _try_lock(lock)
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
