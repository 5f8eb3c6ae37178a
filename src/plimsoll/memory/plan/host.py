"""Host memory of the plan: anonymous and pinned bytes of each rank in each phase, of each node, and what the run counts
on finding in the page cache.

    rank, phase  =  arenas that stay  +  what the phase takes for itself  +  the process's own growth
    node         =  its ranks at their highest phase, together

All of it is over what the process starts with, as the ledger measures it. Every rank does the same work on a shard of
the same size (the fullest one is taken for all), so ranks differ in nothing and nodes only in how many ranks they have.
"""

from collections.abc import Iterator, Mapping, Sequence

from plimsoll.config.planned import Choices, PlannedHost, PlannedPhase, Refusal
from plimsoll.memory import names
from plimsoll.memory.phases import Phase
from plimsoll.memory.plan.job import GIB, ITEMSIZE, MIB, SLOT, Job, Machine
from plimsoll.model.sizes import ModelSizes, TensorSize
from plimsoll.weights.limits import READERS, RING_BUFFER_BYTES, RING_BYTES, aligned

HOST = "host"
"""In the place of a phase, in a refusal of a node's memory."""

PROCESS = "process"
"""Growth of the process itself: modules imported late, thread pools, the CUDA context's part on the host, and what the
allocators keep."""
ENGINE_PROCESS = "engine_process"
SLEEPING_ENGINE = "sleeping_engine"
"""Weights that an engine copies out while it sleeps."""
STAGING = "checkpoint_staging"
COLUMNS = "sample_columns"
WHOLE_MODEL = "whole_model"
"""A model with random weights before it is sharded."""
DEVICE_ON_HOST = "device_memory"
"""Everything that a run without a GPU has on its device, which is this memory."""

PROCESS_BYTES = {"cpu": 24 * MIB, "cuda": GIB}
"""cpu: torch 2.13, RssAnon over the start of the worker and over its residents: 2 MiB after the updates of a model of
0.8 M parameters, 32 MiB after the load of one of 135 M. cuda: context, kernels that are loaded at their first call,
cuBLAS. One H200, torch 2.11, a model of 135 M parameters with our engine: 0.54 GiB over the load, 1.02 after 18
steps."""

ENGINE_BYTES = int(0.35 * GIB)
"""Of an engine that is not ours, in the same process: its imports, compiled graphs and request state. One H200, torch
2.11, vLLM 0.25: process and engine together grew by 1.16 GiB until step 14 with a model of 135 M parameters and by 1.39
until step 20 with one of 1.5 B."""

COLUMN_BYTES = 8 + 1 + 4 * 4
"""Of one token on the plane: id, mask, and log-probs of the engine, the trainer and the reference beside the
advantage."""

KEEP = (names.ACTOR_PARAMETERS, names.OPTIMIZER_STATE)
"""Residents that go to the host arena when they are evicted; the others are dropped and made again."""


def host_plan(job: Job, choices: Choices, machine: Machine, phases: Sequence[PlannedPhase]) -> PlannedHost:
    """Every rank, every node, the whole run. `phases`: the device's rows; on a CPU their bytes count here too."""
    stays = _stays(job, choices)
    rows = [_consumers(job, choices, machine, phase, stays) for phase in phases]
    fullest = max(rows, key=lambda row: sum(row.values()), default=dict[str, int]())
    peak = sum(fullest.values())
    return PlannedHost(
        node_peak_bytes=tuple(peak * len(ranks) for ranks in ranks_by_node(machine)),
        rank_peak_bytes=(peak,) * machine.ranks,
        file_cache_bytes=tuple(file_cache(job, choices, machine)),
        consumers=dict(sorted(fullest.items(), key=lambda item: -item[1])),
        capacity_bytes=machine.host_bytes,
    )


def with_host_bytes(
    job: Job, choices: Choices, machine: Machine, phases: Sequence[PlannedPhase]
) -> tuple[PlannedPhase, ...]:
    """The rows with their `host_bytes`: anonymous and pinned memory of one rank, over what the process starts with."""
    stays = _stays(job, choices)
    return tuple(
        phase.model_copy(update={"host_bytes": sum(_consumers(job, choices, machine, phase, stays).values())})
        for phase in phases
    )


def host_consumers(job: Job, choices: Choices, machine: Machine, phase: PlannedPhase) -> dict[str, int]:
    """Who holds how much of one rank's host memory in a phase; nothing that holds nothing."""
    return _consumers(job, choices, machine, phase, _stays(job, choices))


