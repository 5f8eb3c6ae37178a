"""Weights that are not those of their config.json are refused as a whole, and no run folder is begun."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.e2e.small import Small, tensors

QUERY = "model.layers.0.self_attn.q_proj.weight"


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda stored: {own: tensor for own, tensor in stored.items() if own != name}


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (without("model.norm.weight"), "has 1 missing tensor: model.norm.weight [32]"),
    "unexpected": (lambda stored: stored | {"stray": torch.zeros(3)}, "has 1 unexpected tensor: stray [3]"),
    "misshapen": (lambda stored: stored | {QUERY: torch.zeros(5, 7)}, f"has 1 misshapen tensor: {QUERY} is [32, 32]"),
    "integers": (
        lambda stored: stored | {QUERY: torch.zeros(32, 32, dtype=torch.int8)},
        f"{QUERY} is stored as torch.int8",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("setting", ["model.path", "model.reference"])
def test_weights_that_do_not_fit_are_refused_before_there_is_a_run_folder(
    small: Small, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, setting: str
) -> None:
    change, wanted = CHANGES[kind]
    shutil.copytree(small.model, tmp_path / "other")
    save_file(change(tensors(small.model)), tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})

    small.train(f"{setting}={tmp_path / 'other'}", "algorithm.kl_coefficient=0.1", expect=2)

    said = capfd.readouterr().err
    assert f"plimsoll: {setting}: " in said
    assert wanted in said
    assert "Traceback" not in said
    assert not small.runs.exists()


def test_pointers_of_git_lfs_and_a_config_that_is_no_json_are_called_by_their_name(
    small: Small, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), ("config.json", "{")):
        folder = tmp_path / name
        shutil.copytree(small.model, folder)
        (folder / name).write_text(content)
        small.train(f"model.path={folder}", expect=2)
    pointer, config = capfd.readouterr().err.splitlines()
    assert pointer.endswith("is a pointer of Git LFS and not the weights: fetch them with `git lfs pull`")
    assert config.startswith(f"plimsoll: model.path: transformers cannot read {tmp_path / 'config.json'}")
    assert not small.runs.exists()
