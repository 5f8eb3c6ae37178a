"""The device in every phase, for the fullest rank: residents, workspace, capacity. Bytes.

Shards differ by at most a row of each tensor; the first rank's are the largest, and every rank is planned like it.
"""

from collections.abc import Iterator, Mapping

from plimsoll.config.planned import Choices, PlannedPhase
from plimsoll.memory import names
from plimsoll.memory.phases import Phase
from plimsoll.memory.plan.constants import (
    CUDA_CONTEXT,
    DEVICE_STAGING,
    FIRST_COMMUNICATOR,
    FURTHER_COMMUNICATOR,
    LIBRARY_WORKSPACE,
)
from plimsoll.memory.plan.engine import (
    borrows_parameters,
    engine_buffers,
    is_native,
    rollout_parameters,
    rollout_workspace,
)
from plimsoll.memory.plan.job import ITEMSIZE, SLOT, Job, Machine
from plimsoll.memory.plan.workspace import (
    gradients_workspace,
    logprob_workspace,
    sharding_of,
    step_workspace,
)
from plimsoll.weights.limits import SYNC_BUCKET_BYTES

GRADIENTS = "update/gradients"
STEP = "update/step"
"""The parts of an update: a streamed optimizer comes in for the second only."""


def device_phases(job: Job, choices: Choices, machine: Machine) -> tuple[PlannedPhase, ...]:
    """One row a phase, in the order of a run. `host_bytes` is left 0."""
    residents = residents_of(job, choices, machine)
    rows: list[PlannedPhase] = []
    for phase in phases_of(job):
        away = choices.evicted.get(phase.partition("/")[0], ())
        there = {name: size for name, size in residents.items() if size and exists(job, name, phase, choices)}
        held = {name: size for name, size in there.items() if name not in away}
        workspace = {name: size for name, size in workspace_of(job, choices, phase).items() if size}
        total = sum(held.values()) + sum(workspace.values())
        rows.append(
            PlannedPhase(
                slot=SLOT,
                phase=phase,
                device_bytes=total,
                capacity_bytes=machine.device_bytes,
                headroom_bytes=machine.device_bytes - total,
                residents=held,
                workspace_bytes=sum(workspace.values()),
                workspace=workspace,
                evicted=tuple(name for name in away if name in there),
            )
        )
    return tuple(rows)


def phases_of(job: Job) -> tuple[str, ...]:
    """Names of the phases that the run has, in their order."""
    return tuple(_phases(job))


def _phases(job: Job) -> Iterator[str]:
    policy = job.objective == "policy"
    yield Phase.LOAD.value
    if policy:
        yield Phase.ROLLOUT.value
    if policy and scores_old(job):
        yield Phase.LOGPROB.value
    if job.reference is not None:
        yield Phase.REFERENCE.value
    yield GRADIENTS
    yield STEP
    if job.generates:
        yield Phase.SYNC.value
    yield Phase.SAVE.value
    if job.generates and job.recipe.data.eval is not None:
        yield Phase.EVAL.value


def scores_old(job: Job) -> bool:
    """Whether old log-probs are computed: not when each batch gets one on-policy update (the ratio is then 1)."""
    recipe = job.recipe
    several = recipe.train.mini_batches_per_step * recipe.train.epochs_per_rollout > 1
    return several or (job.reference is not None and recipe.algorithm.kl_in == "reward")


def residents_of(job: Job, choices: Choices, machine: Machine) -> dict[str, int]:
    """Everything that is ever on the device for longer than a part of a phase, evicted at times or not.

    Streamed, the optimizer's moments are on the host.
    """
    sharding = sharding_of(job, choices)
    shard = job.sizes.parameter_bytes(sharding.master, sharding.shard) // sharding.tensor
    frozen = 0
    if job.reference is not None:
        frozen = job.reference.parameter_bytes(sharding.compute, sharding.shard) // sharding.tensor
    found = {
        names.ACTOR_PARAMETERS: shard,
        names.ACTOR_GRADIENTS: shard,
        names.OPTIMIZER_STATE: 2 * shard if choices.optimizer_state == "device" else 0,
        names.REFERENCE_PARAMETERS: frozen,
        names.ROLLOUT_PARAMETERS: rollout_parameters(job, choices),
        names.KV_CACHE: choices.kv_bytes if job.generates else 0,
        names.ENGINE_BUFFERS: engine_buffers(job),
        names.CUDA_CONTEXT: CUDA_CONTEXT if machine.device == "cuda" else 0,
        names.KERNEL_BUFFERS: kernel_buffers(job) if machine.device == "cuda" else 0,
        **communicators(job, machine),
    }
    found |= {name: size for name, size in job.measured.items() if found.get(name)}
    return {name: size for name, size in found.items() if size}


def kernel_buffers(job: Job) -> int:
    """Of the main thread and of the backward's, and of the thread that an engine of another library is called from."""
    return (2 + int(job.generates and not is_native(job))) * LIBRARY_WORKSPACE


def communicators(job: Job, machine: Machine) -> dict[str, int]:
    """A line for each group of ranks that a GPU is in; a group of one sends nothing and has none."""
    if machine.device != "cuda":
        return {}
    parallel = job.recipe.parallel
    groups = {
        "shard": job.shard,
        "replicate": job.replicas,
        "tensor": parallel.tensor,
        "context": parallel.context,
        "rollout": job.recipe.rollout.tensor_parallel if job.generates and not is_native(job) else 1,
    }
    real = [name for name, ranks in groups.items() if ranks > 1]
    return {
        f"{names.COMMUNICATOR}/{name}": FURTHER_COMMUNICATOR if index else FIRST_COMMUNICATOR
        for index, name in enumerate(real)
    }


