"""`gym:NAME` → rows, from the generators of reasoning-gym (extra `tasks`).

As with `task:NAME`, the split that a problem belongs to is a hash of its question: no seed, size or parameter brings a
held-out problem into training. Several names make a mix: `gym:chain_sum,gcd`. Each row carries the whole item in the
column `gym`, because many scorers look at more than the answer; the `reasoning_gym` reward rebuilds it.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import importlib
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import Field, ValidationError

from plimsoll.config.base import Options, Section
from plimsoll.config.extras import how_to_install, installed
from plimsoll.data.sources import RawRow
from plimsoll.data.tasks.generate import EVAL_SEED, Split, is_held_out
from plimsoll.data.tasks.options import SplitSizes
from plimsoll.errors import DataError, RecipeError

CHUNK = 500
"""Items of one data set of reasoning-gym, its own default. Some generators make all items when they are created, and
some refuse large sizes, so more come from further data sets with other seeds."""

PATIENCE = 4000
"""Items in a row without a new problem of the split, after which a generator counts as used up."""

NOT_OPTIONS = ("seed", "size")
"""Fields of every configuration that are set here: `seed` and `data.task.train_size` of the recipe take their place."""


NOT_REPEATABLE = (
    "codeio",
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
"""Generators that depend on the order of sets or on the global random state, which differ in every process: the same
seed makes other problems when a run is resumed, and other held-out ones in every run (reasoning-gym 0.1.25)."""


class Share(Section):
    """What a task of a mix has beside its parameters."""

    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Share of the rows, relative to the other tasks."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GymTask:
    """One generator with its parameters, checked."""

    name: str
    parameters: Options
    weight: float
    key: str  # where the parameters stand in the recipe: data.task or data.task.NAME


@dataclass(slots=True, kw_only=True, frozen=True)
class GymProblem:
    """One item, ready to become a row."""

    question: str
    answer: str  # empty where several answers are right and the generator names none
    item: str  # JSON, see `encode`


def gym_rows(names: str, options: Options, *, split: Split, seed: int) -> Iterator[RawRow]:
    """`train_size` or `eval_size` different problems of one split, tasks interleaved by their weights.

    Args:
        names: what stands behind `gym:`, one name or several with commas.
        options: `data.task`.

    Raises RecipeError for a missing library, an unknown task or parameter, and values that the generator refuses;
    DataError, while rows are read, when a task has too few different problems.
    """
    if not installed("reasoning_gym"):
        raise RecipeError(missing_library(f"gym:{names}"))
    tasks, sizes = gym_tasks(names, options)
    size = sizes.train_size if split == "train" else sizes.eval_size
    return _rows(tasks, split=split, size=size, seed=seed if split == "train" else EVAL_SEED)


def missing_library(source: str) -> str:
    """What to say where the extra is not installed."""
    return (
        f"data.train or data.eval is {source}, and reasoning-gym is not installed: "
        f"{how_to_install('tasks')}, or name a file or task:NAME"
    )


def gym_tasks(names: str, options: Options) -> tuple[tuple[GymTask, ...], SplitSizes]:
    """The tasks of a source and its sizes. Raises RecipeError with every problem in names and options."""
    known = _known()
    wanted = [name.strip() for name in names.split(",")]
    causes = [
        f"gym:{name} (data.train, data.eval) is unknown{_nearest(name, known)}; reasoning-gym has {len(known)} tasks: "
        f"{', '.join(sorted(known))}"
        for name in wanted
        if name not in known
    ]
    causes += [
        f"gym:{name} makes other problems in every process from the same seed, so its runs could not be resumed nor "
        "compared; name another task"
        for name in wanted
        if name in NOT_REPEATABLE
    ]
    causes += [
        f"gym:{name} is named twice in gym:{names}" for name in sorted({n for n in wanted if wanted.count(n) > 1})
    ]
    if causes:
        raise RecipeError(causes)
    sizes, rest = _sizes(options, causes)
    # Parameters under a name may be those of the other source: data.train and data.eval share data.task.
    by_name = {key: value for key, value in rest.items() if key in known and isinstance(value, dict)}
    plain = {key: value for key, value in rest.items() if key not in by_name}
    if len(wanted) > 1:
        causes += [_misplaced(key, wanted, names) for key in plain]
        plain = {}
    tasks = [
        _task(
            name,
            {**plain, **by_name.get(name, {})},
            "data.task" if name not in by_name else f"data.task.{name}",
            causes,
        )
        for name in wanted
    ]
    if causes:
        raise RecipeError(causes)
    for task in tasks:
        _try(task)
    return tuple(tasks), sizes


def encode(value: Any) -> Any:
    """`value` as JSON that `plimsoll.reward.gym.decode` turns back into the same Python value.

    JSON has neither tuples nor sets nor keys that are not text, and scorers depend on all of them: these become
    {"$": kind, "of": [...]}. Raises TypeError for other types.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(entry) for entry in cast(list[Any], value)]
    if isinstance(value, tuple | set | frozenset):
        members = cast("tuple[Any, ...] | set[Any] | frozenset[Any]", value)
        entries = [encode(entry) for entry in members]
        # Sets have another order in every process; the fingerprint of the data may not.
        return {
            "$": _kind(members),
            "of": entries if isinstance(members, tuple) else sorted(entries, key=json.dumps),
        }
    if isinstance(value, Mapping):
        pairs = cast(Mapping[Any, Any], value)
        if "$" not in pairs and all(isinstance(key, str) for key in pairs):
            return {key: encode(entry) for key, entry in pairs.items()}
        return {"$": "dict", "of": [[encode(key), encode(entry)] for key, entry in pairs.items()]}
    raise TypeError(f"a {type(value).__name__}")


