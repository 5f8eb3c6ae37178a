"""What a step moves over PCIe and over the wire, and about how long that and the arithmetic take.

Estimates for choosing between plans, not measurements. Every sample is taken to be as long as it may be, and nothing to
overlap. Bandwidths, in bytes a second:

- PCIe as measured on one H200 (PCIe 5 x 16) with registered host memory: a streamed optimizer 88 GB/s over both
  directions together, the arena 54 each way; a reference from a registered map of its files 18, with registering it,
  through the ring 24.
- Wire, of one rank: 300 GB/s between GPUs of a node (NVLink, 8 GPUs), 25 GB/s between nodes (200 Gbit/s a GPU).
- Arithmetic: 40 % of 989 TFLOP/s (H100 and H200, dense bf16).
"""

from dataclasses import dataclass

from plimsoll.config.planned import Choices
from plimsoll.memory import names
from plimsoll.memory.phases import Phase
from plimsoll.memory.plan.job import ITEMSIZE, Job, Machine
from plimsoll.memory.schedule import NEEDS
from plimsoll.model.sizes import ModelSizes

STREAM_SPEED = 88e9
ARENA_SPEED = 54e9
REFERENCE_SPEED = {"page_cache": 18e9, "ring": 24e9, "arena": ARENA_SPEED}
NODE_SPEED = 300e9
NETWORK_SPEED = 25e9
FLOPS = 0.4 * 989e12

