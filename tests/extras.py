"""The extras of the distribution, and what a test of one says: `pytestmark = needs("math")`."""

import pytest

EXTRAS = {
    "tasks": "reasoning_gym",
    "math": "math_verify",
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "gguf": "gguf",
}
"""Extra → the module whose absence means that it is not installed."""


def needs(extra: str) -> pytest.MarkDecorator:
    """The test belongs to this extra: skipped where it is not installed, chosen by `pytest --extra NAME`."""
    assert extra in EXTRAS
    return pytest.mark.extra(extra)
