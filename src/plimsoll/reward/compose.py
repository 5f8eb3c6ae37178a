"""What scores a response: one function, or named parts with weights, each of which may depend on the data source.

The driver makes a RewardSpec of the recipe and imports nothing for it; a worker loads it into a Reward.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.config.reward import RewardConfig, RewardRule
from plimsoll.errors import RecipeError
from plimsoll.reward.call import BrokenContractError, Outcome, score_alone, score_together
from plimsoll.reward.load import BY_SOURCE, load_function
from plimsoll.reward.signature import Function, Kind
from plimsoll.reward.sources import BUILT_IN_SOURCES, find_source
from plimsoll.reward.values import NotARewardError, to_reward
from plimsoll.types import ScoreRequest


@dataclass(slots=True, kw_only=True, frozen=True)
class RuleSpec:
    """A function by its name."""

    setting: str  # the section of the recipe that names it
    function: str
    options: Mapping[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class PartSpec:
    """One of the parts by its name."""

    name: str  # "" where the reward is one function
    rule: RuleSpec
    weight: float


@dataclass(slots=True, kw_only=True, frozen=True)
class RewardSpec:
    """What a worker is to load."""

    parts: tuple[PartSpec, ...]
    sources: Mapping[str, RuleSpec]  # reward.sources; empty where nothing asks for it

    @property
    def by_source(self) -> bool:
        """True when the data source of a row matters."""
        return any(part.rule.function == BY_SOURCE for part in self.parts)

    @property
    def rules(self) -> tuple[RuleSpec, ...]:
        """All that the recipe names."""
        return (*(part.rule for part in self.parts), *self.sources.values())

    @property
    def setting(self) -> str:
        """The key that names the functions."""
        return "reward.parts" if any(part.name for part in self.parts) else "reward.function"

    @property
    def subject(self) -> str:
        """For messages: the setting and what it names."""
        return f"{self.setting} {', '.join(part.name or part.rule.function for part in self.parts)}"

    def without(self, settings: Container[str]) -> "RewardSpec":
        """The rules that stand elsewhere."""
        return RewardSpec(
            parts=tuple(part for part in self.parts if part.rule.setting not in settings),
            sources={source: rule for source, rule in self.sources.items() if rule.setting not in settings},
        )


def reward_spec(config: RewardConfig) -> RewardSpec:
    """From the recipe's words to what a worker loads."""
    if config.parts:
        parts = tuple(
            PartSpec(name=name, rule=_rule(f"reward.parts.{name}", part), weight=part.weight)
            for name, part in config.parts.items()
        )
    else:
        whole = RuleSpec(setting="reward", function=config.function, options=config.options)
        parts = (PartSpec(name="", rule=whole, weight=1.0),)
    spec = RewardSpec(parts=parts, sources={})
    if not spec.by_source:
        return spec
    sources = {source: _rule(f"reward.sources.{source}", rule) for source, rule in config.sources.items()}
    return RewardSpec(parts=parts, sources=sources)


def _rule(setting: str, rule: RewardRule) -> RuleSpec:
    return RuleSpec(setting=setting, function=rule.function, options=rule.options)


@dataclass(slots=True, kw_only=True, frozen=True)
class Part:
    """One of the parts, ready to be called."""

    name: str  # "" where the reward is one function
    function: Function | None  # None: by the row's data source
    weight: float = 1.0


def load_reward(spec: RewardSpec) -> "Reward":
    """Import every function that the recipe names; those of the built-in table of sources wait until a row needs them.

    Raises RecipeError with the causes of all functions that cannot be used.
    """
    causes: list[str] = []

    def load(rule: RuleSpec) -> Function | None:
        if rule.function == BY_SOURCE:
            return None
        try:
            return load_function(rule.function, rule.options, setting=rule.setting)
        except RecipeError as error:
            causes.extend(error.causes)
            return None

    parts = tuple(Part(name=part.name, function=load(part.rule), weight=part.weight) for part in spec.parts)
    sources = {source: function for source, rule in spec.sources.items() if (function := load(rule)) is not None}
    if causes:
        raise RecipeError(causes)
    assert len(sources) == len(spec.sources), "a source that leads back to by_source is refused with the recipe"
    return Reward(parts=parts, sources=sources)


