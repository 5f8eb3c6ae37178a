"""Rules between keys, and what is valid but not built: both refused before anything heavy is imported.

Each check collects every cause and raises one RecipeError. What works but will not do what it seems to is returned as a
note, to be said once. Files are looked at in `files.py`; here only the recipe counts.
"""

from collections.abc import Iterator
from typing import Literal

from plimsoll.config.recipe import Recipe
from plimsoll.config.reward_checks import reward_causes
from plimsoll.errors import RecipeError

GROUP_ALGORITHMS = frozenset({"dapo", "grpo", "dr_grpo", "rloo", "opo", "gspo", "cispo", "reinforce_pp_baseline"})
"""Algorithms whose advantage compares the samples of one prompt."""


def check_train(recipe: Recipe) -> tuple[str, ...]:
    """Everything that `plimsoll train` needs to hold. Returns notes; RecipeError names every broken rule."""
    _refuse(
        _not_built(recipe),
        _model(recipe),
        _reference(recipe),
        _algorithm(recipe),
        _batch(recipe),
        _data(recipe),
        reward_causes(recipe),
    )
    return tuple(_notes(recipe))


def check_sft(recipe: Recipe) -> tuple[str, ...]:
    """Everything that `plimsoll sft` needs to hold; `algorithm` and most of `rollout` are not read by it."""
    _refuse(_not_built(recipe), _model(recipe), _rows(recipe), _data(recipe), reward_causes(recipe))
    return tuple(_notes(recipe))


def check_eval(recipe: Recipe) -> tuple[str, ...]:
    """Everything that `plimsoll eval` needs to hold. The model is the command's argument, not `model.path`. Returns
    notes."""
    _refuse(_not_built(recipe), _eval_rows(recipe), _data(recipe), reward_causes(recipe))
    if recipe.rollout.engine == "native":
        return ()
    return (
        f"`rollout.engine={recipe.rollout.engine}` samples in training alone: this evaluation takes the native engine, "
        "which is slower, and whose rounding may turn a near tie the other way",
    )


def check_plan(recipe: Recipe, objective: Literal["policy", "supervised"]) -> tuple[str, ...]:
    """What a plan needs to hold: the rules of training, but for what is not built yet and what only weights are for."""
    model = () if recipe.model.path is None and recipe.model.config is not None else _model(recipe)
    work = (_rows,) if objective == "supervised" else (_reference, _algorithm, _batch)
    _refuse(iter(model), *(rules(recipe) for rules in work), _mesh(recipe), _data(recipe), reward_causes(recipe))
    return tuple(_notes(recipe))


def _refuse(*groups: Iterator[str]) -> None:
    causes = [cause for group in groups for cause in group]
    if causes:
        raise RecipeError(causes)


def _not_built(recipe: Recipe) -> Iterator[str]:
    """Settings that the schema knows and this version cannot do yet."""
    cluster, parallel = recipe.cluster, recipe.parallel
    settings = (
        ("rollout.engine", recipe.rollout.engine, recipe.rollout.engine == "sglang", "native"),
        ("rollout.tensor_parallel", recipe.rollout.tensor_parallel, recipe.rollout.tensor_parallel > 1, "1"),
        ("cluster.backend", cluster.backend, cluster.backend != "inline", "inline"),
        ("cluster.ranks", cluster.ranks, cluster.ranks > 1, "1"),
        ("cluster.ranks_per_node", cluster.ranks_per_node, cluster.ranks_per_node not in (None, 1), "null"),
        ("cluster.max_restarts", cluster.max_restarts, cluster.max_restarts > 0, "0"),
        ("cluster.min_ranks", cluster.min_ranks, cluster.min_ranks not in (None, 1), "null"),
        ("cluster.stall_timeout", cluster.stall_timeout, cluster.stall_timeout is not None, "null"),
        ("parallel.shard", parallel.shard, parallel.shard not in (None, 1), "null"),
        ("parallel.context", parallel.context, parallel.context > 1, "1"),
        ("parallel.tensor", parallel.tensor, parallel.tensor > 1, "1"),
    )
    for key, value, refused, instead in settings:
        if refused:
            yield f"`{key}={value}` is not in this version; set `{key}` to `{instead}`"


