"""The trainer: builds the policy once, then scores, computes advantages and updates, batch by batch.

    score       old and reference log-probs, without gradient   → columns old_logprobs, ref_logprobs
    advantages  rewards (minus KL, where it is in the reward)    → column advantages
    update      for epoch, for mini-batch: zero, forward and backward a micro-batch, clip, step, version + 1
    supervised  the same path with the negative log-likelihood of the sampled tokens (SFT)

Gradients are reduced at every micro-batch. Accumulating them unsharded would hold every parameter's gradient on every
rank.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from plimsoll.advantage.expand import expand_advantage
from plimsoll.advantage.group import group_advantages
from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.loss.kl import kl_in_reward
from plimsoll.loss.supervised import supervised_loss
from plimsoll.memory.resident import Resident
from plimsoll.model.build import DTYPES
from plimsoll.model.policy import PackedPolicy
from plimsoll.parallel.mesh import build_mesh, ensure_process_group
from plimsoll.parallel.tensors import full
from plimsoll.plane.local import LocalPlane
from plimsoll.types import MicroBatch, MiniBatch, Sample, SampleId, StepStats, TrainBatch
from plimsoll.update.columns import read_columns, read_rows, write_column
from plimsoll.update.construct import Builder, own_parameters, own_tensors, probe_policy
from plimsoll.update.movers import TrainerMovers
from plimsoll.update.objective import PolicyObjective, policy_objective
from plimsoll.update.optimizer import Optimizer
from plimsoll.update.reference import build_reference
from plimsoll.update.report import StepReport
from plimsoll.update.residents import trainer_residents
from plimsoll.update.state import StateFolders, read_moments, state_writer
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.load import load_sharded
from plimsoll.weights.write import ShardWriter

logger = logging.getLogger(__name__)

_MISMATCH_LIMIT = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean |trainer - engine| log-prob on the first micro-batch above which something other than rounding is at work."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Counters:
    """What a checkpoint keeps beside tensors."""

    version: int
    """Policy version: optimizer steps that were applied."""
    optimizer_steps: int
    """Position in the learning-rate schedule."""
    skipped_nonfinite: int
    """Steps skipped because the gradient was not finite."""
    skipped_empty: int
    """Mini-batches without anything to train."""


class PolicyWorker:
    """One rank of the trainer. Every rank must make the same calls with its own part of the batch."""

    def __init__(
        self,
        recipe: Recipe,
        plan: RunPlan,
        plane: LocalPlane,
        *,
        objective: Literal["policy", "supervised"] = "policy",
    ) -> None:
        """Reads or makes the weights, applies sharding, probes. RefusedError when the model cannot be trained as asked.

        `objective` "supervised": temperature 1 and no reference, whatever the algorithm says.
        """
        self._recipe, self._plan, self._plane = recipe, plan, plane
        self.device = torch.device(plan.device)
        self._temperature = recipe.rollout.temperature if objective == "policy" else 1.0
        self._counters = Counters(version=0, optimizer_steps=0, skipped_nonfinite=0, skipped_empty=0)
        self._first_micro_batch = True
        ensure_process_group(self.device)
        with ExitStack() as unless_done:
            self.control = ControlGroup()
            unless_done.callback(self.control.close)
            mesh = build_mesh(self.device, recipe.parallel.shard)
            builder = Builder(recipe=recipe, plan=plan, mesh=mesh, control=self.control)
            self._build(builder, unless_done, with_reference=objective == "policy")
            self._held = unless_done.pop_all()

    def _build(self, builder: Builder, held: ExitStack, *, with_reference: bool) -> None:
        """`held` gets what must be given back."""
        recipe = self._recipe
        built = builder.policy()
        if built.files is not None:
            held.callback(built.files.close)
        self.policy = built.policy
        self.reference = None
        if with_reference and recipe.algorithm.kl_coefficient > 0:
            self.reference = build_reference(builder, built)
            held.callback(self.reference.close)
        if built.files is not None and (self.reference is None or self.reference.files is not built.files):
            built.files.close()
        trained = own_parameters(self.policy.lm)
        wanted = recipe.train.optimizer_state
        location = self._plan.optimizer_state if wanted == "auto" else wanted
        # Streamed, a rank may find no host memory.
        self.optimizer = self.control.together(
            lambda: Optimizer(trained, recipe.train, self._plan.optimizer_steps, location=location)
        )
        held.callback(self.optimizer.close)
        self.probe_report = probe_policy(self.policy, recipe, self._plan, self._temperature)
        self.release_gathered()
        if self.reference is not None:
            self.reference.policy.set_packing(self.policy.packing)
        self._movers = TrainerMovers(self.policy, self.optimizer, self.device)
        held.callback(self._movers.close)

    def close(self) -> None:
        """Give back files, host memory and the control group; nothing else is to be called after this.

        Every rank, before the process group ends. May be called again.
        """
        self._held.close()

    @property
    def version(self) -> int:
        """Policy version: optimizer steps applied since the start of the run."""
        return self._counters.version

    @property
    def lm(self) -> PreTrainedModel:
        """The (sharded) model."""
        return self.policy.lm

    @property
    def config(self) -> PreTrainedConfig:
        """Config of the model, as transformers saves it."""
        return self.policy.lm.config

    @property
    def needs_old(self) -> bool:
        """Whether old log-probs must be scored: not when each batch gets one on-policy update (the ratio is then 1)."""
        train, algorithm = self._recipe.train, self._recipe.algorithm
        several = train.mini_batches_per_step * train.epochs_per_rollout > 1
        return several or (self.needs_reference and algorithm.kl_in == "reward")

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs must be scored."""
        return self.reference is not None

    # ── scoring and advantages ──────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def score(self, batch: TrainBatch, *, old: bool, reference: bool) -> StepStats:
        """Write `old_logprobs` or `ref_logprobs`, or both, for every sample in a micro-batch.

        With KL in the reward, also for scored samples that are only in their group's statistics. The reference must be
        on the device (`Phase.REFERENCE` admits it); after an error in its pass it is not, where it may leave.
        """
        num_tokens = 0
        if old:
            num_tokens = self._score_with(self.policy, batch, "old_logprobs")
            self.release_gathered()
        if reference:
            assert self.reference is not None, "reference log-probs asked for without a KL coefficient"
            with self.reference.scoring() as frozen:
                num_tokens = self._score_with(frozen, batch, "ref_logprobs")
        return StepStats(values={"logprob/tokens": float(num_tokens)})

    def _score_with(self, policy: PackedPolicy, batch: TrainBatch, column: str) -> int:
        """Returns the tokens that went through."""
        num_tokens = 0
        for micro in self._to_score(batch):
            rows = read_rows(self._plane, micro.samples, self.device)
            num_tokens += micro.num_tokens
            logprobs, _ = policy(rows, temperature=self._temperature)
            write_column(self._plane, micro.samples, column, logprobs)
        return num_tokens

    def advantages(self, batch: TrainBatch) -> StepStats:
        """Write `advantages` for every sample in a micro-batch, from the statistics of whole groups.

        With KL in the reward a sample's reward is R - kl_coefficient · Σ KL over its sampled tokens.
        """
        algorithm = self._recipe.algorithm
        scored = [s for group in batch.groups for s in group.samples if s.reward is not None]
        kl = self._kl_of_samples(scored) if algorithm.kl_in == "reward" and self.needs_reference else {}
        rewards = {
            s.id: s.reward - algorithm.kl_coefficient * kl.get(s.id, 0.0) for s in scored if s.reward is not None
        }
        result = group_advantages(batch.groups, rewards, normalize_std=algorithm.normalize_std)
        for sample in batch.samples():
            column = expand_advantage(result.values[sample.id], self._plane.get(sample.ref, "sampled"))
            self._plane.put(sample.ref, advantages=column)
        values = {
            "advantage/no_signal_groups": float(result.num_no_signal),
            "advantage/singleton_groups": float(result.num_singleton),
            "advantage/unscored_groups": float(result.num_unscored_groups),
            "advantage/unscored_samples": float(result.num_unscored_samples),
        }
        if kl:
            values["actor/kl_reward"] = sum(kl.values()) / len(kl)
        return StepStats(values=values)

    def _kl_of_samples(self, samples: Sequence[Sample]) -> dict[SampleId, float]:
        estimator = self._recipe.algorithm.kl_estimator
        kl: dict[SampleId, float] = {}
        for s in samples:
            if s.response_length:
                old, ref, sampled = (
                    self._plane.get(s.ref, name) for name in ("old_logprobs", "ref_logprobs", "sampled")
                )
                kl[s.id] = float(kl_in_reward(old, ref, sampled, estimator))
        return kl

    # ── update ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def update(self, batch: TrainBatch) -> StepStats:
        """Train on the batch: `train.epochs_per_rollout` passes over its mini-batches, one optimizer step each."""
        report = StepReport()
        for _ in range(self._recipe.train.epochs_per_rollout):
            for mini in batch.mini_batches:
                self._optimizer_step(mini, report, supervised=False)
        return report.stats()

    def supervised(self, batch: TrainBatch) -> StepStats:
        """One pass over the mini-batches with the token-mean negative log-likelihood of the `sampled` tokens."""
        report = StepReport()
        for mini in batch.mini_batches:
            self._optimizer_step(mini, report, supervised=True)
        return report.stats()

    def accumulate(self, mini: MiniBatch, report: StepReport, *, supervised: bool = False) -> None:
        """Gradients of one mini-batch: forward and backward of its micro-batches, from zero."""
        self.optimizer.zero_grad()
        for micro in self._forwards(mini.micro_batches):
            loss = self._supervised_loss(micro, mini, report) if supervised else self._policy_loss(micro, mini, report)
            # FSDP2 averages over ranks; the loss is a sum over all of them.
            (loss * dist.get_world_size()).backward()

    def _optimizer_step(self, mini: MiniBatch, report: StepReport, *, supervised: bool) -> None:
        counters = self._counters
        if mini.num_loss_tokens == 0:  # global: every rank skips
            report.empty()
            self._count(skipped_empty=counters.skipped_empty + 1)
            return
        self.accumulate(mini, report, supervised=supervised)
        outcome = self.optimizer.step()
        self.optimizer.zero_grad()
        report.optimizer_step(outcome)
        if outcome.skipped:
            self._count(skipped_nonfinite=counters.skipped_nonfinite + 1)
            logger.warning("optimizer step skipped: the gradient norm is %s", outcome.grad_norm)
        else:
            self._count(version=counters.version + 1)

    def _policy_loss(self, micro: MicroBatch, mini: MiniBatch, report: StepReport) -> Tensor:
        rows = read_rows(self._plane, micro.samples, self.device)
        logprobs, entropy = self.policy(rows, temperature=self._temperature)
        columns = read_columns(self._plane, micro.samples, logprobs.detach(), reference=self.needs_reference)
        assert columns.old_logprobs is not None or not self.needs_old, "several updates a batch need old log-probs"
        algorithm, most = self._recipe.algorithm, self._recipe.rollout.max_response_tokens
        found = policy_objective(logprobs, entropy, columns, rows.sequence_index, mini, algorithm, most)
        if self._first_micro_batch:
            self._first_micro_batch = False
            self._check_first_ratio(micro, found)
        report.objective(found)
        report.micro_batch(found.loss, micro.num_tokens, len(logprobs))
        return found.loss

    def _supervised_loss(self, micro: MicroBatch, mini: MiniBatch, report: StepReport) -> Tensor:
        rows = read_rows(self._plane, micro.samples, self.device)
        logprobs, _ = self.policy(rows, temperature=self._temperature)
        every = torch.ones_like(rows.predicted, dtype=torch.bool)
        loss = supervised_loss(logprobs, every, num_loss_tokens=mini.num_loss_tokens)
        report.micro_batch(loss, micro.num_tokens, len(logprobs))
        return loss

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def model_state(self) -> dict[str, Tensor]:
        """Full tensors by Hugging Face name, a tied head left out. Collective on several ranks.

        On one rank they share memory with the model: write them before the next update.
        """
        return {name: full(tensor) for name, tensor in own_tensors(self.lm).items()}

    def model_bytes(self) -> int:
        """Of the weights in the master dtype, all ranks together."""
        return sum(tensor.numel() * tensor.element_size() for tensor in own_tensors(self.lm).values())

    def state_writer(self, folders: StateFolders, *, budget_bytes: int) -> ShardWriter:
        """This rank's writer of weights and moments, on at most `budget_bytes` of staging memory.

        Sends nothing; every rank must have returned before one of them runs its writer. Until its `tensors_read` is set
        neither weights nor moments may change.
        """
        return state_writer(self.lm, self.optimizer, folders, control=self.control, budget_bytes=budget_bytes)

    def load_state(self, moments: Sequence[Path], counters: Counters, *, model: Path | None = None) -> None:
        """Go on from a checkpoint, which any number of ranks may have written. Every rank calls.

        Args:
            moments: safetensors files.
            model: folder of the weights; None: the worker was built from it.

        Raises:
            CheckpointError, RefusedError: the same on every rank; the worker is then not to be used.
        """
        self._movers.forget()
        if model is not None:
            load_sharded(self.lm, model, control=self.control)
        self.control.together(lambda: read_moments(self.optimizer, moments))
        self.optimizer.steps = counters.optimizer_steps
        self._counters = counters

    def counters(self) -> Counters:
        """Version, schedule position and skipped steps."""
        return self._counters

    def residents(self) -> tuple[Resident, ...]:
        """Named groups of bytes that this worker owns, this rank's part."""
        return trainer_residents(self.optimizer, self.reference, self._movers, lambda: self.version)

    # ── helpers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def release_gathered(self) -> None:
        """FSDP2's root keeps its gathered weights after a forward for the backward, which did not come here."""
        cast("FSDPModule", self.policy).reshard()

    def _forwards(self, micro_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """What goes through the model at once: micro-batches, or one sequence at a time where rows cannot be packed."""
        for micro in micro_batches:
            if self.policy.packing == "single":
                yield from (MicroBatch(samples=(sample,)) for sample in micro.samples)
            else:
                yield micro

    def _to_score(self, batch: TrainBatch) -> Iterator[MicroBatch]:
        yield from self._forwards([micro for mini in batch.mini_batches for micro in mini.micro_batches])
        if not (self.needs_reference and self._recipe.algorithm.kl_in == "reward"):
            return
        trained = {sample.id for sample in batch.samples()}
        rest = [
            s
            for group in batch.groups
            for s in group.samples
            if s.reward is not None and s.response_length and s.id not in trained
        ]
        yield from self._forwards(_in_order(rest, self._plan.token_budget))

    def _check_first_ratio(self, micro: MicroBatch, found: PolicyObjective) -> None:
        """In every run: engine and trainer must agree about samples of the very policy that is being updated."""
        rollout = self._recipe.rollout
        if rollout.top_p < 1 or rollout.top_k > 0:
            return  # the engine's are those of the truncated distribution
        if any(sample.version != self.version for sample in micro.samples):
            return
        difference = found.mismatch.metrics()["mismatch/logprob_diff_mean"]
        limit = _MISMATCH_LIMIT[DTYPES[self._plan.compute_dtype]]
        if difference > limit:
            logger.warning(
                "trainer and engine differ by %.3g in mean |log-prob| on the first micro-batch (limit %.3g): look for "
                "a temperature that one side does not apply, another attention, or weights that were not synced",
                difference,
                limit,
            )

    def _count(self, **changes: int) -> None:
        self._counters = replace(self._counters, optimizer_steps=self.optimizer.steps, **changes)


def _in_order(samples: Sequence[Sample], token_budget: int) -> list[MicroBatch]:
    """Consecutive samples under the budget; a longer one goes alone."""
    batches: list[list[Sample]] = []
    room = 0
    for sample in samples:
        if not batches or sample.length > room:
            batches.append([])
            room = token_budget
        batches[-1].append(sample)
        room -= sample.length
    return [MicroBatch(samples=tuple(members)) for members in batches]
