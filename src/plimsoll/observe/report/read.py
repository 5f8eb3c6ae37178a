"""A run folder → what the page shows of it."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue, ValidationError

from plimsoll.config.planned import MemoryPlan
from plimsoll.errors import RunFolderError
from plimsoll.observe.report.curves import read_metrics
from plimsoll.observe.report.data import RunReport, Track
from plimsoll.observe.report.lines import whole
from plimsoll.observe.report.samples import MAX_SAMPLES, read_rollouts
from plimsoll.observe.report.tracks import read_ledger


def read_run(path: Path, *, num_runs: int = 1, ended: bool = False) -> RunReport:
    """Read the folder as it is now, also while its run goes on.

    A folder needs no recipe if it has memory.jsonl, as a loop of somebody else's writes it; where nothing else of a run
    is there, it is a ledger alone.
    `num_runs` share the room for rollouts; `ended` says that the run is at its end though it still holds the folder.
    Raises RunFolderError when `path` is no run folder, or when there is nothing to show yet.
    """
    recipe = _recipe(path)
    notes: list[str] = []
    metrics = read_metrics(path / "metrics.jsonl", notes)
    ledger = read_ledger(path / "memory.jsonl", notes)
    rollouts = read_rollouts(path / "rollouts", notes, MAX_SAMPLES // num_runs)
    plan = _json(path / "plan.json")
    alone = bool(ledger) and not metrics.num_rows and not rollouts and not plan
    running = not ended and in_use(path)
    if not metrics.num_rows and not ledger and not rollouts:
        wait = "its first step is not done yet: try again in a while" if running else "no run got as far as a row here"
        raise RunFolderError(f"{path} has nothing to show: metrics.jsonl and memory.jsonl hold no rows; {wait}.")
    if not metrics.num_rows and not alone:
        notes.append("metrics.jsonl has no rows: the run has done no step yet, so there are no curves.")
    if not ledger:
        notes.append("memory.jsonl is missing or has no rows, so the memory ledger cannot be shown.")
    planned = whole(plan.get("steps"))
    last_step = max([metrics.last_step, *(step for track in ledger if alone for step in track.steps[-1:])])
    done = planned is not None and metrics.last_step >= planned
    return RunReport(
        kind="ledger" if alone else "run",
        name=str(recipe.get("name", path.resolve().name)),
        path=str(path),
        model=_model(_section(recipe, "model")),
        algorithm=str(_section(recipe, "algorithm").get("name") or "unknown"),
        device=_device(plan, ledger),
        state="finished" if done else "running" if running else "stopped",
        steps_done=last_step,
        steps_planned=planned,
        num_rows=metrics.num_rows,
        last_row_at=_changed_at(path / ("memory.jsonl" if alone else "metrics.jsonl")),
        recipe={key: json.dumps(value, ensure_ascii=False) for key, value in _leaves(recipe).items()},
        curves=metrics.curves,
        times=metrics.times,
        ledger=ledger,
        plan=_memory_plan(plan, notes),
        rollouts=rollouts,
        notes=notes,
    )


def in_use(path: Path) -> bool:
    """Whether a process holds the run folder. A shared lock is tried and let go at once; nothing is written."""
    try:
        lock = os.open(path / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)


def _device(plan: dict[str, Any], ledger: list[Track]) -> str:
    """What the plan says; without a plan, what the ledger was written on."""
    if "device" in plan or not ledger:
        return str(plan.get("device", "unknown"))
    return ledger[0].device.partition(":")[0]


def _memory_plan(plan: dict[str, Any], notes: list[str]) -> dict[str, JsonValue] | None:
    """The memory plan of the run; None when it has none, or (with a note) one that cannot be read."""
    found = plan.get("memory")
    if found is None:
        return None
    try:
        return dict(MemoryPlan.model_validate(found).as_json())
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        notes.append(
            f"plan.json: the memory plan cannot be read (at {where}), so it is not shown; another version wrote it."
        )
        return None


def _recipe(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise RunFolderError(f"{path} is not a folder: name the run folder, for example runs/NAME.")
    if not (path / "recipe.json").is_file():
        if (path / "memory.jsonl").is_file():
            return {}
        raise RunFolderError(
            f"{path} is not a run folder: it has no recipe.json, and no memory.jsonl either. Name "
            f"the folder of one run, for example runs/NAME."
        )
    recipe = _json(path / "recipe.json")
    if not recipe:
        raise RunFolderError(f"{path / 'recipe.json'} is not readable as a recipe, so this is no run folder of ours.")
    return recipe


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty when there is none, which for plan.json means that no plan was made yet."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _section(recipe: dict[str, Any], name: str) -> dict[str, Any]:
    section = recipe.get(name)
    return cast("dict[str, Any]", section) if isinstance(section, dict) else {}


def _model(model: dict[str, Any]) -> str:
    if model.get("path") or not model.get("config"):
        return str(model.get("path") or "unknown")
    return f"{model['config']} ({model.get('init')})"


def _leaves(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict) and value:
            leaves.update(_leaves(cast("dict[str, Any]", value), f"{prefix}{key}."))
        else:
            leaves[prefix + key] = value
    return leaves


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
