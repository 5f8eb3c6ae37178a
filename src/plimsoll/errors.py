"""Errors that a user sees. Each says the fact, the reason and the setting to change.

PlimsollError
 ├── RefusedError        exit code 2: recipe, data or plan refused before anything heavy started
 │    ├── RecipeError    one or more problems in the recipe, all of them at once
 │    ├── DataError      rows that cannot be used, a dataset that cannot fill a batch
 │    └── RunFolderError a run folder in use, nothing to resume from
 └── RunError            exit code 1: failed while running
      ├── RewardError    the reward function failed too often or returned something that is not a reward
      ├── SamplingError  dynamic sampling could not fill the batch
      ├── PlanError      a phase that the memory plan did not foresee, or one that would read stale weights
      └── CheckpointError a checkpoint could not be written or is not complete

`assert` is for our own mistakes only.
"""

from collections.abc import Sequence


class PlimsollError(Exception):
    """Base of every error that is meant for the user."""

    exit_code = 1


class RefusedError(PlimsollError):
    """Refused before anything heavy started; `causes` are printed one a line."""

    exit_code = 2

    def __init__(self, causes: str | Sequence[str]) -> None:
        self.causes: tuple[str, ...] = (causes,) if isinstance(causes, str) else tuple(causes)
        super().__init__("\n".join(self.causes))


class RecipeError(RefusedError):
    """The recipe is wrong; every problem is in `causes`, each naming a key that exists in the schema."""


class DataError(RefusedError):
    """The data cannot be used as the recipe asks."""


class RunFolderError(RefusedError):
    """The run folder is in use, or there is nothing to resume from."""


class RunError(PlimsollError):
    """Failed while running."""


class RewardError(RunError):
    """The reward function failed more often than `reward.max_error_share` allows, or broke its contract."""


class SamplingError(RunError):
    """Dynamic sampling did not fill the batch within `algorithm.dynamic_max_rounds`."""


class PlanError(RunError):
    """A phase was entered that the memory plan did not foresee, or that would read weights of another version."""


class CheckpointError(RunError):
    """A checkpoint could not be written, or one that was named is not complete."""
