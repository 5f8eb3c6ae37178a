"""Run by test_resume.py: a command of plimsoll that gets a signal at a named point of a step.

    python -m tests.e2e.killed_run POINT STEP SIGNAL -- train recipe.yaml …

One line on stdout, written before the signal is sent, says how many child processes there were: {"children": 3}.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import psutil

import plimsoll.checkpoint.store
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.cli import main
from plimsoll.memory.enter import Memory
from plimsoll.memory.phases import Phase
from plimsoll.memory.recorder import Recorder
from plimsoll.reward.pool import ScoringPool
from plimsoll.rollout.native import NativeEngine
from plimsoll.session import Session
from plimsoll.update.worker import PolicyWorker


@dataclass(slots=True, kw_only=True, frozen=True)
class Point:
    """Before call number `call` of `owner.name` in `phase` of the step."""

    owner: Any
    name: str
    phase: Phase | None  # None: outside every phase
    call: int = 1
    hang: bool = False  # the rewards of the step do not return


POINTS = {
    "load": Point(owner=PolicyWorker, name="__init__", phase=Phase.LOAD),
    "restore": Point(owner=PolicyWorker, name="load_state", phase=Phase.LOAD),
    "rollout": Point(owner=NativeEngine, name="step", phase=Phase.ROLLOUT, call=4),
    "reward": Point(owner=ScoringPool, name="_readable", phase=Phase.ROLLOUT, call=2, hang=True),
    # Two optimizer steps of at least two micro-batches are over or under way by then.
    "update": Point(owner=PolicyWorker, name="_policy_loss", phase=Phase.UPDATE, call=6),
    "evaluation": Point(owner=NativeEngine, name="step", phase=Phase.EVAL, call=3),
    "before save": Point(owner=Session, name="save", phase=None),
    "manifest": Point(owner=plimsoll.checkpoint.store, name="write_manifest", phase=Phase.SAVE),
    "retention": Point(owner=CheckpointStore, name="_retain", phase=Phase.SAVE),
}


@dataclass(slots=True)
class Position:
    """Where the run stands, and how often the point's function was called there."""

    step: int = -1
    phase: Phase | None = None
    calls: int = 0


def wrap(owner: Any, name: str, before: Callable[..., None]) -> None:
    """Call `before` with the arguments of `owner.name` before it."""
    original = vars(owner)[name]

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


def arm(point: Point, step: int, signum: signal.Signals) -> None:
    """Send the signal to this process when it comes to the point."""
    here = Position()

    def begin_step(memory: Memory, number: int) -> None:
        here.step, here.phase, here.calls = number, None, 0
        if point.hang and number == step:
            Path("hang").touch()  # see REWARD in workplace.py

    def enter(memory: Memory, phase: Phase) -> None:
        here.phase, here.calls = phase, 0

    def record(recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        here.phase = None

    def called(*args: Any, **kwargs: Any) -> None:
        if (here.step, here.phase) == (step, point.phase):
            here.calls += 1
            if here.calls == point.call:
                children = psutil.Process().children(recursive=True)
                os.write(1, json.dumps({"children": len(children)}).encode() + b"\n")
                os.kill(os.getpid(), signum)

    wrap(Memory, "begin_step", begin_step)
    wrap(Memory, "enter", enter)
    wrap(Recorder, "_record", record)
    wrap(point.owner, point.name, called)


if __name__ == "__main__":
    name, at, signal_name, _, *arguments = sys.argv[1:]
    arm(POINTS[name], int(at), signal.Signals[signal_name])
    sys.exit(main(arguments))
