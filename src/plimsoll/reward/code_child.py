"""Runs in the sandbox, before and after a response's program; standard library only.

Standard input is one line of JSON (a Task). The last line of standard output is `TOKEN JSON` when everything was done.
"""

import json
import operator
import os
import random
import sys
from typing import Any, TypedDict

_PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
"""What sites where one fills in a function have imported already; answers written for them rely on it."""


class Task(TypedDict):
    """A program and what to do with it."""

    token: str
    program: str
    tests: str  # Python, run after the program in its namespace; "" with `function`
    function: str  # name of a function, or of a method of the class Solution; "" with `tests`
    arguments: list[Any]


def main() -> None:
    """Run the program, then its tests or its function. Whatever is raised ends it without the token.

    Program and tests share an interpreter, so what is here cannot be hidden from a program that looks for it; it only
    is not in the way of one that prints, exits or calls os._exit. So the task is read to its end and the descriptors
    moved away first, and nothing of this file is in the program's namespace.
    """
    task: Task = json.loads(sys.stdin.buffer.readline())
    answer = os.dup2(1, random.SystemRandom().randrange(64, 250), inheritable=False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    if task["function"]:
        exec(_PRELUDE, namespace)
    exec(compile(task["program"], "program.py", "exec"), namespace)
    value: Any = None
    if task["function"]:
        value = _json_value(_find(namespace, task["function"])(*task["arguments"]))
    else:
        exec(compile(task["tests"], "tests.py", "exec"), namespace)
    sys.stdout.flush()
    os.write(answer, f"\n{task['token']} {json.dumps(value)}\n".encode())
    os._exit(0)  # no wait for threads that it left running


def _find(namespace: dict[str, Any], name: str) -> Any:
    solution = namespace.get("Solution")
    if isinstance(solution, type) and name not in namespace:
        namespace = {name: operator.attrgetter(name)(solution())}
    return namespace[name]


def _json_value(value: Any) -> Any:
    """As JSON has it; sets are no answer, because they have no order."""
    return json.loads(json.dumps(value))


if __name__ == "__main__":
    main()
