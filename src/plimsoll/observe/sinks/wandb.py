"""Weights & Biases, online or into RUN/wandb."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import wandb

ID_FILE = "wandb_id"
"""In the run folder, so that a resumed run goes on as the same run there; --overwrite deletes it."""


class WandbSink:
    """Rows with `step` as the axis of every chart.

    wandb cannot take a row back: steps that a resumed run does again are in its history twice, the later one on top.
    """

    name = "wandb"

    def __init__(
        self, run: Path, recipe: Mapping[str, Any], *, mode: Literal["online", "offline"], project: str, name: str
    ) -> None:
        self._run: Any = wandb.init(
            project=project,
            name=name,
            id=run_id(run),
            resume="allow",
            mode=mode,
            dir=str(run),
            config=dict(recipe),
            # Nothing on the driver's stdout, which belongs to results, and no copy of what it prints.
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        """Wait until everything is sent."""
        self._run.finish(exit_code=int(failed))


def run_id(run: Path) -> str:
    """The id that this run folder has at wandb, made at the first call."""
    path = run / ID_FILE
    if not path.is_file():
        path.write_text(f"{secrets.token_hex(4)}\n", encoding="ascii")
    return path.read_text(encoding="ascii").strip()
