"""One combination of choices: the largest KV cache that it has room for, and who leaves the device in which phase."""

from dataclasses import dataclass

from plimsoll.config.planned import Choices
from plimsoll.errors import RefusedError
from plimsoll.memory import names
from plimsoll.memory.phases import Phase
from plimsoll.memory.plan.constants import KV_SHARE
from plimsoll.memory.plan.device import GRADIENTS, STEP, exists, phases_of, residents_of, workspace_of
from plimsoll.memory.plan.engine import borrows_parameters, held_kv, is_native, sequence_bytes, useful_kv
from plimsoll.memory.plan.job import Job, Machine
from plimsoll.memory.schedule import NEEDS, Schedule

LEAVING = (names.KV_CACHE, names.ROLLOUT_PARAMETERS, names.OPTIMIZER_STATE, names.ACTOR_PARAMETERS)
"""Who may leave the device, in this order. The first two are dropped and made again, the others copied out and back."""

LEVELS = 3
"""Evictions that a combination may use. 0: what is made again; 1: and the moments; 2: and the policy's parameters."""

_TRIES = 8
"""A smaller cache of the native engine has fewer rows, whose logits give some room back: a few rounds settle it."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Combined:
    """The outcome."""

    choices: Choices
    missing: int
    """Bytes by which the fullest phase is over; 0: it fits."""
    all_missing: int
    """Of all phases together."""
    level: int
    """The highest level that it made use of."""


class Tables:
    """Bytes of one job that many combinations ask for."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.job, self.machine = job, machine
        self.phases = phases_of(job)
        self._leaving: dict[tuple[str, int], frozenset[str]] = {}
        self._residents: dict[str, int] | None = None
        self._workspace: dict[tuple[object, ...], int] = {}

    def residents(self, choices: Choices) -> dict[str, int]:
        """By name; the cache by its size in `choices`."""
        if self._residents is None:
            on_device = choices.model_copy(update={"optimizer_state": "device"})
            self._residents = residents_of(self.job, on_device, self.machine)
        found = {**self._residents, names.KV_CACHE: choices.kv_bytes}
        if choices.optimizer_state == "streamed":
            found[names.OPTIMIZER_STATE] = 0
        return found

    def leaving(self, choices: Choices, phase: str, level: int) -> frozenset[str]:
        """Who may leave for the phase. On a CPU nobody: the host is the device."""
        key = (phase, level)
        if key not in self._leaving:
            word = Phase(phase.partition("/")[0])
            needs = NEEDS[word]
            if names.ROLLOUT_PARAMETERS in needs and borrows_parameters(self.job, choices):
                needs = needs | {names.ACTOR_PARAMETERS}
            if word is Phase.SAVE:
                # It comes between sync and rollout: weights that were dropped for it would be missing.
                needs = needs | {names.ROLLOUT_PARAMETERS}
            fixed = self.machine.device == "cpu" or word is Phase.LOAD  # where residents come into being
            may = () if fixed else (name for name in LEAVING if _level_of(name) <= level)
            self._leaving[key] = frozenset(may) - needs
        return self._leaving[key]

    def workspace(self, choices: Choices, phase: str) -> int:
        """At its highest."""
        depends = {
            GRADIENTS: (choices.activation_checkpointing, choices.token_budget),
            STEP: (choices.optimizer_state,),
            Phase.LOAD.value: (
                choices.reference_placement,
                choices.optimizer_state,
                choices.activation_checkpointing,
                choices.token_budget,
            ),
            Phase.LOGPROB.value: (choices.token_budget,),
            Phase.REFERENCE.value: (choices.token_budget,),
            Phase.ROLLOUT.value: (choices.kv_bytes,),
            Phase.EVAL.value: (choices.kv_bytes,),
        }
        key = (phase, *depends.get(phase, ()))
        loads = phase == Phase.LOAD.value
        if key not in self._workspace:
            # A load takes long to compute, and caches are tried in many sizes.
            of = choices.model_copy(update={"kv_bytes": 0}) if loads else choices
            self._workspace[key] = sum(workspace_of(self.job, of, phase).values())
        found = self._workspace[key]
        # Our own engine comes last in a load: all else of it has had the room of the cache.
        return max(found - choices.kv_bytes, 0) if loads and is_native(self.job) else found


def combine(tables: Tables, choices: Choices, *, level: int, capacity: int) -> Combined:
    """`choices` with a cache and evictions, on a device of `capacity` bytes. RefusedError: see `kv_limit`."""
    return _Combination(tables, choices, level, capacity).run()