def exists(job: Job, name: str, phase: str, choices: Choices) -> bool:
    """Whether a resident that nobody evicts is on the device in the phase."""
    if phase == Phase.LOAD.value and name in (names.ROLLOUT_PARAMETERS, names.KV_CACHE):
        # vLLM comes first and sleeps while the trainer is built. Before that it takes no more than in a rollout.
        return is_native(job)
    if name == names.ACTOR_GRADIENTS:
        return phase in (GRADIENTS, STEP)
    if name == names.REFERENCE_PARAMETERS:
        return choices.reference_placement == "device" or phase == Phase.REFERENCE.value
    return True


def workspace_of(job: Job, choices: Choices, phase: str) -> dict[str, int]:
    """What comes and goes in the phase, by part; of a phase that was measured, all of it."""
    measured = job.measured.get(phase)
    if phase == Phase.REFERENCE.value and job.reference == job.sizes:
        measured = job.measured.get(Phase.LOGPROB.value)  # the same forward of the same model
    if measured is not None:
        return {"measured": measured}
    if phase == Phase.LOAD.value:
        return _load_workspace(job, choices)
    if phase == Phase.LOGPROB.value:
        return logprob_workspace(job.sizes, job, choices)
    if phase == Phase.REFERENCE.value:
        assert job.reference is not None
        return logprob_workspace(job.reference, job, choices)
    if phase == GRADIENTS:
        return gradients_workspace(job, choices)
    if phase == STEP:
        return step_workspace(job, choices)
    if phase == Phase.SYNC.value:
        return _sync_workspace(job, choices)
    if phase in (Phase.ROLLOUT.value, Phase.EVAL.value):
        return rollout_workspace(job, choices, evaluating=phase == Phase.EVAL.value)
    return {}  # a save copies shards as they lie to the host


def _load_workspace(job: Job, choices: Choices) -> dict[str, int]:
    """What is done one after the other, each over the residents that are there by then: read, read the reference that
    does not stay, gather for the probe, measure a micro-batch. Our own engine comes last."""
    sharding = sharding_of(job, choices)
    sizes = job.sizes
    on_gpu = choices.device == "cuda"
    shard = sizes.parameter_bytes(sharding.master, sharding.shard) // sharding.tensor
    engine = rollout_parameters(job, choices) + choices.kv_bytes if job.generates and is_native(job) else 0
    later = engine + (2 * shard if choices.optimizer_state == "device" else 0)
    staging = DEVICE_STAGING if on_gpu else 0
    parts = {"staging": staging - later}
    if job.reference is not None and choices.reference_placement != "device":
        frozen = job.reference.parameter_bytes(sharding.compute, sharding.shard) // sharding.tensor
        parts["reference"] = frozen + staging - later
    if on_gpu and job.recipe.model.init == "random":
        # Whole on the device first, then cut. On a CPU that is the host's row.
        whole = sizes.parameter_bytes(sharding.master)
        parts["whole_model"] = whole - shard + _largest(job) - later
    layer = max(sharding.elements(layer.parameters) for layer in sizes.layers)
    parts["probe"] = sharding.compute * (layer + sharding.elements(sizes.root)) - engine
    if job.calibrates and job.calibration_wanted(choices.device):
        parts["calibration"] = shard + sum(workspace_of(job, choices, GRADIENTS).values()) - engine
    widest = max(parts, key=lambda part: parts[part])
    return {widest: max(parts[widest], 0)}


def _sync_workspace(job: Job, choices: Choices) -> dict[str, int]:
    """A bucket of weights for an engine with its own copy, and one gathered tensor on several ranks."""
    if borrows_parameters(job, choices):
        return {}
    found: dict[str, int] = {}
    if not is_native(job):
        largest = _largest(job) // ITEMSIZE[job.recipe.model.dtype] * ITEMSIZE[choices.compute_dtype]
        found["sync_bucket"] = max(SYNC_BUCKET_BYTES, largest)
        # vLLM keeps the tensors of one of its layers until all are there, and then makes that layer once more.
        dense = [layer for layer in job.sizes.layers if not layer.experts]
        widest = max((layer.intermediate * job.sizes.hidden for layer in dense), default=0)
        # Of two tensors that become one layer, the first may have come with the bucket before.
        found["reloaded_layer"] = max(largest, 3 * widest * ITEMSIZE[choices.compute_dtype])
    if job.recipe.cluster.ranks > 1:
        found["gathered_tensor"] = _largest(job)
    return found


def _largest(job: Job) -> int:
    """The largest tensor in the master dtype."""
    tensors = [tensor for layer in job.sizes.layers for tensor in layer.parameters] + list(job.sizes.root)
    return max(tensor.numel for tensor in tensors) * ITEMSIZE[job.recipe.model.dtype]


def largest_part(row: PlannedPhase) -> str:
    """Name of what takes most in a phase."""
    parts: Mapping[str, int] = {**row.residents, **row.workspace}
    return max(parts, key=lambda name: parts[name], default="")