STEP = (Phase.ROLLOUT, Phase.LOGPROB, Phase.REFERENCE, Phase.UPDATE, Phase.SYNC)
"""A step's phases in their order; an update's gradients and step are one."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Moved:
    """One rank in one step."""

    moved_bytes: int
    """Over PCIe, both ways together; 0 without a GPU."""
    wire_bytes: int
    """Sent to other ranks."""
    seconds: dict[str, float]
    """`moved`, `wire`, `compute`; empty without a GPU."""
    notes: tuple[str, ...]


@dataclass(slots=True, kw_only=True, frozen=True)
class _Passes:
    """How often the weights are gone through in a step."""

    tokens: int
    """Of one rank."""
    update: int
    """Micro-batches with forward and backward."""
    score: int
    """Micro-batches of one pass of log-probs."""
    optimizer_steps: int
    logprob: bool
    """Old log-probs are computed: not where each batch gets a single on-policy update."""


def moved(job: Job, choices: Choices, machine: Machine) -> Moved:
    """See the module."""
    passes = _passes(job, choices, machine)
    wire, wire_seconds = _wire(job, choices, machine, passes)
    if choices.device == "cpu":
        return Moved(moved_bytes=0, wire_bytes=wire, seconds={}, notes=())
    pcie, pcie_seconds = _pcie(job, choices, passes)
    seconds = {"moved": pcie_seconds, "wire": wire_seconds, "compute": _compute(job, choices, passes)}
    note = (
        f"Moved bytes and seconds are for samples of full length ({job.longest_sequence} tokens), {passes.tokens} "
        f"tokens a step on each rank, in {passes.update} micro-batches forward and backward; nothing overlaps. "
        f"Seconds: PCIe {STREAM_SPEED / 1e9:.0f} GB/s for streamed moments and {ARENA_SPEED / 1e9:.0f} for evictions "
        f"(measured on an H200), wire {NODE_SPEED / 1e9:.0f} GB/s within a node and {NETWORK_SPEED / 1e9:.0f} between "
        "nodes, arithmetic of the trainer at 40 % of 989 TFLOP/s"
    )
    return Moved(moved_bytes=pcie, wire_bytes=wire, seconds=seconds, notes=(note,))


def _passes(job: Job, choices: Choices, machine: Machine) -> _Passes:
    recipe = job.recipe
    train = recipe.train
    samples = recipe.data.prompts_per_step
    if job.objective == "policy":
        samples *= recipe.rollout.samples_per_prompt
    tokens = -(-samples // machine.ranks) * job.longest_sequence
    of_mini_batch = max(-(-tokens // (train.mini_batches_per_step * max(choices.token_budget, 1))), 1)
    score = train.mini_batches_per_step * of_mini_batch
    rounds = train.epochs_per_rollout if job.objective == "policy" else 1
    several = train.mini_batches_per_step * rounds > 1
    in_reward = job.reference is not None and recipe.algorithm.kl_in == "reward"
    return _Passes(
        tokens=tokens,
        update=rounds * score,
        score=score,
        optimizer_steps=rounds * train.mini_batches_per_step,
        logprob=job.objective == "policy" and (several or in_reward),
    )


def _pcie(job: Job, choices: Choices, passes: _Passes) -> tuple[int, float]:
    """Bytes and seconds."""
    shard = job.sizes.parameter_bytes(ITEMSIZE[job.recipe.model.dtype], job.shard)
    total, seconds = 0, 0.0
    if choices.optimizer_state == "streamed":
        num_bytes = 2 * (2 * shard) * passes.optimizer_steps
        total, seconds = total + num_bytes, seconds + num_bytes / STREAM_SPEED
    for name, size in ((names.ACTOR_PARAMETERS, shard), (names.OPTIMIZER_STATE, 2 * shard)):
        if name == names.OPTIMIZER_STATE and choices.optimizer_state == "streamed":
            continue
        num_bytes = size * _ways(name, choices)
        total, seconds = total + num_bytes, seconds + num_bytes / ARENA_SPEED
    speed = REFERENCE_SPEED.get(choices.reference_placement)
    if job.reference is not None and speed is not None:
        num_bytes = job.reference.parameter_bytes(ITEMSIZE[choices.compute_dtype], job.shard)
        total, seconds = total + num_bytes, seconds + num_bytes / speed
    return total, seconds


def _ways(name: str, choices: Choices) -> int:
    """How often a resident goes out or comes in, in a step that begins as the one before it ended."""
    away = {phase.partition("/")[0] for phase, evicted in choices.evicted.items() if name in evicted}
    ways, out = 0, False
    for _ in range(2):
        ways = 0
        for phase in STEP:
            if phase in away and not out:
                ways, out = ways + 1, True
            elif phase not in away and out and name in NEEDS[phase]:
                ways, out = ways + 1, False
    return ways


def _wire(job: Job, choices: Choices, machine: Machine, passes: _Passes) -> tuple[int, float]:
    """Bytes and seconds. A ring of N ranks sends (N - 1) / N of what each has in the end, or had at first."""
    compute, master = ITEMSIZE[choices.compute_dtype], ITEMSIZE[job.recipe.model.dtype]
    reduce = max(compute, ITEMSIZE["float32"])
    sharded = 0.0
    if job.shard > 1:
        # Layers are gathered for the forward and again for the backward; the root keeps its own in between.
        sharded += passes.update * (2 * _layers(job.sizes) + _root(job.sizes)) * compute
        sharded += passes.update * job.sizes.num_parameters * reduce
        if passes.logprob:
            sharded += (passes.score * _layers(job.sizes) + _root(job.sizes)) * compute
        if job.reference is not None:
            sharded += passes.score * job.reference.num_parameters * compute
        if job.generates and job.objective == "policy":
            native = job.recipe.rollout.engine == "native"
            sharded += job.sizes.num_parameters * (master if native else compute)
        sharded *= (job.shard - 1) / job.shard
    replicas = job.replicas
    replicated = 0.0
    if replicas > 1:
        shard = job.sizes.parameter_bytes(reduce, job.shard)
        replicated = passes.optimizer_steps * 2 * (replicas - 1) / replicas * shard
    within = NODE_SPEED if job.shard <= machine.ranks_per_node else NETWORK_SPEED
    between = NODE_SPEED if machine.nodes == 1 else NETWORK_SPEED
    return round(sharded + replicated), sharded / within + replicated / between


def _layers(sizes: ModelSizes) -> int:
    """Elements."""
    return sum(layer.num_parameters for layer in sizes.layers)


def _root(sizes: ModelSizes) -> int:
    """Elements."""
    return sizes.num_parameters - _layers(sizes)


def _compute(job: Job, choices: Choices, passes: _Passes) -> float:
    """Seconds of the trainer. A backward is two forwards, and what is checkpointed one more."""
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[choices.activation_checkpointing]
    rounds = passes.update / passes.score
    context = job.longest_sequence / 2
    forward = job.sizes.forward_flops(passes.tokens, context)
    flops = forward * ((3 + again) * rounds + passes.logprob)
    if job.reference is not None:
        flops += job.reference.forward_flops(passes.tokens, context)
    return flops / FLOPS
