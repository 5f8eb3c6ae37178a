"""What verl's FSDP path holds in host memory, step by step and rank by rank.

Read in its sources of August 2026. P is a model's parameters, N the ranks of a shard group:

- Loading. The first rank of each shard group reads the whole model into host memory, all P elements of `model_dtype`
  (fp32 unless set), and keeps them as its full state until they have been sent around. With tied embeddings every rank
  does, because no rank can then be built without weights. Other ranks hold up to 0.4 of it for a moment, which is
  reported apart and not added up.
- The reference's CPU offload is forced: its shard is pinned host memory for the whole run.
- `param_offload` pins the parameters' shard from the moment it was built, `optimizer_offload` the two moments from the
  first step. Pinned memory that was freed stays in torch's cache, so both count from then on.
- Pinned memory comes in powers of two: each tensor's shard (FSDP2) or each layer's flat parameter (FSDP1) is rounded
  up by itself.
- vLLM asleep: nothing (level 2), with LoRA the weights (level 1); SGLang asleep: the weights.
- Saving with a Hugging Face model gathers it whole on rank 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from plimsoll.migrate.verl_job import VerlJob, Worker

TRANSIENT = 0.4
"""Of a model's full copy: what other ranks hold for a moment while it is sent around; measured on CPU ranks."""
MOMENTS = 2
"""Of Adam, each as large as the parameters."""
ENGINE_ITEMSIZE = 2
"""Rollout weights are bfloat16."""


@dataclass(slots=True, kw_only=True, frozen=True)
class HostPhase:
    """One step of a run. Bytes by what holds them, one mapping a rank."""

    name: str
    loading: bool
    """A model is being read."""
    ranks: tuple[dict[str, int], ...]
    transient_bytes: int = 0
    """What each rank that holds no full copy may hold for a moment besides."""

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Sum of each rank."""
        return tuple(sum(held.values()) for held in self.ranks)

    def node_bytes(self, ranks_per_node: int) -> tuple[int, ...]:
        """Sum of each node."""
        ranks = self.rank_bytes
        return tuple(sum(ranks[at : at + ranks_per_node]) for at in range(0, len(ranks), ranks_per_node))


def pinned(size: int) -> int:
    """Bytes that torch's pinned allocator takes for a tensor of `size` bytes: the next power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def shard_elements(worker: Worker, strategy: str) -> list[int]:
    """Elements of each tensor that a rank's shard is made of, on the fullest rank: one a parameter (FSDP2, cut along
    dim 0), or one a layer (FSDP1, which flattens it first)."""
    sizes, ranks = worker.sizes, worker.shard
    if strategy == "fsdp2":
        tensors = [tensor for layer in sizes.layers for tensor in layer.parameters] + list(sizes.root)
        return [tensor.shard_numel(ranks) for tensor in tensors]
    flat = [layer.num_parameters for layer in sizes.layers] + [sum(tensor.numel for tensor in sizes.root)]
    return [-(-numel // ranks) for numel in flat]


def shard_bytes(worker: Worker, strategy: str) -> int:
    """Bytes of the fullest rank's parameters on the device, exact."""
    return sum(shard_elements(worker, strategy)) * worker.itemsize


def pinned_bytes(worker: Worker, strategy: str) -> int:
    """Bytes that the same shard takes as pinned host memory."""
    return sum(pinned(numel * worker.itemsize) for numel in shard_elements(worker, strategy))


def rounding(worker: Worker, strategy: str) -> float:
    """How much more the pinned shard takes than it holds: 1.0 to 2.0."""
    return pinned_bytes(worker, strategy) / shard_bytes(worker, strategy)


def full_copy_bytes(worker: Worker) -> int:
    """A whole model in host memory."""
    return worker.sizes.num_parameters * worker.itemsize


def engine_bytes(job: VerlJob) -> int:
    """Rollout weights of one rank."""
    return -(-job.actor.sizes.num_parameters * ENGINE_ITEMSIZE // job.tensor_parallel)


@dataclass(slots=True)
class _Build:
    """Lays phase upon phase; what stays is kept between them."""

    job: VerlJob
    stays: dict[str, int] = field(default_factory=dict[str, int])
    phases: list[HostPhase] = field(default_factory=list[HostPhase])

    def add(self, name: str, extra: Callable[[int], dict[str, int]], *, loading: bool, transient: int = 0) -> None:
        ranks = tuple({**self.stays, **extra(rank)} for rank in range(self.job.ranks))
        self.phases.append(HostPhase(name=name, loading=loading, ranks=ranks, transient_bytes=transient))

    def load(self, name: str, worker: Worker) -> None:
        full = full_copy_bytes(worker)
        tied = worker.sizes.tied

        def extra(rank: int) -> dict[str, int]:
            return {f"{name}'s full copy": full} if tied or rank % worker.shard == 0 else {}

        self.add(f"load {name}", extra, loading=True, transient=0 if tied else int(TRANSIENT * full))


def host_phases(job: VerlJob) -> tuple[HostPhase, ...]:
    """The run in verl's order: critic, reference, actor, rollout engine, then the steps, then a save."""
    build = _Build(job)
    if job.critic is not None:
        build.load("critic", job.critic)
        if job.critic.param_offload:
            build.stays["critic parameters, pinned"] = pinned_bytes(job.critic, job.strategy)
    if job.reference is not None:
        build.load("reference", job.reference)
        build.stays["reference, pinned"] = pinned_bytes(job.reference, job.strategy)
    build.load("actor", job.actor)
    if job.actor.param_offload:
        build.stays["actor parameters, pinned"] = pinned_bytes(job.actor, job.strategy)
    build.add("build rollout", lambda _: {}, loading=False)
    for name, worker in (("critic", job.critic), ("actor", job.actor)):
        if worker is not None and worker.optimizer_offload:
            build.stays[f"{name} moments, pinned"] = MOMENTS * pinned_bytes(worker, job.strategy)
    asleep = engine_bytes(job) if job.frees_cache and (job.engine == "sglang" or job.lora) else 0
    build.add("steps", lambda _: {"rollout weights, asleep": asleep} if asleep else {}, loading=False)
    full = full_copy_bytes(job.actor)

    def saved(rank: int) -> dict[str, int]:
        held = {"rollout weights, asleep": asleep} if asleep else {}
        return {**held, "whole model to save": full} if job.saves_hf_model and rank == 0 else held

    build.add("save", saved, loading=False)
    return tuple(build.phases)


def rank_peaks(phases: tuple[HostPhase, ...]) -> tuple[int, ...]:
    """The highest of each rank over the phases."""
    return tuple(max(column) for column in zip(*(phase.rank_bytes for phase in phases), strict=True))


def node_peaks(phases: tuple[HostPhase, ...], ranks_per_node: int) -> tuple[int, ...]:
    """The highest of each node over the phases: a phase's ranks added up, not the ranks' peaks."""
    return tuple(max(column) for column in zip(*(phase.node_bytes(ranks_per_node) for phase in phases), strict=True))
