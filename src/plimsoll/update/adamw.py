"""AdamW with its moments on the device beside the parameters, and what every place for the moments has in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from plimsoll.config.train import TrainConfig
from plimsoll.parallel.tensors import local

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of each parameter, in its dtype."""


@dataclass(slots=True, kw_only=True, frozen=True)
class AdamWSettings:
    """What does not change from step to step."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    """Of matrices."""

    @classmethod
    def of(cls, config: TrainConfig) -> "AdamWSettings":
        """From the recipe."""
        return cls(beta1=config.beta1, beta2=config.beta2, epsilon=config.epsilon, weight_decay=config.weight_decay)

    def decay_of(self, parameter: Tensor) -> float:
        """Matrices decay, vectors (norms, biases) do not."""
        return self.weight_decay if parameter.ndim >= 2 else 0.0


class AdamWPlace(Protocol):
    """AdamW's step with the moments in one place. Equal gradients give equal bits in every place."""

    def step(self, learning_rate: float) -> None:
        """Step the parameters that have a gradient; the others keep their values, moments and counts."""
        ...

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Parameter → `exp_avg`, `exp_avg_sq`, sharded as the parameter is; they share memory with the optimizer.

        Their values are there until the next step. A parameter that has had no gradient yet has none.
        """
        ...

    def steps_by_name(self) -> dict[str, float]:
        """Steps that each parameter of `moments` has had: AdamW corrects its bias by this count."""
        ...

    def empty_moments(self) -> dict[str, dict[str, Tensor]]:
        """Moments of zeros for every parameter, for a reader to fill in place; then call `finish_load`."""
        ...

    def finish_load(self, steps: Mapping[str, float]) -> None:
        """Take the step counts; parameters without one have had no gradient yet, and have no moments."""
        ...

    def tensors(self) -> list[Tensor]:
        """Everything that the moments take, for counting bytes; nothing is waited for."""
        ...

    def close(self) -> None:
        """Give back what Python does not; what `moments` gave must not be used any more. May be called again."""
        ...


class DeviceAdamW:
    """torch's fused AdamW, with moments where the parameters are."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: AdamWSettings) -> None:
        self._parameters = dict(parameters)
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter in self._parameters.values():
            groups.setdefault(settings.decay_of(parameter), []).append(parameter)
        self._adamw = torch.optim.AdamW(
            [{"params": members, "weight_decay": decay} for decay, members in groups.items()],
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )
        # Made now and not in the first step: what a run takes it takes from the start, or it ends there.
        self._stepped: set[str] = set()
        self._make()

    def step(self, learning_rate: float) -> None:
        """As of `AdamWPlace`."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._stepped |= {name for name, parameter in self._parameters.items() if parameter.grad is not None}
        self._adamw.step()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """As of `AdamWPlace`."""
        held = self._adamw.state
        return {
            name: {moment: held[parameter][moment] for moment in MOMENTS}
            for name, parameter in self._parameters.items()
            if name in self._stepped
        }

    def steps_by_name(self) -> dict[str, float]:
        """As of `AdamWPlace`."""
        held = {name: self._adamw.state[p]["step"] for name, p in self._parameters.items() if name in self._stepped}
        if not held:
            return {}
        # One copy for all: on a GPU the fused kernel keeps every count there.
        counts = cast("list[float]", torch.stack([local(step).reshape(()) for step in held.values()]).tolist())
        return dict(zip(held, counts, strict=True))

    def empty_moments(self) -> dict[str, dict[str, Tensor]]:
        """As of `AdamWPlace`."""
        self._adamw.state.clear()  # before the new ones are made
        self._make()
        self._stepped = set(self._parameters)
        return self.moments()

    def finish_load(self, steps: Mapping[str, float]) -> None:
        """As of `AdamWPlace`."""
        for name, parameter in self._parameters.items():
            held = self._adamw.state[parameter]
            held["step"].fill_(steps.get(name, 0.0))
            if name not in steps:
                for moment in MOMENTS:
                    held[moment].zero_()
        self._stepped = self._parameters.keys() & steps.keys()

    def tensors(self) -> list[Tensor]:
        """As of `AdamWPlace`."""
        return [held[moment] for held in self._adamw.state.values() for moment in MOMENTS]

    def _make(self) -> None:
        """Moments of zeros, of no step."""
        for parameter in self._parameters.values():
            held = {moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in MOMENTS}
            # The fused kernel takes its counts from where the parameters are.
            self._adamw.state[parameter] = {**held, "step": torch.zeros((), device=parameter.device)}

    def close(self) -> None:
        """As of `AdamWPlace`."""
        self._adamw.state.clear()
        self._stepped.clear()
