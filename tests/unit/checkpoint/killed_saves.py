"""Run by test_store_killed.py: kills a save with SIGKILL before each of its calls into the file system in turn.

Usage: python -m tests.unit.checkpoint.killed_saves FOLDER keep. Prints a JSON list, one object a kill.
"""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch

from plimsoll.checkpoint.saving import TrainingSaver
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.weights.file_layout import FileLayout, lay_out, whole
from plimsoll.weights.tensors import TensorFiles
from plimsoll.weights.write import ShardWriter, create_files
from tests.unit.checkpoint.states import training_state

PARTS = ("model", "optimizer")


def layouts(step: int, part: str) -> tuple[FileLayout, ...]:
    """Two files and an index, of tensors that say which step they are of."""
    return lay_out([whole(name, torch.full((8,), float(step))) for name in "ab"], stem=part, max_file_bytes=40)


def save(store: CheckpointStore, step: int) -> None:
    """As a run saves, with one thread: the calls come in the same order every time."""

    def prepare(folder: Path) -> ShardWriter:
        named: list[FileLayout] = []
        for part in PARTS:
            create_files(folder / part, layouts(step, part))
            named += [replace(layout, name=f"{part}/{layout.name}") for layout in layouts(step, part)]
        return ShardWriter(folder, named, threads=1)

    TrainingSaver(store).save(training_state(step=step), prepare, background=False)


def whole_of(path: Path, step: int) -> bool:
    """Whether every tensor is there and says this step."""
    found = [TensorFiles(sorted((path / part).glob("*.safetensors"))) for part in PARTS]
    return all(sorted(tensors) == ["a", "b"] for tensors in found) and all(
        bool((tensor == step).all()) for tensors in found for tensor in tensors.values()
    )


def save_and_die(folder: Path, keep: int, step: int, kill_at: int) -> None:
    """In a child: save, and be killed before call number `kill_at` that names something below `folder`."""
    calls = 0

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal calls
        touches = any(isinstance(part, str | Path) and str(folder) in str(part) for part in arguments)
        # rmtree deletes by names relative to an open folder, so its calls do not name `folder`.
        if event in ("os.remove", "os.rmdir") or (event.startswith(("os.", "open", "shutil.")) and touches):
            calls += 1
            if calls == kill_at:
                os.write(1, json.dumps([event, str(arguments[0])]).encode())
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    save(CheckpointStore(folder, keep=keep, say=lambda line: None), step)
    os._exit(0)


def outcome(folder: Path, keep: int, kill_at: int) -> dict[str, object] | None:
    """What is found after the kill, and after the next save; None: the save ended before the kill."""
    shutil.rmtree(folder, ignore_errors=True)
    store = CheckpointStore(folder, keep=keep, say=lambda line: None)
    for step in range(1, keep + 1):
        save(store, step)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        save_and_die(folder, keep, keep + 1, kill_at)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        killed_at = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        return None
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    found = store.newest()
    whole_found = whole_of(found.path, found.step)
    complete = store.complete_steps()
    again = store.holds(keep + 1)
    if not again:
        save(store, keep + 1)
    return {
        "killed_at": json.loads(killed_at),
        "found": found.step,
        "whole": whole_found,
        "complete": complete,
        "after": store.complete_steps(),
        "partial": [path.name for path in folder.iterdir() if ".tmp-" in path.name],
    }


if __name__ == "__main__":
    os.fsync = lambda fd: None  # a killed process loses nothing that it gave to the kernel; only power cuts do
    outcomes: list[dict[str, object]] = []
    while (result := outcome(Path(sys.argv[1]), int(sys.argv[2]), len(outcomes) + 1)) is not None:
        outcomes.append(result)
    print(json.dumps(outcomes))