def _model(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    if model.init == "pretrained" and model.path is None:
        yield (
            "`model.path` is not set and `model.init` is `pretrained`: name a Hugging Face folder or a run in "
            "`model.path`, or set `model.init=random` with a `model.config`"
        )
    if model.init == "random" and model.config is None:
        yield "`model.init` is `random`: name a config.json, or a folder that holds one, in `model.config`"
    if model.init == "random" and model.path is not None:
        yield (
            f"`model.path={model.path}` is not read when `model.init` is `random`: set `model.path=null`, "
            "or `model.init=pretrained` to start from its weights"
        )


def _mesh(recipe: Recipe) -> Iterator[str]:
    """How ranks are grouped. Nodes may be filled unevenly: the last one holds what is left."""
    ranks = recipe.cluster.ranks
    for key, value in (
        ("parallel.shard", recipe.parallel.shard),
        ("rollout.tensor_parallel", recipe.rollout.tensor_parallel),
    ):
        if value is not None and ranks % value:
            yield (
                f"`{key}={value}` does not divide `cluster.ranks={ranks}`; set `{key}` to "
                f"{_either(_divisors(ranks, value))}"
            )


def _reference(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    in_memory_only = model.init == "random" and model.reference is None
    placement = model.reference_placement
    if recipe.algorithm.kl_coefficient > 0 and in_memory_only and placement in ("page_cache", "ring"):
        yield (
            f"`model.reference_placement={placement}` reads the reference from its files, and the first weights of a "
            "model with `model.init=random` are in none: set `model.reference_placement` to `device`, `arena` or "
            "`auto`, or name a folder in `model.reference`"
        )


def _algorithm(recipe: Recipe) -> Iterator[str]:
    algorithm, rollout = recipe.algorithm, recipe.rollout
    if algorithm.name in GROUP_ALGORITHMS and rollout.samples_per_prompt < 2:
        yield (
            f"`rollout.samples_per_prompt={rollout.samples_per_prompt}`: a group needs at least 2 samples, because "
            f"`algorithm.name={algorithm.name}` compares the samples of one prompt; set `rollout.samples_per_prompt=2` "
            "or more"
        )
    truncation = [("rollout.top_p", rollout.top_p, 1)] if rollout.top_p < 1 else []
    truncation += [("rollout.top_k", rollout.top_k, 0)] if rollout.top_k > 0 else []
    if algorithm.importance_correction != "none":
        for key, value, off in truncation:
            yield (
                f"`{key}={value:g}` together with `algorithm.importance_correction={algorithm.importance_correction}`: "
                "the engine's log-probs are those of the truncated distribution and the trainer's are not, so their "
                f"ratio means nothing; set `{key}={off}`, or `algorithm.importance_correction=none`"
            )
    if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield (
            "`algorithm.kl_estimator=k1` with `algorithm.kl_in=loss` has an expected gradient of zero; set "
            "`algorithm.kl_estimator=k2`, whose gradient in the loss is the KL's, or `algorithm.kl_in=reward`"
        )
    if algorithm.kl_in == "reward" and algorithm.kl_coefficient > 0 and algorithm.kl_estimator != "k1":
        yield (
            f"`algorithm.kl_estimator={algorithm.kl_estimator}` with `algorithm.kl_in=reward` has not the gradient of "
            "the KL, not even its sign; set `algorithm.kl_estimator=k1`, or `algorithm.kl_in=loss`"
        )
    if algorithm.overlong_buffer >= rollout.max_response_tokens:
        yield (
            f"`algorithm.overlong_buffer={algorithm.overlong_buffer}` must be below "
            f"`rollout.max_response_tokens={rollout.max_response_tokens}`: every response would be penalised; "
            f"set `algorithm.overlong_buffer` to at most {rollout.max_response_tokens - 1}"
        )


def _batch(recipe: Recipe) -> Iterator[str]:
    """Samples of a step over ranks and mini-batches."""
    prompts, samples = recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt
    total, ranks = prompts * samples, recipe.cluster.ranks
    shown = f"`data.prompts_per_step={prompts}` × `rollout.samples_per_prompt={samples}` makes {total} samples a step, "
    if total % ranks:
        # Multiples of the ranks in prompts are multiples in samples too, and keep each group whole on a rank.
        yield (
            f"{shown}which do not divide over `cluster.ranks={ranks}` ({_either(_multiples(total, ranks))} would); "
            f"set `data.prompts_per_step` to {_either(_multiples(prompts, ranks))}, "
            f"or `cluster.ranks` to {_either(_divisors(total, ranks))}"
        )
    mini_batches = recipe.train.mini_batches_per_step
    if total < mini_batches * ranks:
        yield (
            f"{shown}fewer than `train.mini_batches_per_step={mini_batches}` on `cluster.ranks={ranks}` need; "
            f"set `train.mini_batches_per_step` to at most {max(1, total // ranks)}, "
            f"or `data.prompts_per_step` to at least {-(-mini_batches * ranks // samples)}"
        )


def _rows(recipe: Recipe) -> Iterator[str]:
    """Rows of a supervised step over ranks and mini-batches."""
    rows, ranks = recipe.data.prompts_per_step, recipe.cluster.ranks
    if rows % ranks:
        yield (
            f"`data.prompts_per_step={rows}` rows a step do not divide over `cluster.ranks={ranks}`; set "
            f"`data.prompts_per_step` to {_either(_multiples(rows, ranks))}, "
            f"or `cluster.ranks` to {_either(_divisors(rows, ranks))}"
        )
    mini_batches = recipe.train.mini_batches_per_step
    if rows < mini_batches * ranks:
        yield (
            f"`data.prompts_per_step={rows}` rows a step are fewer than `train.mini_batches_per_step={mini_batches}` "
            f"on `cluster.ranks={ranks}` need; set `train.mini_batches_per_step` to at most {max(1, rows // ranks)}"
        )


def _multiples(value: int, of: int) -> list[int]:
    """The nearest multiples of `of` around `value`, none of them 0."""
    below = value // of * of
    return [number for number in (below, below + of) if number > 0]


def _divisors(value: int, near: int) -> list[int]:
    """The divisors of `value` next to `near`: one below (1 at least), one above where there is one."""
    below = next(number for number in range(near - 1, 0, -1) if value % number == 0)
    above = next((number for number in range(near + 1, value + 1) if value % number == 0), None)
    return [below] if above is None else [below, above]


def _either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)


def _data(recipe: Recipe) -> Iterator[str]:
    data, evaluation = recipe.data, recipe.rollout.eval
    if evaluation.samples > 1 and evaluation.temperature == 0:
        yield (
            f"`rollout.eval.samples={evaluation.samples}` with `rollout.eval.temperature=0` repeats one greedy "
            "response; set `rollout.eval.temperature` above 0, or `rollout.eval.samples=1`"
        )
    if recipe.train.eval_every is not None and data.eval is None:
        yield (
            f"`train.eval_every={recipe.train.eval_every}` has nothing to evaluate on: name held-out rows in "
            "`data.eval`, or set `train.eval_every=null`"
        )
    if data.task and not any(source.startswith(("task:", "gym:")) for source in (data.train, data.eval or "")):
        yield (
            "`data.task` holds options of a generator and neither `data.train` nor `data.eval` is `task:NAME` or "
            "`gym:NAME`; "
            "set `data.task={}`"
        )
    for key, size in (
        ("rollout.kv_memory", recipe.rollout.kv_memory),
        ("memory.device_memory", recipe.memory.device_memory),
        ("memory.host_memory", recipe.memory.host_memory),
    ):
        if size == 0:
            yield f"`{key}=0` leaves nothing to work in; set `{key}` above 0, or `{key}=null` for its default"


def _eval_rows(recipe: Recipe) -> Iterator[str]:
    if recipe.data.eval is None:
        yield "`data.eval` is not set: name the rows to evaluate on, for example `data.eval=heldout.jsonl`"


def _notes(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if train.steps is not None and train.epochs != 1:
        yield f"`train.epochs={train.epochs}` is not read, because `train.steps={train.steps}` is set"
