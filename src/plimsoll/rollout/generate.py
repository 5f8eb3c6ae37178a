"""Pump an engine until a set of requests is finished."""

from collections.abc import Callable, Sequence

from plimsoll.types import Completion, Engine, Request, SampleId


class GenerationStopped(Exception):
    """Raised in the pumping thread when the caller asked to stop; the engine has been emptied."""


def generate(
    engine: Engine, requests: Sequence[Request], *, stop: Callable[[], bool] = lambda: False
) -> dict[SampleId, Completion]:
    """Completions by sample id, in the order of the requests (not in the order in which they finished).

    `stop` is asked before every step; when it says True, all requests are aborted and GenerationStopped is raised.
    """
    finished: dict[SampleId, Completion] = {}
    engine.add(requests)
    while not engine.idle:
        if stop():
            engine.abort()
            raise GenerationStopped
        for completion in engine.step():
            finished[completion.sample_id] = completion
    return {request.sample_id: finished[request.sample_id] for request in requests}
