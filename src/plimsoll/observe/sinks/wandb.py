"""Weights & Biases, online or into RUN/wandb."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import wandb

from plimsoll.jsonl import write_atomic

ID_FILE = "wandb_id"
"""In the run folder, so that a resumed run goes on as the same run there; --overwrite deletes it."""

UPLOAD_LIMIT = 300.0
"""Seconds at the end of a run for what is not sent yet: without a limit, a lost network would keep the run for ever."""


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
            settings=wandb.Settings(
                silent=True,  # the driver's stdout belongs to results
                console="off",  # and wandb gets no copy of what is printed
                finish_timeout=UPLOAD_LIMIT,
                finish_timeout_raises=True,
            ),
        )
        self._folder = Path(self._run.dir).parent
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        """Wait until everything is sent. TimeoutError: it was not; `wandb sync FOLDER` sends it later."""
        try:
            self._run.finish(exit_code=int(failed))
        except TimeoutError as error:
            raise TimeoutError(
                f"not everything was sent in {UPLOAD_LIMIT:g} s; `wandb sync {self._folder}` sends it"
            ) from error
        finally:
            wandb.teardown(exit_code=int(failed))  # its own process, which would stay as long as this one


def run_id(run: Path) -> str:
    """The id that this run folder has at wandb, made at the first call."""
    path = run / ID_FILE
    if not path.is_file():
        write_atomic(path, f"{secrets.token_hex(4)}\n".encode("ascii"))
    return path.read_text(encoding="ascii").strip()
