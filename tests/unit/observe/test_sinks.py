"""Sinks: a fault of theirs never ends a run."""

from collections.abc import Mapping

from plimsoll.observe.sinks import Sinks


class Recorder:
    """A sink that keeps what it gets and can be told to fail."""

    def __init__(self, name: str, *, fails_at: int | None = None, fails_to_close: bool = False) -> None:
        self.name = name
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed: list[bool] = []
        self._fails_at = fails_at
        self._fails_to_close = fails_to_close

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the row."""
        if step == self._fails_at:
            raise OSError("no space left")
        self.rows.append((step, dict(values)))

    def close(self, *, failed: bool) -> None:
        """Keep how it ended."""
        self.closed.append(failed)
        if self._fails_to_close:
            raise ConnectionError("gone")


def test_a_sink_that_fails_is_named_once_and_the_others_go_on() -> None:
    said: list[str] = []
    broken, healthy = Recorder("wandb", fails_at=2), Recorder("tensorboard")
    sinks = Sinks([broken, healthy], said.append)
    for step in (1, 2, 3):
        sinks.write(step, {"loss": float(step)})
    sinks.close(failed=False)
    assert [step for step, _ in broken.rows] == [1]
    assert broken.closed == []
    assert healthy.rows == [(1, {"loss": 1.0}), (2, {"loss": 2.0}), (3, {"loss": 3.0})]
    assert healthy.closed == [False]
    assert len(said) == 1
    assert "observe.wandb" in said[0]
    assert "no space left" in said[0]


def test_a_sink_that_cannot_be_closed_does_not_keep_the_others_open() -> None:
    said: list[str] = []
    broken, healthy = Recorder("wandb", fails_to_close=True), Recorder("tensorboard")
    sinks = Sinks([broken, healthy], said.append)
    sinks.close(failed=True)
    sinks.close(failed=True)  # again: nothing
    assert (broken.closed, healthy.closed) == ([True], [True])
    assert len(said) == 1
