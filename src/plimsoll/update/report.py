"""Adds up what a step of the loop reports, over micro-batches, mini-batches, epochs and ranks."""

from dataclasses import replace
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from plimsoll.loss.importance import MismatchStats
from plimsoll.loss.policy import PolicyStats
from plimsoll.loss.tally import Tally
from plimsoll.types import StepStats
from plimsoll.update.objective import PolicyObjective
from plimsoll.update.optimizer import StepOutcome

T = TypeVar("T", bound=Tally)


class StepReport:
    """Sums first, divided once at the end. Tensors stay on the device until then."""

    def __init__(self) -> None:
        self._loss: list[Tensor] = []
        self._entropy: list[Tensor] = []
        self._kl: list[Tensor] = []
        self._policy: PolicyStats | None = None
        self._mismatch: MismatchStats | None = None
        self._outcomes: list[StepOutcome] = []
        self._num_tokens = 0
        self._num_loss_tokens = 0
        self._num_empty = 0

    def micro_batch(self, loss: Tensor, num_tokens: int, num_loss_tokens: int) -> None:
        """A micro-batch went through: its share of the loss, packed tokens T, sampled tokens N."""
        self._loss.append(loss.detach().double())
        self._num_tokens += num_tokens
        self._num_loss_tokens += num_loss_tokens

    def objective(self, objective: PolicyObjective) -> None:
        """What the policy loss has to say about a micro-batch."""
        self._entropy.append(objective.entropy_sum)
        if objective.kl_sum is not None:
            self._kl.append(objective.kl_sum)
        self._policy = objective.policy if self._policy is None else self._policy.merge(objective.policy)
        self._mismatch = objective.mismatch if self._mismatch is None else self._mismatch.merge(objective.mismatch)

    def optimizer_step(self, outcome: StepOutcome) -> None:
        """A mini-batch ended in a step, applied or skipped."""
        self._outcomes.append(outcome)

    def empty(self) -> None:
        """A mini-batch had nothing to train."""
        self._num_empty += 1

    def stats(self) -> StepStats:
        """Collective on several ranks.

        `loss`: mean over optimizer steps. `actor/entropy`, `actor/kl_ref`: means over sampled tokens (nats).
        `train/grad_norm`: mean over optimizer steps, before clipping. `train/tokens`: packed tokens (prompt and
        response) that went through the update, all epochs. `train/skipped_steps`: not finite or empty, this step.
        """
        sums = torch.stack(
            [
                _total(self._loss),
                _total(self._entropy),
                _total(self._kl),
                torch.tensor(float(self._num_tokens), dtype=torch.float64),
                torch.tensor(float(self._num_loss_tokens), dtype=torch.float64),
            ]
        )
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        loss, entropy, kl, num_tokens, num_loss_tokens = cast("list[float]", sums.tolist())
        steps = max(len(self._outcomes), 1)
        values = {
            "loss": loss / steps,
            "train/tokens": num_tokens,
            "train/skipped_steps": float(self._num_empty + sum(outcome.skipped for outcome in self._outcomes)),
        }
        if self._outcomes:
            values["train/grad_norm"] = sum(outcome.grad_norm for outcome in self._outcomes) / steps
            values["train/learning_rate"] = self._outcomes[-1].learning_rate
        if self._policy is not None and self._mismatch is not None:
            values["actor/entropy"] = entropy / max(num_loss_tokens, 1.0)
            if self._kl:
                values["actor/kl_ref"] = kl / max(num_loss_tokens, 1.0)
            values |= _over_ranks(self._policy).metrics() | _over_ranks(self._mismatch).metrics()
        return StepStats(values=values)


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum().cpu() if parts else torch.zeros((), dtype=torch.float64)


def _over_ranks(tally: T) -> T:
    sums, maxima = tally.sums.cpu(), tally.maxima.cpu()
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return replace(tally, sums=sums, maxima=maxima)
