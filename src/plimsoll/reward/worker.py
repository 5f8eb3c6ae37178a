"""A process that scores: loads the reward's functions, then answers lists of requests until its pipe is closed.

    driver → worker   RewardSpec, once; then list[ScoreRequest]
    worker → driver   Ready | StartFailed, once; then for every list: Loading where its rows need a function that was
                      not needed before, [] (begun), and list[Outcome] for each next part of it, in order;
                      StartFailed or BrokenContract end it

The spec comes through the pipe and not as an argument: options may be longer than an argument of a process may be.

The function runs on the main thread, so functions that use signals (SIGALRM) work.
"""

import ctypes
import io
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from plimsoll.errors import RecipeError
from plimsoll.reward.call import BrokenContractError
from plimsoll.reward.compose import Reward, RewardSpec, load_reward
from plimsoll.reward.signature import Kind
from plimsoll.types import ScoreRequest

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True, kw_only=True, frozen=True)
class Ready:
    """The functions are loaded."""

    kind: Kind
    needs_answer: bool  # of rows


@dataclass(slots=True, kw_only=True, frozen=True)
class Loading:
    """A further function is imported now, which may take as long as a start."""


@dataclass(slots=True, kw_only=True, frozen=True)
class StartFailed:
    """The function cannot be used."""

    reasons: tuple[str, ...]
    traceback: str


@dataclass(slots=True, kw_only=True, frozen=True)
class BrokenContract:
    """The function returned what it never may."""

    reason: str


def main() -> None:
    """Entry of the process. argv[1] is the descriptor of its pipe."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    _settle()
    try:
        spec: RewardSpec = connection.recv()
    except EOFError:
        return
    try:
        reward = load_reward(spec)
    except RecipeError as error:
        connection.send(_failed(error))
        return
    _disarm()
    connection.send(Ready(kind=reward.kind, needs_answer=reward.needs_answer))
    while True:
        try:
            requests: list[ScoreRequest] = connection.recv()
        except EOFError:
            # No orderly exit: it would wait for threads that the function left running.
            os._exit(0)
        try:
            _answer(connection, reward, requests)
        except BrokenContractError as error:
            connection.send(BrokenContract(reason=str(error)))
        except RecipeError as error:
            connection.send(_failed(error))


def _answer(connection: "Connection[Any, Any]", reward: Reward, requests: list[ScoreRequest]) -> None:
    own_pid = os.getpid()
    missing = reward.missing(requests)
    if missing:
        connection.send(Loading())
        reward.load(missing)
        _disarm()
    connection.send([])
    for part in reward.score(requests, after_call=_disarm):
        if os.getpid() != own_pid:
            os._exit(1)  # a child that the function forked came back out of it; the answer is its parent's
        connection.send(part)


def _failed(error: RecipeError) -> StartFailed:
    return StartFailed(reasons=error.causes, traceback="".join(traceback.format_exception(error)))


def _settle() -> None:
    """Make this process one that others can end, and that signals meant for the driver do not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGUSR1):
        # Not SIG_IGN, which children would inherit: a function may want to interrupt a program that it runs.
        signal.signal(number, _ignore)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what was printed before a kill is not lost


def _ignore(number: int, frame: object) -> None:
    """A signal handler that does nothing."""


def _disarm() -> None:
    """Take back an alarm that the function left pending: it would go off in somebody else's response."""
    signal.setitimer(signal.ITIMER_REAL, 0.0)
