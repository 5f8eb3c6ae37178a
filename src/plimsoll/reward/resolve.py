"""The early check of `reward.function`, in a process that lives only for it.

The driver never imports a user's module: workers get the function's name and load it themselves (load.py).
"""

import time

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import RecipeError
from plimsoll.reward.load import BUILT_IN, check_form, load_function
from plimsoll.reward.process import WorkerProcess, start_limit
from plimsoll.reward.signature import Kind
from plimsoll.reward.worker import Ready, StartFailed


def check_function(config: RewardConfig) -> None:
    """Raise RecipeError unless `reward.function` can be imported, called and given `reward.options`.

    Imports the function's module in a child process, for at most 30 s or `reward.timeout`, whichever is longer.
    """
    function_kind(config)


def function_kind(config: RewardConfig) -> Kind:
    """Whose signature the function has. Raises as `check_function` does."""
    check_form(config.function)
    if config.function in BUILT_IN:
        return load_function(config.function, config.options).kind
    limit = start_limit(config.timeout)
    deadline = time.monotonic() + limit
    process = WorkerProcess(config.function, config.options, guard=None)
    message: object = None
    try:
        # A child that the module forked may hold the pipe open, so the end of the process is looked at as well.
        while message is None and time.monotonic() < deadline:
            gone = process.dead
            if process.connection.poll(0.0 if gone else 0.1):
                message = process.connection.recv()
            elif gone:
                break
    except EOFError:
        message = None
    finally:
        timed_out = not process.dead and time.monotonic() >= deadline
        ended = process.end()
    if isinstance(message, Ready):
        return message.kind
    if isinstance(message, StartFailed):
        raise RecipeError(message.reasons)
    if timed_out:
        raise RecipeError(
            f"reward.function: importing {config.function} took more than {limit:g} s; "
            "a longer reward.timeout allows it."
        )
    raise RecipeError(f"reward.function: the process that imported {config.function} ended with {ended}.")