def phase_host_bytes(job: Job, choices: Choices, machine: Machine, phase: PlannedPhase) -> int:
    """All of `host_consumers` together."""
    return sum(host_consumers(job, choices, machine, phase).values())


def host_refusals(host: PlannedHost, machine: Machine) -> tuple[Refusal, ...]:
    """A node that its ranks do not fit into: the fullest, since all are planned alike."""
    fullest = max(range(len(host.node_peak_bytes)), key=lambda node: host.node_peak_bytes[node])
    need = host.node_peak_bytes[fullest]
    if need <= machine.host_bytes:
        return ()
    return (
        Refusal(
            slot=SLOT,
            phase=HOST,
            rank=fullest * machine.ranks_per_node,
            need_bytes=need,
            have_bytes=machine.host_bytes,
            largest=next(iter(host.consumers), ""),
        ),
    )


def _stays(job: Job, choices: Choices) -> dict[str, int]:
    """What is held in every phase."""
    foreign = job.generates and job.recipe.rollout.engine != "native"
    engine_weights = job.sizes.parameter_bytes(ITEMSIZE[choices.compute_dtype]) // job.recipe.rollout.tensor_parallel
    return {
        PROCESS: PROCESS_BYTES[choices.device],
        ENGINE_PROCESS: ENGINE_BYTES if foreign else 0,
        SLEEPING_ENGINE: sleep_host_bytes(1, engine_weights, SLEEP_LEVEL) if foreign else 0,
        names.REFERENCE_ARENA: _reference_arena(job, choices),
        names.OPTIMIZER_STATE: _streamed_moments(job, choices),
        names.HOST_ARENA: _evicted(job, choices),
    }


def _consumers(
    job: Job, choices: Choices, machine: Machine, phase: PlannedPhase, stays: Mapping[str, int]
) -> dict[str, int]:
    loads = phase.phase == Phase.LOAD
    found = {
        **stays,
        STAGING: _staging(job, choices, phase),
        names.STAGING_RING: _ring(job, choices, phase),
        WHOLE_MODEL: _whole_model(job, choices, phase) if loads else 0,
        COLUMNS: 0 if loads else _columns(job, machine),
        DEVICE_ON_HOST: phase.device_bytes if machine.device == "cpu" else 0,
    }
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}


def sleep_host_bytes(engines: int, weight_bytes: int, level: int) -> int:
    """Host memory that engines hold while they sleep. Level 1 copies the weights there, for each engine; level 2 drops
    them: the trainer has newer ones, and the next sync resends weights and buffers."""
    return engines * weight_bytes if level == 1 else 0


def host_notes(job: Job) -> tuple[str, ...]:
    """What the figures for the host rest on, in sentences."""
    if not job.generates or job.recipe.rollout.engine == "native":
        return ()
    steps = " and ".join(SLEEP_STEPS[SLEEP_LEVEL])
    return (f"The engine sleeps at level {SLEEP_LEVEL}, which keeps no weights on the host; at each waking: {steps}",)


SLEEP_STEPS = {1: ("wake weights from the host",), 2: ("resend weights and buffers",)}
"""Sleep level of an engine → what waking it asks for."""

SLEEP_LEVEL = 2
"""Of engines in colocated runs."""


def ranks_by_node(machine: Machine) -> Iterator[range]:
    """Ranks of each node; the last one perhaps has fewer."""
    for first in range(0, machine.ranks, machine.ranks_per_node):
        yield range(first, min(first + machine.ranks_per_node, machine.ranks))


def arena_bytes(sizes: ModelSizes, itemsize: int, ranks: int) -> int:
    """A host arena of one rank's shard: every storage aligned."""
    return sum(aligned(tensor.shard_numel(ranks) * itemsize) for tensor in all_tensors(sizes))


def all_tensors(sizes: ModelSizes) -> Iterator[TensorSize]:
    """Every parameter of the model."""
    for layer in sizes.layers:
        yield from layer.parameters
    yield from sizes.root


