"""AdamW with clipping, a schedule, and steps that are skipped whole when a gradient is not finite."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plimsoll.config.train import TrainConfig
from plimsoll.errors import CheckpointError
from plimsoll.parallel.reduce import global_norm
from plimsoll.parallel.tensors import full, load_full, local
from plimsoll.update.schedule import learning_rate

_MOMENTS = ("exp_avg", "exp_avg_sq")


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

    The fused kernel is used on every device: elementwise, so equal inputs give equal bits on a CPU with equal threads.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainConfig, total_steps: int) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self._total_steps = total_steps
        self.steps = 0
        decayed = [p for p in self._parameters.values() if p.ndim >= 2]
        plain = [p for p in self._parameters.values() if p.ndim < 2]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((decayed, config.weight_decay), (plain, 0.0))
            if params
        ]
        self._adamw = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True
        )

    def zero_grad(self) -> None:
        """Free the gradients."""
        self._adamw.zero_grad(set_to_none=True)

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
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.steps += 1
        return StepOutcome(grad_norm=norm, learning_rate=rate, skipped=False)

    def gradients(self) -> list[Tensor]:
        """Gradients that exist."""
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def tensors(self) -> list[Tensor]:
        """Moments, for counting bytes."""
        return [state[moment] for state in self._adamw.state.values() for moment in _MOMENTS]

    def state(self) -> dict[str, Tensor]:
        """`NAME.exp_avg`, `NAME.exp_avg_sq` (full tensors) and `NAME.step` (float32 scalar). Empty before a first step.

        On one rank the tensors share memory with the optimizer: write them before the next step.
        """
        flat: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter in self._adamw.state:
                held = self._adamw.state[parameter]
                flat |= {f"{name}.{moment}": full(held[moment]) for moment in _MOMENTS}
                flat[f"{name}.step"] = held["step"].detach().cpu()
        return flat

    def load_state(self, flat: Mapping[str, Tensor], steps: int) -> None:
        """Put back what `state` gave. CheckpointError names tensors that are missing or belong to nobody."""
        known = {f"{name}.{leaf}" for name in self._parameters for leaf in (*_MOMENTS, "step")}
        if unknown := sorted(set(flat) - known):
            raise CheckpointError(f"optimizer state for unknown parameters: {', '.join(unknown[:8])}")
        self._adamw.state.clear()
        for name, parameter in self._parameters.items():
            leaves = [leaf for leaf in (*_MOMENTS, "step") if f"{name}.{leaf}" in flat]
            if not leaves:  # a parameter that has had no gradient yet
                continue
            if len(leaves) != 3:
                raise CheckpointError(f"optimizer state of {name} is incomplete: only {', '.join(leaves)}")
            held: dict[str, Tensor] = {}
            for moment in _MOMENTS:
                held[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                load_full(held[moment], flat[f"{name}.{moment}"])
            # A copy: the fused kernel counts in place, and the caller's tensor is the caller's.
            held["step"] = flat[f"{name}.step"].to(parameter.device, torch.float32, copy=True)
            self._adamw.state[parameter] = held
        self.steps = steps
