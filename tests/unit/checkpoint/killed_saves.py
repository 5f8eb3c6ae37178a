"""Run by test_store_killed.py: kills a save with SIGKILL before each of its calls into the file system in turn.

Usage: python -m tests.unit.checkpoint.killed_saves FOLDER keep. Prints a JSON list, one object a kill.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from plimsoll.checkpoint.store import CheckpointStore

FILES = ("state.json", "model/weights.bin", "optimizer.bin")


def write(folder: Path, step: int) -> None:
    """Three files that say which step they are of."""
    (folder / "model").mkdir()
    for name in FILES:
        (folder / name).write_text(f"{name} of step {step}")


def save_and_die(folder: Path, keep: int, step: int, kill_at: int) -> None:
    """In a child: save, and be killed before call number `kill_at` that names something below `folder`."""
    calls = 0

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal calls
        touches = any(isinstance(part, str | os.PathLike) and str(folder) in str(part) for part in arguments)
        # rmtree deletes by names relative to an open folder, so its calls do not name `folder`.
        if event in ("os.remove", "os.rmdir") or (event.startswith(("os.", "open", "shutil.")) and touches):
            calls += 1
            if calls == kill_at:
                os.write(1, json.dumps([event, str(arguments[0])]).encode())
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    CheckpointStore(folder, keep=keep, say=lambda line: None).save(step, lambda partial: write(partial, step))
    os._exit(0)


def outcome(folder: Path, keep: int, kill_at: int) -> dict[str, object] | None:
    """What is found after the kill, and after the next save; None: the save ended before the kill."""
    shutil.rmtree(folder, ignore_errors=True)
    store = CheckpointStore(folder, keep=keep, say=lambda line: None)
    for step in range(1, keep + 1):
        store.save(step, lambda partial, step=step: write(partial, step))
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
    texts = [(found.path / name).read_text() == f"{name} of step {found.step}" for name in FILES]
    complete = store.complete_steps()
    again = store.holds(keep + 1)
    if not again:
        store.save(keep + 1, lambda partial: write(partial, keep + 1))
    return {
        "killed_at": json.loads(killed_at),
        "found": found.step,
        "whole": all(texts),
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
