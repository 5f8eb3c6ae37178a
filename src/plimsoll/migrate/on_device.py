"""What verl holds on each device, phase by phase: an estimate from its settings.

Parameters, gradients and moments are exact (their dtype times the fullest shard). The engine is what
`gpu_memory_utilization` gives it. Logits are made whole, [tokens, vocabulary] of a micro-batch; activations are counted
roughly. The caching allocator's fragmentation comes on top and is not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.migrate.holdings import ENGINE_ITEMSIZE, MOMENTS, engine_bytes, shard_bytes
from plimsoll.migrate.verl_job import VerlJob, Worker

MIB = 2**20
CONTEXT = 620 * MIB
"""CUDA context of a process, on an H200."""
COMMUNICATOR = 860 * MIB
"""First NCCL communicator of a process."""
ASLEEP = 1700 * MIB
"""vLLM in a process of its own while it sleeps: context and graphs; without KV cache and weights."""
LOGIT_BYTES = 10
"""A logit without gradient: bfloat16, its fp32 copy, and the log-softmax of it."""
LOGIT_BYTES_UPDATE = 18
"""In the update: the above, and the gradients of all but one of them."""


@dataclass(slots=True, kw_only=True, frozen=True)
class DevicePhase:
    """One phase on the fullest rank."""

    name: str
    residents: Mapping[str, int]
    workspace: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        """All of it."""
        return sum(self.residents.values()) + sum(self.workspace.values())


def device_phases(job: VerlJob, device_bytes: int) -> tuple[DevicePhase, ...]:
    """Rollout, log-prob passes, updates, sync, on devices of `device_bytes`."""
    fixed = {"context": CONTEXT} | ({"communicator": COMMUNICATOR} if job.ranks > 1 else {})
    weights = engine_bytes(job)
    awake = max(int(job.memory_utilization * device_bytes), weights)
    engine = {"rollout weights": weights, "KV cache and the rest of the engine's share": awake - weights}
    asleep = {"engine asleep": ASLEEP} if job.frees_cache else engine
    idle = {**fixed, **_idle(job)}
    actor, strategy = job.actor, job.strategy
    parameters = {"actor parameters": shard_bytes(actor, strategy)}
    phases = [DevicePhase(name="rollout", residents={**idle, **engine}, workspace={})]

    def forward(name: str, worker: Worker, tokens: int, held: Mapping[str, int], *, head: bool) -> None:
        work = {"gathered layers": _gathered(worker)}
        if head and job.materialises_logits:
            work["full logits"] = tokens * worker.sizes.vocab * LOGIT_BYTES
        phases.append(DevicePhase(name=name, residents={**idle, **asleep, **held}, workspace=work))

    forward("compute_log_prob", actor, job.logprob_tokens, parameters, head=True)
    if job.reference is not None:
        forward("compute_ref_log_prob", job.reference, job.reference.tokens, {}, head=True)
    if job.critic is not None:
        critic = {"critic parameters": shard_bytes(job.critic, strategy)}
        forward("compute_values", job.critic, job.critic.tokens, critic, head=False)
        phases.append(_update(job, "update_critic", "critic", job.critic, {**idle, **asleep}, head=False))
    phases.append(_update(job, "update_actor", "actor", actor, {**idle, **asleep}, head=True))
    largest = max((tensor.numel for tensor in _tensors(actor)), default=0)
    sync = {"one full tensor": largest * actor.itemsize, "sync bucket": job.bucket_bytes}
    held = {**idle, **asleep, **parameters, "rollout weights": weights}
    phases.append(DevicePhase(name="sync", residents=held, workspace=sync))
    return tuple(phases)


def _idle(job: VerlJob) -> dict[str, int]:
    """What the trainer leaves on the device while it does something else."""
    held: dict[str, int] = {}
    for name, worker in (("critic", job.critic), ("actor", job.actor)):
        if worker is None:
            continue
        shard = shard_bytes(worker, job.strategy)
        if not worker.param_offload:
            held[f"{name} parameters"] = shard
        if not worker.optimizer_offload:
            held[f"{name} moments"] = MOMENTS * shard
    return held


def _update(job: VerlJob, phase: str, name: str, worker: Worker, held: Mapping[str, int], *, head: bool) -> DevicePhase:
    shard = shard_bytes(worker, job.strategy)
    residents = {
        **held,
        f"{name} parameters": shard,
        f"{name} gradients": shard,
        f"{name} moments": MOMENTS * shard,
    }
    layer = max((layer.num_parameters for layer in worker.sizes.layers), default=0)
    workspace = {
        "gathered layers": _gathered(worker),
        "reduce-scatter": layer * 4 if job.ranks > 1 else 0,
        "activations": _activations(worker),
    }
    if head and job.materialises_logits:
        workspace["full logits"] = worker.tokens * worker.sizes.vocab * LOGIT_BYTES_UPDATE
    return DevicePhase(name=phase, residents=residents, workspace=workspace)


def _gathered(worker: Worker) -> int:
    """bfloat16 copies of embedding and head, of one layer, and of the next one on its way."""
    layer = max((layer.num_parameters for layer in worker.sizes.layers), default=0)
    return (sum(tensor.numel for tensor in worker.sizes.root) + 2 * layer) * ENGINE_ITEMSIZE


def _activations(worker: Worker) -> int:
    """Checkpointed: the input of every layer, and one layer whole. Else every layer whole."""
    sizes, tokens = worker.sizes, worker.tokens
    whole = [
        10 * sizes.hidden + 3 * (layer.intermediate * max(1, layer.experts_per_token) + layer.shared_intermediate)
        for layer in sizes.layers
    ]
    if not worker.checkpointing:
        return tokens * ENGINE_ITEMSIZE * sum(whole)
    return tokens * ENGINE_ITEMSIZE * (len(sizes.layers) * sizes.hidden + max(whole, default=0))


def _tensors(worker: Worker):
    return [tensor for layer in worker.sizes.layers for tensor in layer.parameters] + list(worker.sizes.root)
