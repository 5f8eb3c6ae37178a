"""One worker in this process: what a debugger likes best."""

from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")


class InlineGroup(Generic[W]):
    """A group of one worker. `map` has the shape that the groups of several processes have."""

    def __init__(self, worker: W) -> None:
        self.worker = worker

    def map(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `method` on every worker, in rank order; one result a rank."""
        return [method(self.worker, *args, **kwargs)]
