"""Where the rows of metrics.jsonl go besides: TensorBoard, Weights & Biases. A sink never ends a run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from plimsoll.config.observe import ObserveConfig


class Sink(Protocol):
    """One destination; built when the run starts, so that what is missing is told then."""

    name: str

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row. A step that is written again (after a resume) replaces the earlier one where the sink can."""
        ...

    def close(self, *, failed: bool) -> None:
        """Send what is left. `failed`: the run ends with an error."""
        ...


class Sinks:
    """All of a run. A sink that raises (disk full, no network) is named once and written no more; training goes on."""

    def __init__(self, sinks: Sequence[Sink], say: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._say = say

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row to every sink that still works."""
        for sink in tuple(self._sinks):
            try:
                sink.write(step, values)
            except Exception as error:
                self._sinks.remove(sink)
                self._say(
                    f"observe.{sink.name} failed at step {step} and gets no more rows, which metrics.jsonl all has "
                    f"({type(error).__name__}: {error})"
                )

    def close(self, *, failed: bool) -> None:
        """End every sink."""
        for sink in self._sinks:
            try:
                sink.close(failed=failed)
            except Exception as error:
                self._say(f"observe.{sink.name} did not end well ({type(error).__name__}: {error})")
        self._sinks.clear()


def open_sinks(
    config: ObserveConfig, run: Path, recipe: Mapping[str, Any], *, start_step: int, resumed: bool
) -> list[Sink]:
    """The sinks that the recipe asks for. The libraries are imported here, and only those in use.

    Args:
        run: the run folder; all files go below it.
        recipe: the resolved recipe as JSON values, recorded with the run.
        start_step: finished steps; rows of later ones are written again.
        resumed: go on with the sinks' own records instead of starting new ones.
    """
    sinks: list[Sink] = []
    if config.tensorboard:
        from plimsoll.observe.sinks.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(run / "tensorboard", recipe, start_step=start_step, resumed=resumed))
    if config.wandb != "off":
        from plimsoll.observe.sinks.wandb import WandbSink

        sinks.append(WandbSink(run, recipe, mode=config.wandb, project=config.wandb_project, name=str(recipe["name"])))
    return sinks
