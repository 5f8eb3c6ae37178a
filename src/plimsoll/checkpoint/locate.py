"""What a path to a model means: a Hugging Face folder, a run (its newest complete checkpoint) or one checkpoint.

No torch here: the answer is part of checking a recipe.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from plimsoll.checkpoint.manifest import MANIFEST, why_incomplete
from plimsoll.checkpoint.store import CheckpointStore, Skipped
from plimsoll.errors import RefusedError, RunFolderError

CHECKPOINTS = "checkpoints"
"""Folder of a run that holds its checkpoints."""

MODEL = "model"
"""Folder of a checkpoint that holds the weights as a Hugging Face folder."""

_STEP_NAME = re.compile(r"step_(\d+)")


@dataclass(slots=True, kw_only=True, frozen=True)
class Located:
    """Where a model is."""

    model: Path  # a folder with config.json
    checkpoint: Path | None  # the checkpoint it belongs to; None: `path` was a Hugging Face folder
    step: int | None  # of that checkpoint
    skipped: tuple[Skipped, ...] = ()  # newer folders that are not complete


def locate_model(
    path: str | Path,
    *,
    setting: str = "",
    step: int | None = None,
    verify: bool = True,
) -> Located:
    """Resolve `path` to a Hugging Face folder.

    Args:
        setting: key that named the path (`model.path`), for messages.
        step: take this step of a run instead of its newest.
        verify: hash the files of a checkpoint (else: presence and size).

    Raises:
        RefusedError: nothing usable is there; says what is missing.
    """
    path = Path(path)
    label = f"{setting}: {path}" if setting else str(path)
    if not path.exists():
        raise RefusedError(f"{label} does not exist")
    if (path / CHECKPOINTS).is_dir():
        return _in_run(path, label, step, verify)
    if (path / MANIFEST).is_file() or _STEP_NAME.fullmatch(path.name):
        return _in_checkpoint(path, label, step, verify)
    if step is not None:
        raise RefusedError(f"{label} is not a run: it has no {CHECKPOINTS}/ to take step {step} from")
    if (path / "config.json").is_file():
        return Located(model=path, checkpoint=None, step=None)
    raise RefusedError(
        f"{label} is neither a Hugging Face folder (config.json is missing) nor a run ({CHECKPOINTS}/ is missing)"
    )


def _in_run(run: Path, label: str, step: int | None, verify: bool) -> Located:
    store = CheckpointStore(run / CHECKPOINTS, keep=None)
    if step is not None:
        if not store.path_of(step).is_dir():
            steps = ", ".join(str(step) for step in store.complete_steps()) or "none"
            raise RefusedError(f"{label} has no checkpoint of step {step}; complete ones: {steps}")
        return _in_checkpoint(store.path_of(step), label, step, verify)
    try:
        found = store.newest(verify)
    except RunFolderError as error:
        first, *others = error.causes
        raise RefusedError([f"{label}: {first}", *others]) from error
    return Located(
        model=_model_of(found.path),
        checkpoint=found.path,
        step=found.step,
        skipped=found.skipped,
    )


def _in_checkpoint(path: Path, label: str, step: int | None, verify: bool) -> Located:
    match = _STEP_NAME.fullmatch(path.name)
    if match is None:
        raise RefusedError(f"{label} looks like a checkpoint, but is not named step_N; give it its name back")
    own = int(match[1])
    if step is not None and step != own:
        raise RefusedError(f"{label} is the checkpoint of step {own}, not of step {step}")
    reason = why_incomplete(path, own, verify=verify)
    if reason is not None:
        raise RefusedError(f"{label} is not a complete checkpoint: {reason}")
    return Located(model=_model_of(path), checkpoint=path, step=own)


def _model_of(checkpoint: Path) -> Path:
    model = checkpoint / MODEL
    if not (model / "config.json").is_file():
        raise RefusedError(f"{checkpoint} holds no model: {MODEL}/config.json is missing")
    return model
