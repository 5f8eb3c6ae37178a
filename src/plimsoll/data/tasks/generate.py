"""`task:NAME` → rows.

Which split a problem belongs to is a property of its prompt (a hash), not of the seed or of the sizes. So no problem is
ever in both splits, whatever either was generated with. Which problems of a split are taken, and in which order, comes
from the seed; the held-out split has a constant one, so that all runs are measured on the same problems.
"""

import difflib
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import ValidationError

from plimsoll.config.base import Options
from plimsoll.data.sources import RawRow
from plimsoll.data.tasks.options import TaskOptions
from plimsoll.data.tasks.problems import TASKS, Problem, Task
from plimsoll.errors import DataError, RecipeError

Split = Literal["train", "eval"]

EVAL_SEED = 0
"""Held-out problems are the same for every seed of a run."""

EVAL_PARTS = 8
"""One problem of so many is held out: 1250 or so of the 10000 additions of two-digit numbers."""


def generate(name: str, options: Options, *, split: Split, seed: int) -> Iterator[RawRow]:
    """`train_size` or `eval_size` different problems of one split, as rows {prompt, answer, data_source}.

    Raises RecipeError for an unknown task or option, DataError when the split has fewer problems than asked for.
    """
    checked = task_options(name, options)
    size = checked.train_size if split == "train" else checked.eval_size
    problems = _problems(TASKS[name], checked, split=split, seed=seed if split == "train" else EVAL_SEED)
    echo_share = checked.echo_share if split == "train" else 0.0
    return _rows(name, problems, split=split, size=size, echo_share=echo_share)


def task_options(name: str, options: Options) -> TaskOptions:
    """`data.task` as the options of this task. Raises RecipeError with every problem in it."""
    if name not in TASKS:
        raise RecipeError(
            f"task:{name} (data.train, data.eval) is unknown{_nearest(name, TASKS)}; tasks: {', '.join(TASKS)}"
        )
    kind = TASKS[name].options
    known = kind.model_fields
    causes = [
        f"data.task.{key} is not an option of task:{name}{_nearest(key, known)}; options: {', '.join(known)}"
        for key in options
        if key not in known
    ]
    try:
        checked = kind.model_validate({key: value for key, value in options.items() if key in known})
    except ValidationError as error:
        causes += [f"data.task.{e['loc'][0]}={e['input']!r} (task:{name}): {e['msg']}" for e in error.errors()]
        raise RecipeError(causes) from error
    if causes:
        raise RecipeError(causes)
    return checked


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (nearest: {matches[0]})" if matches else ""


def is_held_out(prompt: str) -> bool:
    """Whether the problem with this prompt is held out; depends on the prompt alone."""
    # A lone surrogate in a generated text must not stop the hash.
    return (
        int.from_bytes(hashlib.blake2b(prompt.encode(errors="surrogatepass"), digest_size=8).digest()) % EVAL_PARTS == 0
    )


def shuffled(count: int, key: bytes) -> Iterator[int]:
    """0 … count - 1 in an order keyed by `key`, made as far as it is consumed.

    Fisher-Yates on a virtual array: `moved` holds only the cells that differ from their index, so the first k numbers
    of 10^80 cost k steps.
    """
    moved: dict[int, int] = {}
    for position in range(count):
        word = int.from_bytes(hashlib.blake2b(b"%d" % position, key=key, digest_size=32).digest())
        other = position + word % (count - position)
        yield moved.get(other, other)
        moved[other] = moved.pop(position, position)


def _problems(task: Task, options: TaskOptions, *, split: Split, seed: int) -> Iterator[Problem]:
    """All problems of the split, each once."""
    key = hashlib.blake2b(b"%d" % seed, digest_size=32).digest()
    for index in shuffled(task.count(options), key):
        problem = task.make(options, index)
        if is_held_out(problem.prompt) == (split == "eval"):
            yield problem


def is_echoed(problem: Problem, share: float) -> bool:
    """Whether the demonstration of this problem is careless; depends on its prompt and the share alone."""
    word = hashlib.blake2b(problem.prompt.encode(), digest_size=8, person=b"echo").digest()
    return int.from_bytes(word) < share * 2**64


def _rows(name: str, problems: Iterator[Problem], *, split: Split, size: int, echo_share: float) -> Iterator[RawRow]:
    row = 0
    for problem in itertools.islice(problems, size):
        columns = {"prompt": problem.prompt, "answer": problem.answer, "data_source": f"task:{name}"}
        if echo_share:
            columns["response"] = problem.echo if is_echoed(problem, echo_share) else problem.answer
        yield RawRow(row=row, where=f"problem {row}", columns=columns)
        row += 1
    if row == size:
        return
    raise DataError(
        f"task:{name} has {row} {split} problems with these options, fewer than data.task.{split}_size={size}: "
        "lower it, or make the problems longer"
    )