def _kind(members: "tuple[Any, ...] | set[Any] | frozenset[Any]") -> str:
    """Named tuples and other subclasses become what they are based on."""
    return "tuple" if isinstance(members, tuple) else "set" if isinstance(members, set) else "frozenset"


def _known() -> Mapping[str, tuple[Any, Any]]:
    """(data set, configuration) of every generator by name. Composites are made by naming several tasks."""
    importlib.import_module("reasoning_gym")  # fills the table
    registered: Mapping[str, tuple[Any, Any]] = vars(importlib.import_module("reasoning_gym.factory"))["DATASETS"]
    return {name: entry for name, entry in registered.items() if name != "composite"}


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=3)
    return f" (nearest: {', '.join(matches)})" if matches else ""


def _sizes(options: Options, causes: list[str]) -> tuple[SplitSizes, Options]:
    """The sizes in `data.task`, and what else stands there."""
    own = SplitSizes.model_fields
    rest = {key: value for key, value in options.items() if key not in own}
    try:
        return SplitSizes.model_validate({key: options[key] for key in own if key in options}), rest
    except ValidationError as error:
        causes += [f"data.task.{e['loc'][0]}={e['input']!r}: {e['msg']}" for e in error.errors()]
        return SplitSizes(), rest


def _misplaced(key: str, wanted: list[str], names: str) -> str:
    return (
        f"data.task.{key}: with several tasks (gym:{names}) parameters stand under a task's name, "
        f"for example data.task.{wanted[0]}.{key}"
    )


def _task(name: str, given: Options, key: str, causes: list[str]) -> GymTask:
    """Appends to `causes` what the task does not know."""
    fields = {f.name: f for f in dataclasses.fields(_known()[name][1]) if f.name not in NOT_OPTIONS}
    parameters = {option: value for option, value in given.items() if option not in Share.model_fields}
    unknown = [option for option in parameters if option not in fields]
    causes += [
        f"{key}.{option} is not a parameter of gym:{name}{_nearest(option, fields)}; parameters: {', '.join(fields)}"
        for option in unknown
    ]
    weight = 1.0
    try:
        weight = Share.model_validate({o: v for o, v in given.items() if o in Share.model_fields}).weight
    except ValidationError as error:
        causes += [f"{key}.{e['loc'][0]}={e['input']!r}: {e['msg']}" for e in error.errors()]
    return GymTask(name=name, parameters=parameters, weight=weight, key=key)


