"""A process that scores: loads the reward function, then answers lists of requests until its pipe is closed.

    driver → worker   list[ScoreRequest]
    worker → driver   Ready | StartFailed, once; then for every list: [] (begun), and list[Outcome] for each next part
                      of it, in order, or BrokenContract

The function runs on the main thread, so functions that use signals (SIGALRM) work.
"""

import ctypes
import io
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from plimsoll.errors import RecipeError
from plimsoll.reward.call import BrokenContractError, outcomes
from plimsoll.reward.load import load_function
from plimsoll.reward.signature import Kind
from plimsoll.types import ScoreRequest

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True, kw_only=True, frozen=True)
class Ready:
    """The function is loaded."""

    kind: Kind


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
    """Entry of the process. argv[1] is a JSON object: `descriptor`, `function`, `options`."""
    start = json.loads(sys.argv[1])
    connection: Connection[Any, Any] = Connection(start["descriptor"])
    _settle()
    try:
        function = load_function(start["function"], start["options"])
    except RecipeError as error:
        connection.send(StartFailed(reasons=error.causes, traceback="".join(traceback.format_exception(error))))
        return
    _disarm()
    connection.send(Ready(kind=function.kind))
    own_pid = os.getpid()
    while True:
        try:
            requests: list[ScoreRequest] = connection.recv()
        except EOFError:
            # No orderly exit: it would wait for threads that the function left running.
            os._exit(0)
        connection.send([])
        try:
            for part in outcomes(function, requests):
                if os.getpid() != own_pid:
                    os._exit(1)  # a child that the function forked came back out of it; the answer is its parent's
                _disarm()
                connection.send(part)
        except BrokenContractError as error:
            connection.send(BrokenContract(reason=str(error)))


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