def kv_limit(job: Job, choices: Choices, machine: Machine) -> int:
    """Bytes of the cache before anybody asks what else is on the device.

    RefusedError: `rollout.kv_memory` does not hold one sequence.
    """
    if not job.generates:
        return 0
    asked, one = job.recipe.rollout.kv_memory, sequence_bytes(job, choices)
    if asked is not None:
        if asked < one:
            raise RefusedError(
                f"rollout.kv_memory: {int(asked)} bytes do not hold one sequence, which needs {one} bytes"
                " (longest prompt + rollout.max_response_tokens); raise rollout.kv_memory or shorten the sequences"
            )
        return held_kv(job, choices, int(asked)) if is_native(job) else int(asked)
    limit = useful_kv(job, choices)
    if machine.device == "cpu":
        limit = min(limit, int(KV_SHARE * machine.device_bytes))
    return max(held_kv(job, choices, limit), one)


class _Combination:
    def __init__(self, tables: Tables, choices: Choices, level: int, capacity: int) -> None:
        self.tables, self.choices, self.level, self.capacity = tables, choices, level, capacity
        self.job, self.machine = tables.job, tables.machine

    def run(self) -> Combined:
        self.choices = self.choices.model_copy(update={"kv_bytes": self.kv_bytes()})
        evicted: dict[str, tuple[str, ...]] = {}
        missing, used = [0], [0]
        for phase in self.tables.phases:
            away, over = self.evict(phase)
            missing.append(over)
            used += [_level_of(name) for name in away]
            word = phase.partition("/")[0]
            # Both parts of an update have the same residents: nothing is moved inside of it.
            together = {*evicted.get(word, ()), *away}
            if together:
                evicted[word] = tuple(name for name in LEAVING if name in together)
        return Combined(
            choices=self.choices.model_copy(update={"evicted": self.lasting(evicted)}),
            missing=max(missing),
            all_missing=sum(missing),
            level=max(used),
        )

    def lasting(self, evicted: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """Who is away in which phase: whoever has left comes back when a phase needs it, and not before."""
        borrows = is_native(self.job) and borrows_parameters(self.job, self.choices)
        words = dict.fromkeys(phase.partition("/")[0] for phase in self.tables.phases if phase != Phase.LOAD.value)
        found: dict[str, tuple[str, ...]] = {Phase.LOAD.value: evicted.get(Phase.LOAD.value, ())}
        away: set[str] = set()
        for word in (*words, *words):  # a step follows a step
            needed = Schedule(borrowed=frozenset({names.ROLLOUT_PARAMETERS} if borrows else ())).needs(Phase(word))
            away = (away | set(evicted.get(word, ()))) - needed
            found[word] = tuple(name for name in LEAVING if name in away)
        return {word: gone for word, gone in found.items() if gone}

    def kv_bytes(self) -> int:
        """The smaller of what fits and what the work can use; one sequence at least, whether that fits or not."""
        kv = kv_limit(self.job, self.choices, self.machine)
        if not self.job.generates or self.job.recipe.rollout.kv_memory is not None:
            return kv
        one = sequence_bytes(self.job, self.choices)
        staying = [p for p in self.tables.phases if names.KV_CACHE not in self.leaving(p)]
        for _ in range(_TRIES):
            choices = self.choices.model_copy(update={"kv_bytes": kv})
            over = max(self.least(choices, phase) for phase in staying) - self.capacity
            if over <= 0 or kv <= one:
                break
            kv = max(held_kv(self.job, choices, kv - over), one)
        return kv

    def least(self, choices: Choices, phase: str) -> int:
        """Bytes of the phase once everybody has left that may."""
        leaving = self.leaving(phase)
        kept = sum(size for name, size in self.present(choices, phase).items() if name not in leaving)
        return kept + self.tables.workspace(choices, phase)

    def evict(self, phase: str) -> tuple[list[str], int]:
        """Who leaves for the phase, and by how many bytes it is over even so."""
        held = self.present(self.choices, phase)
        over = sum(held.values()) + self.tables.workspace(self.choices, phase) - self.capacity
        away: list[str] = []
        leaving = self.leaving(phase)
        for name in LEAVING:
            if over <= 0:
                break
            if name in leaving and held.get(name):
                away.append(name)
                over -= held[name]
        return away, max(over, 0)

    def leaving(self, phase: str) -> frozenset[str]:
        """Who may leave."""
        return self.tables.leaving(self.choices, phase, self.level)

    def present(self, choices: Choices, phase: str) -> dict[str, int]:
        """Residents of the phase if nobody leaves."""
        residents = self.tables.residents(choices)
        return {name: size for name, size in residents.items() if size and exists(self.job, name, phase, choices)}


def _level_of(name: str) -> int:
    return {names.OPTIMIZER_STATE: 1, names.ACTOR_PARAMETERS: 2}.get(name, 0)