def _try(task: GymTask) -> None:
    """One item of the task, so that values which it cannot work with are refused before anything else starts."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            _dataset(task, seed=0)[0]
        # Checks are assertions there, and what they do not catch raises anything when the first item is made.
        except Exception as error:
            text = str(error) or type(error).__name__
            at_fault = next((option for option in task.parameters if re.search(rf"\b{option}\b", text)), None)
            key = task.key if at_fault is None else f"{task.key}.{at_fault}"
            given = f"={task.parameters[at_fault]!r}" if at_fault else f" ({json.dumps(task.parameters)})"
            raise RecipeError(f"{key}{given} is refused by gym:{task.name}: {text}") from error


def _dataset(task: GymTask, *, seed: int) -> Any:
    create = vars(importlib.import_module("reasoning_gym"))["create_dataset"]
    return create(task.name, **_arguments(task), seed=seed, size=CHUNK)


def _arguments(task: GymTask) -> dict[str, Any]:
    """The parameters with tuples where the generator's own default is one: YAML has only lists."""
    defaults = {field.name: field.default for field in dataclasses.fields(_known()[task.name][1])}
    return {
        name: tuple(value) if isinstance(value, list) and isinstance(defaults[name], tuple) else value
        for name, value in task.parameters.items()
    }


def _problems(task: GymTask, *, split: Split, seed: int) -> Iterator[GymProblem]:
    """Different problems of the split; ends when new ones have become rare."""
    seen: set[str] = set()
    idle = 0
    for chunk in itertools.count():
        word = hashlib.blake2b(f"{task.name} {seed} {chunk}".encode(), digest_size=8).digest()
        for item in _items(task, int.from_bytes(word) % 2**31):
            question: str = item["question"]
            if is_held_out(question) == (split == "eval") and question not in seen:
                seen.add(question)
                idle = 0
                yield _problem(task, item)
            elif (idle := idle + 1) >= PATIENCE:
                return


def _items(task: GymTask, seed: int) -> Iterator[Mapping[str, Any]]:
    dataset = None
    for index in range(CHUNK):
        # Some generators print; stdout is for results.
        with contextlib.redirect_stdout(sys.stderr):
            try:
                dataset = _dataset(task, seed=seed) if dataset is None else dataset
                item = dataset[index]
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                raise DataError(
                    f"gym:{task.name} failed while it made problems ({text}): change its parameters in {task.key}"
                ) from error
        yield item


def _problem(task: GymTask, item: Mapping[str, Any]) -> GymProblem:
    try:
        text = json.dumps(encode(item))
    except TypeError as error:
        raise DataError(f"gym:{task.name} cannot be used: its items hold {error}, which a row cannot carry") from error
    answer = item["answer"]
    return GymProblem(question=item["question"], answer="" if answer is None else str(answer), item=text)


def _interleaved(tasks: tuple[GymTask, ...], size: int) -> Iterator[int]:
    """Index of each row's task: always the one that is furthest behind its share; the first of equals."""
    total = sum(task.weight for task in tasks)
    given = [0] * len(tasks)
    for row in range(size):
        behind = [task.weight / total * (row + 1) - count for task, count in zip(tasks, given, strict=True)]
        chosen = behind.index(max(behind))
        given[chosen] += 1
        yield chosen


def _rows(tasks: tuple[GymTask, ...], *, split: Split, size: int, seed: int) -> Iterator[RawRow]:
    streams = [_problems(task, split=split, seed=seed) for task in tasks]
    configs = [encode(_arguments(task)) for task in tasks]
    taken = [0] * len(tasks)
    for row, index in enumerate(_interleaved(tasks, size)):
        task = tasks[index]
        problem = next(streams[index], None)
        if problem is None:
            raise DataError(
                f"gym:{task.name} has about {taken[index]} different {split} problems with these parameters, too few "
                f"for data.task.{split}_size={size}: lower it, or widen the parameters in {task.key}"
            )
        taken[index] += 1
        gym = {"task": task.name, "config": configs[index], "item": problem.item}
        columns = {"prompt": problem.question, "answer": problem.answer, "data_source": f"gym:{task.name}", "gym": gym}
        yield RawRow(row=row, where=f"problem {row} (gym:{task.name})", columns=columns)
