"""The ledger for runs of `transformers.Trainer`, and of the trainers of TRL, which are its children.

    from plimsoll.memory.callback import MemoryCallback

    callback = MemoryCallback("runs/mine")   # before the model is loaded
    trainer = Trainer(..., callbacks=[callback])
    with callback.watch():                   # so that an out-of-memory leaves its table
        trainer.train()

`plimsoll report runs/mine` shows it. Phases of a step: `update/gradients`, `update/step`; `rollout` where the model
generates within a step; `eval`, `save`, and `between` for the rest between two steps.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationMixin,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from plimsoll.jsonl import JsonlWriter
from plimsoll.memory.host import HostReader
from plimsoll.memory.standalone import MemoryLedger

LOAD, GRADIENTS, STEP, ROLLOUT, EVAL = "load", "update/gradients", "update/step", "rollout", "eval"
SAVE, BETWEEN = "save", "between"


class MemoryCallback(TrainerCallback):
    """Records a Trainer's run in a folder: memory.jsonl for each rank, metrics.jsonl and recipe.json for rank 0."""

    def __init__(self, folder: str | Path, *, interval: float = 0.02) -> None:
        """`interval`: seconds between two readings of host memory. Growth of host memory is counted from here."""
        self._folder = Path(folder)
        self._interval = interval
        host = HostReader()
        self._host_start = host.anonymous()
        host.close()
        self._ledger: MemoryLedger | None = None
        self._metrics: JsonlWriter | None = None
        self._logged: dict[str, float] = {}
        self._logged_step = 0
        self._open = ExitStack()  # the phase that goes on
        self._name: str | None = None
        self._restore = ExitStack()  # the model's own `generate`

    @contextmanager
    def watch(self) -> Generator[None]:
        """Around `trainer.train()`: an exception is recorded as the end of its phase, with the table when it is about
        memory, and the files are closed."""
        try:
            yield
        except BaseException as error:
            opened, self._open, self._name = self._open, ExitStack(), None
            opened.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            self._close()

    def recorded(self, call: Callable[..., Any], phase: str = ROLLOUT) -> Callable[..., Any]:
        """`call`, recorded as a phase of its own wherever it happens among the gradients of a step.

        The model's own `generate` is recorded without asking. For what else generates:
        `trainer.llm.generate = callback.recorded(trainer.llm.generate)`.
        """

        @wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            outer = self._name
            if outer != GRADIENTS:  # an evaluation, or no training goes on
                return call(*args, **kwargs)
            self._begin(phase)
            result = call(*args, **kwargs)
            self._begin(outer)
            return result

        return wrapper

    # ── what the Trainer tells ──────────────────────────────────────────────────────────────────────────────────────

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The trainer has its model."""
        self._start(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Model and optimizer are there."""
        ledger = self._start(args)
        model: object = kwargs.get("model")
        optimizer: object = kwargs.get("optimizer")
        name = ""
        if isinstance(model, torch.nn.Module):
            ledger.track("parameters", model.parameters)
            ledger.track("gradients", lambda: _gradients(model))
        if isinstance(model, PreTrainedModel):
            name = model.name_or_path or model.config.__class__.__name__
        if isinstance(model, GenerationMixin):
            generator = cast("Any", model)
            own = vars(model).get("generate")  # set by somebody who wraps it too
            generator.generate = self.recorded(generator.generate)
            if own is None:
                self._restore.callback(delattr, model, "generate")
            else:
                self._restore.callback(setattr, model, "generate", own)
        if isinstance(optimizer, torch.optim.Optimizer):
            ledger.track("optimizer_state", lambda: _state(optimizer))
        if self._metrics is not None:
            ledger.describe(self._folder.name, model=name, algorithm="Trainer")
        ledger.step(state.global_step)
        self._begin(BETWEEN)
        ledger.recorder.take_baseline()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forward and backward passes follow."""
        self._end()
        self._start(args).step(state.global_step + 1)
        self._begin(GRADIENTS)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The optimizer follows."""
        self._begin(STEP)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logging, an evaluation, a save and the next rows follow."""
        self._begin(BETWEEN)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The first one is the first that is heard of an evaluation: a batch of it is over."""
        if self._name == BETWEEN:
            self._rename(EVAL)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An evaluation is over."""
        if self._name in (EVAL, BETWEEN):
            self._rename(EVAL)
            self._begin(BETWEEN)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A save is over; nobody has said that it began."""
        if self._name == BETWEEN:
            self._rename(SAVE)
            self._begin(BETWEEN)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Numbers for metrics.jsonl: one row a step, whatever the number of logs that it has."""
        if self._metrics is None:
            return
        if state.global_step != self._logged_step:
            self._write_metrics()
            self._logged_step = state.global_step
        numbers = {key: float(value) for key, value in (logs or {}).items() if isinstance(value, int | float)}
        self._logged |= numbers

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The training is over."""
        self._close()

    # ── phases ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, args: TrainingArguments) -> MemoryLedger:
        if self._ledger is None:
            self._ledger = MemoryLedger(
                self._folder / "memory.jsonl",
                device=args.device,
                rank=cast("int", args.process_index),
                interval=self._interval,
                host_start=self._host_start,
            )
            if args.process_index == 0:
                self._metrics = JsonlWriter(self._folder / "metrics.jsonl")
            self._begin(LOAD)
        return self._ledger

    def _begin(self, name: str) -> None:
        """End the phase that goes on, if any, and begin another."""
        self._end()
        if self._ledger is not None:
            self._open.enter_context(self._ledger.phase(name))
            self._name = name

    def _end(self) -> None:
        self._name = None
        self._open.close()

    def _rename(self, name: str) -> None:
        if self._ledger is not None:
            self._ledger.recorder.rename(name)
            self._name = name

    def _write_metrics(self) -> None:
        if self._metrics is not None and self._logged:
            self._metrics.write({"step": self._logged_step, **self._logged})
        self._logged.clear()

    def _close(self) -> None:
        self._end()
        self._restore.close()
        self._write_metrics()
        if self._metrics is not None:
            self._metrics.close()
        if self._ledger is not None:
            self._ledger.close()
        self._metrics = self._ledger = None


def _gradients(model: torch.nn.Module) -> Iterator[Tensor]:
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def _state(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    states: Iterable[Mapping[str, Any]] = optimizer.state.values()
    return (value for state in states for value in state.values() if isinstance(value, Tensor))
