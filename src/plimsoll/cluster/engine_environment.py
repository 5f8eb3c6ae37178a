"""Variables that an engine in this process wants to see, to be set before it is imported. Imports no engine."""

import os
from collections.abc import Mapping

_VLLM = {
    # Its engine runs in a process of its own otherwise, and the trainer's memory would not be its memory.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Nothing is sent to its makers.
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer's sampler compiles at the first call and returns no log-probs after truncation; torch's does.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Its log lines go through a handler of its own, past the run's console.
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Ours has results only.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}


def engine_environment(engine: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables to set for `rollout.engine`; what the user has set stays, but for what the run cannot do without.

    `env` is what the process has (None: the environment of this process); it is left as it is.
    """
    if engine != "vllm":
        return {}
    given = os.environ if env is None else env
    return {name: value for name, value in _VLLM.items() if name not in given or name in _REQUIRED}


_REQUIRED = {"VLLM_ENABLE_V1_MULTIPROCESSING"}
