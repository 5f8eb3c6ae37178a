"""RUN/model_cache: what is there is whole, and comes from the files as they are now."""

import os
from pathlib import Path

import pytest
import torch

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.model_cache import Converted, clear, convert, is_convertible, open_model
from tests import tiny
from tests.unit.weights.test_convert import save_bin


def opened(folder: Path, run: Path, *, reuse: bool = True) -> Converted:
    scratch = run.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    return open_model("model.path", folder, run / "model_cache", scratch, dtype=torch.float32, reuse=reuse)


def test_it_is_written_once_and_again_when_the_files_have_changed(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", tiny.llama())
    said: list[str] = []

    first = opened(tmp_path / "bin", tmp_path / "run")
    convert([first, first], said.append)
    assert (first.folder / "model.safetensors").is_file()
    assert [line.split()[1] for line in said] == ["converting", "converted"]

    again = opened(tmp_path / "bin", tmp_path / "run")
    assert (again.folder, again.opened) == (first.folder, None)
    assert opened(tmp_path / "bin", tmp_path / "run", reuse=False).opened is not None

    os.utime(tmp_path / "bin" / "pytorch_model.bin", (1, 1))
    assert opened(tmp_path / "bin", tmp_path / "run").folder != first.folder


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", tiny.llama(), 2)
    model = opened(tmp_path / "bin", tmp_path / "run")
    (tmp_path / "bin" / "pytorch_model-00002-of-00002.bin").write_bytes(b"PK gone bad meanwhile")
    with pytest.raises(RefusedError, match="cannot be read as plain tensors"):
        convert([model], lambda _: None)
    assert not (tmp_path / "run").exists()


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", tiny.llama())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model_cache").touch()
    with pytest.raises(CheckpointError, match=r"was not written.*; name another disk with run_root="):
        convert([opened(tmp_path / "bin", tmp_path / "run")], lambda _: None)


def test_too_little_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bin(tmp_path / "bin", tiny.llama())
    model = opened(tmp_path / "bin", tmp_path / "run")
    monkeypatch.setattr("plimsoll.model_cache.free_bytes", lambda folder: model.num_bytes - 1)
    with pytest.raises(RefusedError, match="name another disk with run_root="):
        convert([model], lambda _: None)
    assert not (tmp_path / "run").exists()


def test_clearing_keeps_what_is_in_use(tmp_path: Path) -> None:
    for name in ("a", "b", ".c.tmp-1"):
        (tmp_path / "cache" / name).mkdir(parents=True)
    clear(tmp_path / "cache", [tmp_path / "cache" / "b", tmp_path / "elsewhere"])
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["b"]
    clear(tmp_path / "none", [])
    assert not (tmp_path / "none").exists()


def test_only_other_formats_are_converted(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path / "safe")
    save_bin(tmp_path / "bin", tiny.llama())
    assert [is_convertible(tmp_path / name) for name in ("safe", "bin", "none", "a.gguf")] == [
        False,
        True,
        False,
        True,
    ]
