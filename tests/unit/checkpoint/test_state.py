"""state.json and the generators."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.checkpoint.rng import capture_rng, restore_rng
from plimsoll.checkpoint.state import library_versions, read_state, write_state
from plimsoll.errors import CheckpointError
from tests.unit.checkpoint.states import training_state


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = capture_rng("cpu")
    yield
    restore_rng(before, "cpu")


def draws() -> list[float]:
    """A normal from each first: both Python's and numpy's keep the second of a pair for the next call."""
    return [
        random.gauss(0, 1),
        random.random(),
        float(np.random.standard_normal()),
        float(np.random.random()),
        *torch.randn(3).tolist(),
    ]


def test_generators_go_on_exactly_where_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1)  # half of a pair is used up
    np.random.standard_normal()
    torch.randn(3)
    write_state(tmp_path, training_state())
    expected = draws()
    draws()

    restore_rng(read_state(tmp_path).rng, "cpu")

    assert draws() == expected


def test_everything_returns(tmp_path: Path) -> None:
    state = training_state(cursor={"tiny": 5e-324, "third": 1 / 3, "big": 2**63, "text": "\u00e9\U0001f600"})

    write_state(tmp_path, state)

    assert read_state(tmp_path) == state


def test_a_number_that_json_does_not_have_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_state(tmp_path, training_state(cursor={"loss": float("nan")}))


def edit(folder: Path, **changes: object) -> None:
    path = folder / "state.json"
    document = json.loads(path.read_text())
    document.update(changes)
    path.write_text(json.dumps({key: value for key, value in document.items() if value != "gone"}))


def test_other_formats_are_named(tmp_path: Path) -> None:
    write_state(tmp_path, training_state())
    edit(tmp_path, format=2)

    with pytest.raises(CheckpointError, match="has format 2; this version of plimsoll reads format 1"):
        read_state(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": "gone"}, r"missing \['step'\], unknown \[\]"),
        ({"pace": 1}, r"missing \[\], unknown \['pace'\]"),
        ({"rng": None}, "is not a RngState"),
        ({"format": "gone"}, "has format None"),
    ],
)
def test_missing_and_unknown_keys_are_named(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    write_state(tmp_path, training_state())
    edit(tmp_path, **changes)

    with pytest.raises(CheckpointError, match=said):
        read_state(tmp_path)


@pytest.mark.parametrize("text", [None, "", "{", "[1]"])
def test_a_file_that_is_no_state_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "state.json").write_text(text)

    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_state(tmp_path)


def test_a_state_of_the_other_device_is_refused() -> None:
    with pytest.raises(CheckpointError, match="written on cpu, this run is on cuda; resume it on cpu"):
        restore_rng(capture_rng("cpu"), "cuda")


def test_versions_are_those_that_are_installed() -> None:
    versions = library_versions()
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert versions["numpy"] == np.__version__


def test_finding_a_checkpoint_does_not_wait_for_torch() -> None:
    modules = "store", "state", "locate", "manifest"
    imports = "; ".join(f"import plimsoll.checkpoint.{module}" for module in modules)
    script = (
        f"{imports}; import plimsoll.cluster.signals, sys; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
