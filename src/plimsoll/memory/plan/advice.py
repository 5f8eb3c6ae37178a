"""What would make a refused run fit: settings that are tried by planning again, never by arithmetic.

A setting counts when it makes the whole plan fit, on every phase, device and host. Where none does alone, the settings
are laid on top of one another in the order in which they cost little, until the plan fits; what turns out not to be
needed is taken off again, and what is needed goes no further than it must.

Nothing here changes what is learned but by name: precision is never among the advice, and shorter sequences come last.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from plimsoll.config.base import Section
from plimsoll.config.checks import check_plan
from plimsoll.config.planned import Advice, Choices, MemoryPlan, Refusal
from plimsoll.config.recipe import Recipe
from plimsoll.errors import RefusedError
from plimsoll.memory.phases import Phase
from plimsoll.memory.plan.engine import sequence_bytes
from plimsoll.memory.plan.host import HOST
from plimsoll.memory.plan.job import MIB, Job, Machine

Replan = Callable[[Job], MemoryPlan]
"""The plan of a changed job on the same machine; without advice of its own."""

Value = str | int | bool

NOTHING_HELPS = "Nothing helps"
"""How the sentence begins that stands among a plan's notes where its advice is empty."""

_LEAST_CHUNK = 128
"""Tokens of logits at once, below which the head's matrix products are too thin to be worth it."""
_LEAST_TOKENS = 64
"""Tokens of a response or a prompt, below which shortening it further is another task."""
_LEAST_STAGING = 2**20
_SIZES = ("rollout.kv_memory", "checkpoint.staging_memory")
"""Keys in bytes."""
_HALVINGS = 12


@dataclass(slots=True, kw_only=True, frozen=True)
class Candidate:
    """One key and what it may be set to, from the least change to the greatest."""

    key: str
    values: tuple[Value, ...]


@dataclass(slots=True, kw_only=True, frozen=True)
class Advised:
    """The answer for a refused plan."""

    advice: tuple[Advice, ...]
    nothing_helps: str | None
    """Where `advice` is empty: the sentence that says so."""


def advise(job: Job, machine: Machine, refused: MemoryPlan, replan: Replan) -> tuple[Advice, ...]:
    """Each entry, applied whole, makes the plan fit. Single settings first; a combination where there is none."""
    return find_advice(job, machine, refused, replan).advice


def find_advice(job: Job, machine: Machine, refused: MemoryPlan, replan: Replan) -> Advised:
    """`advise`, and the sentence for when nothing helps."""
    return _Search(job, machine, refused, replan).run()


def refusal_error(plan: MemoryPlan) -> RefusedError:
    """What a run that does not fit ends with: every refusal with its numbers, then what would help."""
    assert not plan.fits, "a plan that fits is not refused"
    return RefusedError([*refusal_lines(plan), *advice_lines(plan)])


def refusal_lines(plan: MemoryPlan) -> list[str]:
    """One sentence for each thing that does not fit."""
    return [_refusal_line(refusal) for refusal in plan.refusals]


def advice_lines(plan: MemoryPlan) -> list[str]:
    """One sentence for each entry of `plan.advice`."""
    if not plan.advice:
        known = [note for note in plan.notes if note.startswith(NOTHING_HELPS)]
        return known or [f"{NOTHING_HELPS}: no setting, and no combination of those that plimsoll tries, makes it fit"]
    worst = _worst(plan)
    where = "on the node" if worst.phase == HOST else f"in {worst.phase}"
    lines: list[str] = []
    for entry in plan.advice:
        alone = "alone makes" if len(entry.set) == 1 else "together make"
        lines.append(f"{' '.join(entry.set)} {alone} it fit: {size(entry.frees_bytes)} less {where}")
    return lines


def size(num_bytes: int) -> str:
    """For people: three digits and a unit."""
    value, unit = float(num_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.0f} B" if unit == "B" else f"{value:.{max(0, 3 - len(str(int(abs(value)))))}f} {unit}"


def _refusal_line(refusal: Refusal) -> str:
    short = size(refusal.need_bytes - refusal.have_bytes)
    largest = f"; the largest part is {refusal.largest}" if refusal.largest else ""
    need = f"needs {size(refusal.need_bytes)} and has {size(refusal.have_bytes)}, {short} short{largest}"
    if refusal.phase == HOST:
        return f"host memory: the node of rank {refusal.rank} {need}"
    return f"device memory: {refusal.phase} on rank {refusal.rank} {need}"


