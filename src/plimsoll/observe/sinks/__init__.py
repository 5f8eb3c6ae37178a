"""Where the rows of metrics.jsonl go besides: TensorBoard, Weights & Biases. A sink never ends a run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from plimsoll.config.observe import ObserveConfig
from plimsoll.errors import RecipeError


class Sink(Protocol):
    """One destination; built when the run starts, so that what is missing is told then."""

    name: str

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row. A step that is written again (after a resume) replaces the earlier one where the sink can."""
        ...

    def close(self, *, failed: bool) -> None:
        """Send what is left. `failed`: the run ends with an error or an interrupt."""
        ...


class Sinks:
    """All of a run. A sink that raises (disk full, no network) is named once and written no more; training goes on."""

    def __init__(self, sinks: Sequence[Sink], say: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._broken: list[Sink] = []
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
                self._broken.append(sink)
                self._say(
                    f"observe.{sink.name} failed at step {step} ({_describe(error)}) and gets no more rows; "
                    "metrics.jsonl has them all"
                )

    def close(self, *, failed: bool) -> None:
        """End every sink; one that failed before may fail again, in silence."""
        for sink in self._sinks:
            try:
                sink.close(failed=failed)
            except Exception as error:
                self._say(f"observe.{sink.name} did not end well ({_describe(error)})")
        for sink in self._broken:
            with suppress(Exception):
                sink.close(failed=failed)
        self._sinks.clear()
        self._broken.clear()


def open_sinks(
    config: ObserveConfig, run: Path, recipe: Mapping[str, Any], *, start_step: int, resumed: bool
) -> list[Sink]:
    """The sinks that the recipe asks for. The libraries are imported here, and only those in use.

    Args:
        run: the run folder; all files go below it.
        recipe: the resolved recipe as JSON values, recorded with the run.
        start_step: finished steps; rows of later ones are written again.
        resumed: go on with the sinks' own records instead of starting new ones.

    RecipeError: one cannot start (no login, no network, a folder that cannot be written). The others are closed.
    """
    wanted: list[tuple[Callable[[], Sink], str, str]] = []
    if config.tensorboard:

        def tensorboard() -> Sink:
            from plimsoll.observe.sinks.tensorboard import TensorBoardSink

            return TensorBoardSink(run / "tensorboard", recipe, start_step=start_step, resumed=resumed)

        wanted.append((tensorboard, "observe.tensorboard=true", "set `observe.tensorboard=false` to go without"))
    mode = config.wandb
    if mode != "off":

        def wandb() -> Sink:
            from plimsoll.observe.sinks.wandb import WandbSink

            return WandbSink(run, recipe, mode=mode, project=config.wandb_project, name=str(recipe["name"]))

        advice = "set `observe.wandb=offline` to keep everything in the run folder, or `observe.wandb=off`"
        wanted.append((wandb, f"observe.wandb={mode}", advice if mode == "online" else "set `observe.wandb=off`"))
    with ExitStack() as opened:
        sinks = [_open(opened, *entry) for entry in wanted]
        opened.pop_all()  # all are open: none is closed here
    return sinks


def _open(opened: ExitStack, build: Callable[[], Sink], setting: str, advice: str) -> Sink:
    try:
        sink = build()
    except Exception as error:  # the libraries raise whatever their network and file layers do
        raise RecipeError(f"`{setting}` could not start ({_describe(error)}); {advice}") from error
    opened.callback(sink.close, failed=True)
    return sink


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
