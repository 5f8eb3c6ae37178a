"""state.json: everything of a training state that is not a tensor. No torch here.

Weights stand in model/, moments in optimizer.safetensors. The learning rate is not saved: the schedule is a function of
`optimizer_steps`.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from plimsoll import __version__
from plimsoll.errors import CheckpointError

STATE = "state.json"
FORMAT = 1

_LIBRARIES = ("torch", "transformers", "safetensors", "numpy")


@dataclass(slots=True, kw_only=True, frozen=True)
class RngState:
    """The process-wide generators. Our own noise is keyed and has no state; libraries may still draw from these."""

    python_version: int  # random.getstate()[0]
    python_words: tuple[int, ...]  # [625]
    python_gauss: float | None
    numpy_words: tuple[int, ...]  # MT19937 key, [624]
    numpy_position: int
    numpy_has_gauss: int
    numpy_gauss: float
    torch_cpu: str  # base64 of torch.get_rng_state()
    torch_cuda: str | None  # base64 of torch.cuda.get_rng_state() of the current device; None: a run on the CPU


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainingState:
    """Where a run stands after `step` steps of the loop."""

    step: int  # finished iterations of the loop
    policy_version: int  # optimizer updates since step 0
    optimizer_steps: int  # position of the learning-rate schedule
    skipped_nonfinite: int  # optimizer steps skipped because the gradient was not finite
    skipped_empty: int  # mini-batches without anything to train
    cursor: Mapping[str, Any]  # data cursor as plain JSON, dynamic-sampling buffer included; tuples come back as lists
    plan: Mapping[str, Any]  # the run's plan.json
    rng: RngState
    libraries: Mapping[str, str]  # name → version that wrote this


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that results depend on."""
    return {
        "python": platform.python_version(),
        "plimsoll": __version__,
        **{name: version(name) for name in _LIBRARIES},
    }


def write_state(folder: Path, state: TrainingState) -> None:
    """Write state.json. Floats are written with all their digits, so they come back bitwise."""
    document = {"format": FORMAT, **asdict(state)}
    (folder / STATE).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_state(folder: Path) -> TrainingState:
    """Read state.json.

    Raises:
        CheckpointError: absent, damaged, or of a format that this version does not know.
    """
    path = folder / STATE
    try:
        document: Any = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    found = cast("dict[str, Any]", document).pop("format", None) if isinstance(document, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {found!r}; this version of plimsoll reads format {FORMAT}: "
            "resume with the version that wrote it"
        )
    state = cast("dict[str, Any]", document)
    _check_keys(path, state, TrainingState)
    rng: dict[str, Any] = state["rng"]
    _check_keys(path, rng, RngState)
    for words in ("python_words", "numpy_words"):  # JSON has no tuples
        rng[words] = tuple(rng[words])
    state["rng"] = RngState(**rng)
    return TrainingState(**state)


def _check_keys(path: Path, found: object, expected: type[TrainingState] | type[RngState]) -> None:
    names = {field.name for field in fields(expected)}
    keys: set[str] = set(cast("dict[str, Any]", found)) if isinstance(found, dict) else set()
    if keys != names:
        raise CheckpointError(
            f"{path} is not a {expected.__name__} of format {FORMAT}: "
            f"missing {sorted(names - keys)}, unknown {sorted(keys - names)}"
        )
