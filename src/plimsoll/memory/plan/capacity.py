"""What the machine has, and what the work is, as far as a recipe alone tells. No torch, no CUDA context, no data."""

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from plimsoll.config.recipe import Recipe
from plimsoll.errors import RefusedError
from plimsoll.memory.host import HostReader
from plimsoll.memory.plan.job import Job, Machine
from plimsoll.model.sizes import ModelSizes, read_sizes

Objective = Literal["policy", "supervised"]

_STEP = re.compile(r"step_(\d+)")


@dataclass(slots=True, kw_only=True, frozen=True)
class Gpus:
    """GPUs that this process may use."""

    count: int
    total_bytes: int
    """Of the smallest."""


def machine(recipe: Recipe, *, device: Literal["cpu", "cuda"] | None = None) -> Machine:
    """Capacities that the plan is held against.

    `device`: where the run is known to compute; None: on a GPU where the recipe says how large one is or where there is
    one, else on the CPU. RefusedError: a run on GPUs whose size nobody knows.
    """
    gpus = find_gpus()
    stated = recipe.memory.device_memory
    kind = device or ("cuda" if gpus or stated else "cpu")
    ranks = recipe.cluster.ranks
    ranks_per_node = min(recipe.cluster.ranks_per_node or ranks, ranks)
    # A plan can also be made far from the machine that it is for: then what the recipe says is all there is.
    here = kind == "cpu" or (gpus is not None and gpus.count >= ranks)
    host_bytes = _host_bytes(recipe, here=here)
    if kind == "cpu":
        device_bytes = host_bytes // ranks_per_node
        device_bytes = min(device_bytes, int(stated or device_bytes))
    elif gpus is not None:
        device_bytes = min(gpus.total_bytes, int(stated or gpus.total_bytes))
    elif stated:
        device_bytes = int(stated)
    else:
        raise RefusedError("there is no GPU here: say in `memory.device_memory` how much memory one has")
    return Machine(
        device=kind, device_bytes=device_bytes, host_bytes=host_bytes, ranks=ranks, ranks_per_node=ranks_per_node
    )


def find_gpus() -> Gpus | None:
    """By the driver alone, which makes no context; None: no driver or no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    totals: list[int] = []
    for number in range(count.value):
        handle, total = ctypes.c_int(), ctypes.c_size_t()
        if driver.cuDeviceGet(ctypes.byref(handle), number) or driver.cuDeviceTotalMem_v2(ctypes.byref(total), handle):
            return None
        totals.append(total.value)
    return Gpus(count=len(totals), total_bytes=min(totals))


def _host_bytes(recipe: Recipe, *, here: bool) -> int:
    """Of a node: what the recipe says, and of the machine that it will run on no more than there is now."""
    stated = recipe.memory.host_memory
    if stated is not None and not here:
        return int(stated)
    reader = HostReader()
    available = reader.read().available
    limits = [available if available is not None else psutil.virtual_memory().available, reader.limit, stated]
    reader.close()
    return min(int(limit) for limit in limits if limit is not None)


def job_of(recipe: Recipe, objective: Objective) -> Job:
    """The work as the recipe bounds it; the data is not read. RefusedError: nothing says what the model is."""
    sizes = read_sizes(_policy_config(recipe))
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    if objective == "supervised":
        longest = min(longest, sizes.max_positions or longest)
    return Job(
        recipe=recipe,
        sizes=sizes,
        reference=_reference(recipe, sizes) if objective == "policy" else None,
        objective=objective,
        generates=objective == "policy" or recipe.data.eval is not None,
        longest_prompt=recipe.data.max_prompt_tokens,
        longest_sequence=longest,
        num_sequences=_num_sequences(recipe, objective),
    )


def assumptions(job: Job, have: Machine) -> tuple[str, ...]:
    """What a job of the recipe alone takes for granted, in sentences."""
    recipe = job.recipe
    notes = [
        f"Lengths are the recipe's limits, for the data is not read: prompts of {job.longest_prompt} tokens, sequences "
        f"of {job.longest_sequence}"
    ]
    if job.objective == "supervised":
        notes.append(
            "The rows' own targets decide how long a sequence is; here it is `data.max_prompt_tokens` and "
            "`rollout.max_response_tokens` together, at most what the model has positions for"
        )
    if job.generates and recipe.data.eval is not None and recipe.data.max_eval_rows is None:
        notes.append("How many rows an evaluation has is not known: the KV cache is planned for a step's samples")
    if have.device == "cuda" and recipe.memory.host_memory is None and have.ranks > 1:
        notes.append("A node has the host memory of this machine; `memory.host_memory` says what it has elsewhere")
    return tuple(notes)


def _num_sequences(recipe: Recipe, objective: Objective) -> int:
    """In flight at once in one engine."""
    rollout = recipe.rollout
    training = recipe.data.prompts_per_step * rollout.samples_per_prompt if objective == "policy" else 0
    held_out = (recipe.data.max_eval_rows or 0) * rollout.eval.samples if recipe.data.eval is not None else 0
    engines = max(recipe.cluster.ranks // rollout.tensor_parallel, 1)
    return max(-(-max(training, held_out) // engines), 1)


def _policy_config(recipe: Recipe) -> Path:
    """The config of what is trained: of the weights where they are here, else `model.config`."""
    model = recipe.model
    if model.init == "pretrained" and model.path is not None:
        found = _config_in(Path(model.path))
        if found is not None:
            return found
    if model.config is not None:
        found = _config_in(Path(model.config))
        if found is not None:
            return found
        raise RefusedError(f"`model.config={model.config}` is no config.json and no folder that holds one")
    raise RefusedError(
        f"`model.path={model.path}` is not here and `model.config` is not set: name a config.json, or a folder that "
        "holds one, in `model.config`; it is all that a plan needs of a model"
    )


def _config_in(path: Path) -> Path | None:
    """config.json of a model's folder, of a checkpoint, or of the newest checkpoint of a run."""
    if path.is_file():
        return path if path.suffix == ".json" else None
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            return folder / "config.json"
    steps = [(int(match[1]), match[0]) for match in map(_STEP.fullmatch, _names(path / "checkpoints")) if match]
    for _, name in sorted(steps, reverse=True):
        config = path / "checkpoints" / name / "model" / "config.json"
        if config.is_file():
            return config
    return None


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def _reference(recipe: Recipe, policy: ModelSizes) -> ModelSizes | None:
    """With the policy's own sizes where the reference is not here: mostly it is what the policy was at first."""
    if recipe.algorithm.kl_coefficient == 0:
        return None
    named = recipe.model.reference
    found = _config_in(Path(named)) if named is not None else None
    return policy if found is None else read_sizes(found)
