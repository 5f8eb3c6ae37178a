"""What the plan decides where the recipe says `auto` or nothing, and the whole plan.

Every combination of what is left open is tried. Of those that fit, on devices and hosts, the one is taken that

1. has a KV cache for more than a few sequences,
2. moves the fewest bytes over PCIe in a step,
3. recomputes the least in a backward,
4. evicts the least.

The token budget goes down only if nothing fits with it. Nothing that fits is moved: residents leave one after the other
(what is made again first), in those phases alone that would not fit with them. What is chosen leaves a little of a GPU
free, for the allocator; only if nothing does so is all of it used. What the recipe says always counts.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Literal

from plimsoll.config.planned import Choices, MemoryPlan, PlannedHost, PlannedPhase, Refusal
from plimsoll.memory.plan.advice import find_advice
from plimsoll.memory.plan.combine import LEVELS, Combined, Tables, combine, kv_limit
from plimsoll.memory.plan.constants import ALLOCATOR_SHARE, TOKEN_BUDGET
from plimsoll.memory.plan.device import GRADIENTS, device_phases, largest_part
from plimsoll.memory.plan.engine import sequence_bytes, useful_kv
from plimsoll.memory.plan.host import host_notes, host_plan, host_refusals, ranks_by_node, with_host_bytes
from plimsoll.memory.plan.job import ITEMSIZE, Job, Machine
from plimsoll.memory.plan.moved import moved

_RECOMPUTED = {"none": 0, "selective": 1, "full": 2}

_FEW_SEQUENCES = 16
"""With a cache for fewer, generating is so slow that anything else is better; with nothing else it will do."""


def plan(job: Job, machine: Machine) -> MemoryPlan:
    """The whole plan; of one that does not fit, also what would help."""
    found = plan_without_advice(job, machine)
    if found.fits:
        return found
    replan: Callable[[Job], MemoryPlan] = partial(_sketch, machine=machine)
    advised = find_advice(job, machine, found, replan)
    said = () if advised.nothing_helps is None else (advised.nothing_helps,)
    return found.model_copy(update={"advice": advised.advice, "notes": (*found.notes, *said)})


def plan_without_advice(job: Job, machine: Machine) -> MemoryPlan:
    """The plan; of one that does not fit only what is missing. RefusedError: see `choose`."""
    choices = choose(job, machine)
    phases = with_host_bytes(job, choices, machine, device_phases(job, choices, machine))
    host = host_plan(job, choices, machine, phases)
    refusals = (*_over(phases), *host_refusals(host, machine))
    step = moved(job, choices, machine)
    sizes = job.sizes
    return MemoryPlan(
        fits=not refusals,
        phases=phases,
        host=host,
        moved_bytes_per_step=step.moved_bytes,
        wire_bytes_per_step=step.wire_bytes,
        seconds_per_step=step.seconds,
        refusals=refusals,
        choices=choices,
        model={
            "family": sizes.family,
            "parameters": sizes.num_parameters,
            "active_parameters": sizes.active_parameters,
            "kv_bytes_per_token": sizes.kv_bytes_per_token(ITEMSIZE[choices.compute_dtype]),
            "state_bytes_per_sequence": sizes.state_bytes_per_sequence(),
            "forward_flops_per_token": round(sizes.forward_flops(1, job.longest_sequence / 2)),
        },
        calibrated=GRADIENTS in job.measured,
        notes=(*step.notes, *host_notes(job)),
    )


def _sketch(job: Job, machine: Machine) -> MemoryPlan:
    """What a search over many settings asks: does it fit, and what is missing. Without costs and file cache."""
    choices = choose(job, machine)
    phases = with_host_bytes(job, choices, machine, device_phases(job, choices, machine))
    peak = max(row.host_bytes for row in phases)
    nodes = tuple(peak * len(ranks) for ranks in ranks_by_node(machine))
    host = PlannedHost(node_peak_bytes=nodes, rank_peak_bytes=(), file_cache_bytes=())
    refusals = (*_over(phases), *host_refusals(host, machine))
    return MemoryPlan(
        fits=not refusals,
        phases=phases,
        host=host,
        moved_bytes_per_step=0,
        wire_bytes_per_step=0,
        refusals=refusals,
        choices=choices,
    )


def choose(job: Job, machine: Machine) -> Choices:
    """See the module. Where nothing fits: what comes nearest.

    RefusedError: `rollout.kv_memory` does not hold one sequence.
    """
    tables = Tables(job, machine)
    found, fits = _search(tables, machine.device_bytes)
    if fits and machine.device == "cuda":
        roomy, fits = _search(tables, int((1 - ALLOCATOR_SHARE) * machine.device_bytes))
        return roomy if fits else found
    return found


def _search(tables: Tables, capacity: int) -> tuple[Choices, bool]:
    """The best choices on devices of `capacity` bytes, and whether they fit, on the host too."""
    job, machine = tables.job, tables.machine
    nearest: Combined | None = None
    for budget in _budgets(job, machine):
        found = list(_combinations(tables, budget, capacity))
        fitting = sorted((each for each in found if not each.missing), key=partial(_cost, job, machine))
        for each in fitting:
            if _fits_host(job, each.choices, machine):
                return each.choices, True
        near = [*fitting[:1], *found]  # where the host is too small for all of them, the first says so
        best = min(near, key=lambda each: (each.missing, each.all_missing))
        if nearest is None or best.missing < nearest.missing:
            nearest = best
    assert nearest is not None
    return nearest.choices, False


def _fits_host(job: Job, choices: Choices, machine: Machine) -> bool:
    rows = with_host_bytes(job, choices, machine, device_phases(job, choices, machine))
    return max(row.host_bytes for row in rows) * min(machine.ranks_per_node, machine.ranks) <= machine.host_bytes


def first_choices(job: Job, machine: Machine) -> Choices:
    """What would be chosen if memory were no question: nothing is moved, streamed or recomputed. RefusedError: see
    `choose`."""
    choices = next(_open_choices(job, machine, next(_budgets(job, machine))))
    return choices.model_copy(update={"kv_bytes": kv_limit(job, choices, machine)})


def _combinations(tables: Tables, budget: int, capacity: int) -> Iterator[Combined]:
    for choices in _open_choices(tables.job, tables.machine, budget):
        found = combine(tables, choices, level=0, capacity=capacity)
        yield found
        if not found.missing and not _is_cramped(tables.job, found.choices):
            continue
        most = combine(tables, choices, level=LEVELS - 1, capacity=capacity)
        for level in range(1, most.level + 1):
            yield most if level == most.level else combine(tables, choices, level=level, capacity=capacity)


def _cost(job: Job, machine: Machine, found: Combined) -> tuple[int, ...]:
    choices = found.choices
    return (
        int(_is_cramped(job, choices)),
        moved(job, choices, machine).moved_bytes,
        _RECOMPUTED[choices.activation_checkpointing],
        sum(len(away) for away in choices.evicted.values()),
    )


def _is_cramped(job: Job, choices: Choices) -> bool:
    """Whether the cache is chosen here, and holds only a few sequences of many."""
    few = min(useful_kv(job, choices), _FEW_SEQUENCES * sequence_bytes(job, choices))
    return job.generates and job.recipe.rollout.kv_memory is None and choices.kv_bytes < few


def _budgets(job: Job, machine: Machine) -> Iterator[int]:
    """Tokens of a micro-batch, from what is asked for down to the longest sequence."""
    asked = job.recipe.train.token_budget
    if asked is not None:
        yield asked
        return
    budget = max(TOKEN_BUDGET[machine.device], job.longest_sequence)
    yield budget
    while budget > job.longest_sequence:
        budget = max(budget // 2, job.longest_sequence)
        yield budget


def _open_choices(job: Job, machine: Machine, budget: int) -> Iterator[Choices]:
    """Every combination of what the recipe leaves open; the first one moves and recomputes nothing."""
    recipe, on_gpu = job.recipe, machine.device == "cuda"
    dtype = recipe.model.compute_dtype
    if dtype == "auto":
        dtype = "bfloat16" if on_gpu else recipe.model.dtype
    checkpointing: tuple[Literal["none", "full", "selective"], ...]
    checkpointing = ("none", "selective", "full") if on_gpu else ("none",)
    if recipe.train.activation_checkpointing != "auto":
        checkpointing = (recipe.train.activation_checkpointing,)
    # Without a GPU the host is the device: putting something there frees nothing.
    moments: tuple[Literal["device", "streamed"], ...] = ("device", "streamed") if on_gpu else ("device",)
    if recipe.train.optimizer_state != "auto":
        moments = (recipe.train.optimizer_state,)
    in_files = recipe.model.reference is not None or recipe.model.init == "pretrained"
    placements: tuple[Literal["device", "page_cache", "ring", "arena"], ...] = ("device",)
    if recipe.model.reference_placement != "auto":
        placements = (recipe.model.reference_placement,)
    elif job.reference is not None and on_gpu:
        placements = ("device", "page_cache" if in_files else "arena")
    for moment, placement, recomputed in product(moments, placements, checkpointing):
        yield Choices(
            device=machine.device,
            compute_dtype=dtype,
            activation_checkpointing=recomputed,
            token_budget=budget,
            optimizer_state=moment,
            reference_placement=placement,
            kv_bytes=0,
        )


def _over(phases: Sequence[PlannedPhase]) -> tuple[Refusal, ...]:
    """Phases that do not fit on the device."""
    return tuple(
        Refusal(
            slot=row.slot,
            phase=row.phase,
            rank=0,
            need_bytes=row.device_bytes,
            have_bytes=row.capacity_bytes,
            largest=largest_part(row),
        )
        for row in phases
        if row.headroom_bytes < 0
    )