def with_settings(job: Job, settings: Sequence[tuple[str, Value]]) -> Job:
    """The job of the recipe with these settings. The data stays what it is: its lengths change only where a limit cuts
    them."""
    recipe = job.recipe
    for key, value in settings:
        recipe = _set(recipe, key.split("."), value)
    old, new = job.recipe, recipe
    prompt = min(job.longest_prompt, new.data.max_prompt_tokens)
    sequence = job.longest_sequence
    if job.objective == "policy":
        sequence = min(sequence, prompt + new.rollout.max_response_tokens)
    engines = -(-job.num_sequences * new.rollout.tensor_parallel // old.rollout.tensor_parallel)
    return replace(job, recipe=new, longest_prompt=prompt, longest_sequence=sequence, num_sequences=engines)


def _set(recipe: Recipe, path: Sequence[str], value: Value) -> Recipe:
    section, leaf = path
    inside: Section = dict(recipe)[section]
    return recipe.model_copy(update={section: inside.model_copy(update={leaf: value})})


class _Search:
    """One refused plan. Plans that were made are kept: the combination asks for many of them again."""

    def __init__(self, job: Job, machine: Machine, refused: MemoryPlan, replan: Replan) -> None:
        self.job = job
        self.machine = machine
        self.refused = refused
        self.replan = replan
        self.worst = _worst(refused)
        self.plans: dict[tuple[tuple[str, Value], ...], MemoryPlan | None] = {}

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        found = _candidates(self.job, self.machine, self.refused.choices)
        return tuple(candidate for candidate in found if candidate.values)

    def run(self) -> Advised:
        singles = [
            self.entry([(candidate.key, value)])
            for candidate in self.candidates
            for value in [self.first_that_fits(candidate, [])]
            if value is not None
        ]
        if singles:
            return Advised(advice=tuple(singles), nothing_helps=None)
        settings, plan = self.pile()
        if plan.fits:
            return Advised(advice=(self.entry(self.trimmed(settings)),), nothing_helps=None)
        return Advised(advice=(), nothing_helps=self.nothing_helps(settings, plan))

    def plan(self, settings: Sequence[tuple[str, Value]]) -> MemoryPlan | None:
        """None: the settings break a rule of the recipe, or cannot be planned."""
        key = tuple(settings)
        if key not in self.plans:
            changed = with_settings(self.job, settings)
            try:
                check_plan(changed.recipe, self.job.objective)
                self.plans[key] = self.replan(changed)
            except RefusedError:
                self.plans[key] = None
        return self.plans[key]

    def first_that_fits(self, candidate: Candidate, others: Sequence[tuple[str, Value]]) -> Value | None:
        """The least change of the key that is enough beside the other settings."""
        # From the far end: where the greatest change does not help, no smaller one does.
        values = candidate.values
        if not self.fits([*others, (candidate.key, values[-1])]):
            return None
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            if self.fits([*others, (candidate.key, values[middle])]):
                high = middle
            else:
                low = middle + 1
        return values[high]

    def fits(self, settings: Sequence[tuple[str, Value]]) -> bool:
        plan = self.plan(settings)
        return plan is not None and plan.fits

    def pile(self) -> tuple[list[tuple[str, Value]], MemoryPlan]:
        """Settings on top of one another, each of which takes something off what is missing, until the plan fits.

        What made it worse at first may help once another phase fits: all are asked again as long as any is added.
        """
        settings: list[tuple[str, Value]] = []
        best = self.refused
        grew = True
        while grew and not best.fits:
            grew = False
            for candidate in self.candidates:
                if best.fits or any(key == candidate.key for key, _ in settings):
                    continue
                attempt = [*settings, (candidate.key, candidate.values[-1])]
                plan = self.plan(attempt)
                if plan is not None and _missing(plan) < _missing(best):
                    settings, best, grew = attempt, plan, True
        by_cost = [candidate.key for candidate in self.candidates]
        return sorted(settings, key=lambda setting: by_cost.index(setting[0])), best

    def trimmed(self, settings: list[tuple[str, Value]]) -> list[tuple[str, Value]]:
        """Without what is not needed, dearest first, and with the least change of what is."""
        for setting in reversed(settings):
            without = [other for other in settings if other != setting]
            if self.fits(without):
                settings = without
        for key, value in reversed(settings):
            candidate = next(c for c in self.candidates if c.key == key and value in c.values)
            others = [setting for setting in settings if setting[0] != key]
            milder = self.first_that_fits(candidate, others)
            assert milder is not None, "the greatest change of it was seen to fit"
            settings = [(k, milder if k == key else v) for k, v in settings]
        return settings

    def entry(self, settings: Sequence[tuple[str, Value]]) -> Advice:
        plan = self.plan(settings)
        assert plan is not None
        assert plan.fits, "advice is only what was seen to fit"
        frees = self.worst.need_bytes - _need(plan, self.worst)
        return Advice(set=tuple(_written(setting) for setting in settings), frees_bytes=frees)

    def nothing_helps(self, settings: Sequence[tuple[str, Value]], plan: MemoryPlan) -> str:
        left = _worst(plan)
        tried = " ".join(_written(setting) for setting in settings)
        smallest = f"with {tried}" if tried else "whatever is set"
        takes = "more ranks, larger devices, or a smaller model"
        if left.phase == HOST or self.machine.device == "cpu":
            takes = "more host memory, fewer ranks on a node, or a smaller model"
        where = "the host of a node" if left.phase == HOST else left.phase
        return (
            f"{NOTHING_HELPS}: {smallest}, {where} still needs {size(left.need_bytes)} of "
            f"{size(left.have_bytes)}. It takes {takes}"
        )


def _written(setting: tuple[str, Value]) -> str:
    """As an argument of the command line."""
    key, value = setting
    if isinstance(value, bool):
        return f"{key}={str(value).lower()}"
    if key in _SIZES and isinstance(value, int) and value % MIB == 0:
        return f"{key}={value // MIB}MiB"
    return f"{key}={value}"


def _short(refusal: Refusal) -> int:
    return refusal.need_bytes - refusal.have_bytes


def _worst(plan: MemoryPlan) -> Refusal:
    """Most is missing there. A load that measures a micro-batch lacks what the update lacks: then it is the update."""
    return max(plan.refusals, key=lambda refusal: (_short(refusal), refusal.phase != Phase.LOAD))


def _missing(plan: MemoryPlan) -> int:
    return sum(map(_short, plan.refusals))


def _need(plan: MemoryPlan, refusal: Refusal) -> int:
    if refusal.phase == HOST:
        return max(plan.host.node_peak_bytes)
    rows = [row for row in plan.phases if row.slot == refusal.slot]
    same = [row for row in rows if row.phase == refusal.phase]
    return max((row.device_bytes for row in same or rows), default=0)


def _candidates(job: Job, machine: Machine, choices: Choices) -> Iterator[Candidate]:
    """From what costs little to what costs much."""
    recipe = job.recipe
    if choices.optimizer_state == "device" and machine.device == "cuda":  # without a GPU the host is the device
        yield Candidate(key="train.optimizer_state", values=("streamed",))
    stronger = {"none": ("selective", "full"), "selective": ("full",), "full": ()}
    yield Candidate(key="train.activation_checkpointing", values=stronger[choices.activation_checkpointing])
    yield Candidate(key="train.token_budget", values=_budgets(choices.token_budget, job.longest_sequence))
    yield Candidate(key="train.logprob_chunk", values=_halves(recipe.train.logprob_chunk, _LEAST_CHUNK))
    if job.generates:
        least = sequence_bytes(job, choices)
        yield Candidate(key="rollout.kv_memory", values=_steps_down(choices.kv_bytes, least))
    if job.reference is not None:
        others = [place for place in ("page_cache", "ring", "arena") if place != choices.reference_placement]
        for place in others:
            yield Candidate(key="model.reference_placement", values=(place,))
    if choices.optimizer_state == "streamed":
        yield Candidate(key="train.optimizer_state", values=("device",))
    if job.recipe.checkpoint.background:
        yield Candidate(key="checkpoint.background", values=(False,))
    yield Candidate(
        key="checkpoint.staging_memory", values=_halves(int(recipe.checkpoint.staging_memory), _LEAST_STAGING)
    )
    if recipe.rollout.engine != "native":
        yield Candidate(
            key="rollout.tensor_parallel",
            values=_larger_divisors(gcd(machine.ranks_per_node, machine.ranks), recipe.rollout.tensor_parallel),
        )
    yield Candidate(key="parallel.shard", values=_larger_divisors(machine.ranks, job.shard))
    if job.objective == "policy":
        least = max(_LEAST_TOKENS, recipe.algorithm.overlong_buffer + 1)
        yield Candidate(key="rollout.max_response_tokens", values=_halves(recipe.rollout.max_response_tokens, least))
    yield Candidate(key="data.max_prompt_tokens", values=_halves(job.longest_prompt, _LEAST_TOKENS))


def _budgets(budget: int, longest: int) -> tuple[int, ...]:
    """Halves down to the longest sequence, which a micro-batch must hold, and that itself."""
    found = [value for value in _halves(budget, longest) if value > longest]
    return (*found, longest) if budget > longest else ()


def _halves(value: int, least: int) -> tuple[int, ...]:
    return tuple(value >> shift for shift in range(1, _HALVINGS) if value >> shift >= least)


def _steps_down(value: int, least: int) -> tuple[int, ...]:
    """Sixteenths of what there is, then halves, in whole MiB."""
    steps = [value * part // 16 for part in range(15, 1, -1)] + list(_halves(value // 8, least))
    rounded = [step // MIB * MIB if step >= MIB else step for step in steps]
    return tuple(dict.fromkeys(step for step in rounded if step >= least))


def _larger_divisors(of: int, than: int) -> tuple[int, ...]:
    return tuple(number for number in range(than + 1, of + 1) if of % number == 0)