def file_cache(job: Job, choices: Choices, machine: Machine) -> Iterator[int]:
    """Of each node: bytes of the reference's files that each pass finds in the page cache, if it is read from them.

    Registering a map with CUDA brings in all of its file, whichever part the rank wants. The ring, and maps on a CPU,
    touch the shards of the node's ranks alone.
    """
    reference = job.reference
    if reference is None or choices.reference_placement not in ("page_cache", "ring"):
        yield from (0 for _ in ranks_by_node(machine))
        return
    itemsize = ITEMSIZE[choices.compute_dtype]
    whole = choices.reference_placement == "page_cache" and choices.device == "cuda"
    for ranks in ranks_by_node(machine):
        shards = range(job.shard) if whole else sorted({rank % job.shard for rank in ranks})
        yield sum(_rows(tensor, shard, job.shard) * itemsize for tensor in all_tensors(reference) for shard in shards)


def _rows(tensor: TensorSize, shard: int, ranks: int) -> int:
    """Elements of one rank's part: dim 0 in equal pieces, of which the last ones may be short or empty."""
    rows, *rest = tensor.shape or (1,)
    piece = -(-rows // ranks)
    width = 1
    for extent in rest:
        width *= extent
    return max(min(piece, rows - shard * piece), 0) * width


def _reference_arena(job: Job, choices: Choices) -> int:
    if job.reference is None or choices.reference_placement != "arena":
        return 0
    return arena_bytes(job.reference, ITEMSIZE[choices.compute_dtype], job.shard)


def _streamed_moments(job: Job, choices: Choices) -> int:
    if choices.optimizer_state != "streamed":
        return 0
    return 2 * arena_bytes(job.sizes, ITEMSIZE[job.recipe.model.dtype], job.shard)


def _evicted(job: Job, choices: Choices) -> int:
    """One arena, laid out once, with a region for everything that is ever evicted and must survive."""
    away = {name for evicted in choices.evicted.values() for name in evicted}
    shard = arena_bytes(job.sizes, ITEMSIZE[job.recipe.model.dtype], job.shard)
    held = shard if names.ACTOR_PARAMETERS in away else 0
    if names.OPTIMIZER_STATE in away and choices.optimizer_state == "device":
        held += 2 * shard
    return held


def _staging(job: Job, choices: Choices, phase: PlannedPhase) -> int:
    """In the background a save goes on while the next rollout is made. On a CPU tensors are written from where they
    are, but for experts, which lie otherwise in a file."""
    checkpoint = job.recipe.checkpoint
    if choices.device == "cpu" and not any(layer.experts for layer in job.sizes.layers):
        return 0
    writes = phase.phase in (Phase.SAVE, Phase.EXPORT) or (checkpoint.background and phase.phase != Phase.LOAD)
    return int(checkpoint.staging_memory) if writes else 0


def _ring(job: Job, choices: Choices, phase: PlannedPhase) -> int:
    """A GPU takes all of it at once; a CPU a buffer for each reader that needs one, before the rest of a load."""
    reads = phase.phase == Phase.LOAD and (job.recipe.model.init == "pretrained" or job.reference is not None)
    pages_in = phase.phase == Phase.REFERENCE and choices.reference_placement == "ring"
    if not (reads or pages_in):
        return 0
    if choices.device == "cuda":
        return RING_BYTES
    buffers = READERS["cpu"] * RING_BUFFER_BYTES["cpu"]
    return max(buffers - _after_the_weights(phase), 0) if phase.phase == Phase.LOAD else buffers


def _after_the_weights(load: PlannedPhase) -> int:
    """Device memory that a load takes when the policy's weights are there, and so after all that it took for those."""
    return load.device_bytes - load.residents.get(names.ACTOR_PARAMETERS, 0)


def _whole_model(job: Job, choices: Choices, load: PlannedPhase) -> int:
    """What random weights take over the shard that stays. On a CPU they become the shard, a tensor at a time, before
    the rest of the load's work on the device, which is this memory, begins."""
    if job.recipe.model.init != "random":
        return 0
    itemsize = ITEMSIZE[job.recipe.model.dtype]
    whole = job.sizes.parameter_bytes(itemsize)
    if choices.device == "cuda":
        return whole
    largest = max(tensor.shard_numel(job.shard) for tensor in all_tensors(job.sizes)) * itemsize
    return max(whole - job.sizes.parameter_bytes(itemsize, job.shard) + largest - _after_the_weights(load), 0)


def _columns(job: Job, machine: Machine) -> int:
    """Of the samples of a step, all of them as long as they may be, spread over the ranks."""
    recipe = job.recipe
    samples = recipe.data.prompts_per_step
    if job.objective == "policy":
        samples *= recipe.rollout.samples_per_prompt
    return -(-samples // machine.ranks) * job.longest_sequence * COLUMN_BYTES