class Reward:
    """The loaded functions. The reward is Σ weight × score over the parts that gave a score."""

    def __init__(self, *, parts: Sequence[Part], sources: Mapping[str, Function]) -> None:
        self._parts = tuple(parts)
        self._sources = sources
        self._table: dict[str, Function] = {}  # built-in rules of the table, as far as rows needed them
        self._by_source = any(part.function is None for part in parts)

    @property
    def kind(self) -> Kind:
        """TRL where any function wants the samples of a prompt together; else the signature of the first."""
        kinds = [function.kind for function in self._named()]
        return Kind.TRL if Kind.TRL in kinds else kinds[0] if kinds else Kind.OURS

    @property
    def needs_answer(self) -> bool:
        """False where all functions are TRL's, which take whatever columns they name."""
        return self._by_source or any(function.kind is not Kind.TRL for function in self._named())

    def missing(self, requests: Iterable[ScoreRequest]) -> list[str]:
        """Built-in rules that these rows need and that are not loaded yet.

        Raises BrokenContractError for a data source without a function.
        """
        if not self._by_source:
            return []
        names = {self._table_name(request) for request in requests} - {None} - self._table.keys()
        return sorted(name for name in names if name)

    def load(self, names: Iterable[str]) -> None:
        """Load what `missing` named. Raises RecipeError."""
        for name in names:
            self._table[name] = load_function(name, {})

    def score(
        self, requests: Sequence[ScoreRequest], after_call: Callable[[], None] = lambda: None
    ) -> Iterator[list[Outcome]]:
        """Score the requests in order; every yielded list is about the next ones. `after_call` follows every call.

        A function of TRL's signature is called once for all, and once more for each response alone when that call
        raised, so that only those at fault are lost; the others are called once a response.
        Raises BrokenContractError for a wrong number of values.
        """
        together = [self._together(part, requests, after_call) for part in self._parts]
        for position, request in enumerate(requests):
            yield [self._one(request, [known.get(position) for known in together], after_call)]

    def _named(self) -> list[Function]:
        return [*(part.function for part in self._parts if part.function), *self._sources.values()]

    def _table_name(self, request: ScoreRequest) -> str | None:
        """The rule of the built-in table; None where `reward.sources` has one."""
        if find_source(self._sources, request.data_source) is not None:
            return None
        name = find_source(BUILT_IN_SOURCES, request.data_source)
        if name is None:
            raise BrokenContractError(f"{BY_SOURCE} has no function for data_source {request.data_source!r}")
        return name

    def _function(self, part: Part, request: ScoreRequest) -> Function:
        if part.function is not None:
            return part.function
        named = find_source(self._sources, request.data_source)
        if named is not None:
            return named
        name = self._table_name(request)
        assert name is not None
        return self._table[name]

    def _together(
        self, part: Part, requests: Sequence[ScoreRequest], after_call: Callable[[], None]
    ) -> dict[int, Outcome]:
        """Outcomes by position, of the functions that are called for several responses at once."""
        calls: dict[int, tuple[Function, list[int]]] = {}
        for position, request in enumerate(requests):
            function = self._function(part, request)
            if function.kind is Kind.TRL:
                calls.setdefault(id(function), (function, []))[1].append(position)
        known: dict[int, Outcome] = {}
        for function, positions in calls.values():
            outcomes = score_together(function, [requests[position] for position in positions])
            after_call()
            known |= zip(positions, outcomes, strict=True) if outcomes is not None else ()
        return known

    def _one(self, request: ScoreRequest, known: Sequence[Outcome | None], after_call: Callable[[], None]) -> Outcome:
        """One response by all parts; the first that fails fails it."""
        scored: list[tuple[Part, Outcome]] = []
        for part, outcome in zip(self._parts, known, strict=True):
            if outcome is None:
                outcome = score_alone(self._function(part, request), request)
                after_call()
            if not part.name:
                return outcome
            if outcome.status == "error":
                return Outcome(value=None, status="error", detail=f"part {part.name}: {outcome.detail}")
            scored.append((part, outcome))
        return _sum(scored)


def _sum(scored: Sequence[tuple[Part, Outcome]]) -> Outcome:
    """Parts without a score are left out; when all are, so is the response."""
    parts: dict[str, float] = {}
    total: float | None = None
    for part, outcome in scored:
        if outcome.value is not None:
            parts[part.name] = outcome.value
            total = (total or 0.0) + part.weight * outcome.value
        parts |= {f"{part.name}/{key}": number for key, number in outcome.parts.items()}
    try:
        return Outcome(value=to_reward(total), status="unscored" if total is None else "ok", parts=parts)
    except NotARewardError:
        return Outcome(value=None, status="error", detail=f"the weighted sum of the parts is {total}: {parts}")
