"""AdamW with clipping, a schedule, and steps that are skipped whole when a gradient is not finite."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from plimsoll.config.train import TrainConfig
from plimsoll.parallel.reduce import global_norm
from plimsoll.parallel.tensors import local
from plimsoll.update.adamw import AdamWPlace, AdamWSettings, DeviceAdamW
from plimsoll.update.schedule import learning_rate
from plimsoll.update.streamed import StreamedAdamW

Location = Literal["device", "streamed"]


@dataclass(slots=True, kw_only=True, frozen=True)
class StepOutcome:
    """One optimizer step."""

    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    """Rate of this step, applied or not."""
    skipped: bool
    """True: the norm was not finite; weights, moments and step count are as before."""


class Optimizer:
    """AdamW (arXiv:1711.05101) over named parameters. Matrices decay, vectors (norms, biases) do not.

    The fused kernel is used on every device: elementwise, so equal inputs give equal bits on a CPU with equal threads,
    and wherever the moments live.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainConfig,
        total_steps: int,
        *,
        location: Location = "device",
    ) -> None:
        """`location`: where the moments live between steps."""
        self._parameters = dict(parameters)
        self._config = config
        self._total_steps = total_steps
        self.steps = 0
        self.location: Location = location
        place = StreamedAdamW if location == "streamed" else DeviceAdamW
        self._adamw: AdamWPlace = place(self._parameters, AdamWSettings.of(config))

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self) -> StepOutcome:
        """Clip and step, or skip. Collective on several ranks, which all decide alike: the norm is global."""
        gradients = self.gradients()
        norm = global_norm(gradients)
        rate = learning_rate(self.steps, self._config, self._total_steps)
        if not math.isfinite(norm):
            return StepOutcome(grad_norm=norm, learning_rate=rate, skipped=True)
        limit = self._config.max_grad_norm
        if limit is not None and norm > limit:
            for gradient in gradients:
                local(gradient).mul_(limit / norm)
        self._adamw.step(rate)
        self.steps += 1
        return StepOutcome(grad_norm=norm, learning_rate=rate, skipped=False)

    def gradients(self) -> list[Tensor]:
        """Gradients that exist."""
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def tensors(self) -> list[Tensor]:
        """What the moments take, for counting bytes."""
        return self._adamw.tensors()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Parameter → `exp_avg`, `exp_avg_sq`, sharded as the parameter is; they share memory with the optimizer.

        Streamed, the local parts are on the host, whatever the device of the mesh. They are as of now, until the next
        step. A parameter that has had no gradient yet has none.
        """
        return self._adamw.moments()

    def steps_by_name(self) -> dict[str, float]:
        """Steps that each parameter of `moments` has had: AdamW corrects its bias by this count."""
        return self._adamw.steps_by_name()

    def empty_moments(self) -> dict[str, dict[str, Tensor]]:
        """Moments of zeros for every parameter, for a reader to fill in place; then call `finish_load`."""
        return self._adamw.empty_moments()

    def finish_load(self, steps: Mapping[str, float]) -> None:
        """Take the step counts; parameters without one have had no gradient yet, and their moments are dropped.

        The caller sets `self.steps`, the position in the schedule.
        """
        self._adamw.finish_load(steps)

    def close(self) -> None:
        """Give host memory of the moments back; there is no step and no save after this. May be called again."""
        self._adamw.close()
