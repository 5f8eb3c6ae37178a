"""Headers of weights files, against files that safetensors itself wrote."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.files import WeightFiles

A = {"a": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(5)}
B = {"b": torch.arange(4).to(torch.bfloat16), "empty": torch.empty(0, 3)}


def sharded(folder: Path) -> Path:
    save_file(A, folder / "x-1.safetensors")
    save_file(B, folder / "x-2.safetensors")
    names = dict.fromkeys(A, "x-1.safetensors") | dict.fromkeys(B, "x-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def causes(source: object) -> tuple[str, ...]:
    with pytest.raises(RefusedError) as error:
        WeightFiles(source)  # type: ignore[arg-type]
    return error.value.causes


def test_every_tensor_is_where_its_bytes_are(tmp_path: Path) -> None:
    with WeightFiles(sharded(tmp_path)) as files:
        assert set(files.tensors) == {*A, *B}
        for name, tensor in (A | B).items():
            stored = files.tensors[name]
            assert (stored.dtype, stored.shape, stored.num_bytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
            data = os.pread(files.descriptor(stored.path), tensor.nbytes, stored.offset)
            assert data == bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        assert files.folder == tmp_path
        files.check_unchanged()


def test_an_index_chooses_files_and_model_safetensors_alone_comes_first(tmp_path: Path) -> None:
    save_file({"other": torch.zeros(1)}, sharded(tmp_path) / "consolidated.safetensors")
    with WeightFiles(tmp_path) as files:
        assert "other" not in files.tensors
    save_file({"single": torch.zeros(1)}, tmp_path / "model.safetensors")
    with WeightFiles(str(tmp_path)) as files:
        assert set(files.tensors) == {"single"}


def test_files_can_be_given_one_by_one(tmp_path: Path) -> None:
    sharded(tmp_path)
    with WeightFiles([tmp_path / "x-2.safetensors"]) as files:
        assert set(files.tensors) == set(B)
        assert files.folder is None


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    index = json.loads((sharded(tmp_path) / "model.safetensors.index.json").read_text())
    index["weight_map"] |= {"c": "x-3.safetensors", "d": "x-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with (tmp_path / "x-2.safetensors").open("ab") as file:
        file.write(b"\0")
    found = causes(tmp_path)
    assert len(found) == 3
    assert "x-2.safetensors" in found[0]
    assert "cut off or damaged" in found[0]
    assert "x-3.safetensors cannot be read: No such file" in found[1]
    assert "x-1.safetensors has d" in found[2]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (10**15).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"junk",
        (2).to_bytes(8, "little") + b"[]",
        (12).to_bytes(8, "little") + b'{"a": "text"',
        (14).to_bytes(8, "little") + b'{"a": {"x":1}}',
        (8).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8",
    ],
)
def test_junk_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    (cause,) = causes(tmp_path)
    assert "model.safetensors is not a safetensors file" in cause


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
    ],
)
def test_an_entry_that_does_not_fit_itself_is_refused(tmp_path: Path, entry: dict[str, object]) -> None:
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (cause,) = causes(tmp_path)
    assert "is not a safetensors file (a " in cause


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    save_file(A, tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 1)
    assert "it is cut off or damaged" in causes(tmp_path)[0]


def test_a_tensor_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    save_file(A, tmp_path / "one.safetensors")
    save_file(A, tmp_path / "two.safetensors")
    assert len(causes(tmp_path)) == 2


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    assert "holds no *.safetensors file" in causes(tmp_path)[0]
    assert "is not a folder" in causes(tmp_path / "absent")[0]
    assert "no weights file was given" in causes([])[0]
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "is not an index" in causes(tmp_path)[0]


def replaced(path: Path) -> None:
    content = path.read_bytes()
    path.with_suffix(".new").write_bytes(content)
    os.utime(path.with_suffix(".new"), ns=(0, path.stat().st_mtime_ns))
    path.with_suffix(".new").replace(path)


def touched(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (replaced, "its inode was"),
        (touched, "its time of change was"),
        (longer, "its size was"),
        (Path.unlink, "No such"),
    ],
)
def test_a_file_that_changed_since_it_was_opened_is_noticed(tmp_path: Path, change: object, what: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(A, path)
    with WeightFiles(tmp_path) as files:
        files.check_unchanged()
        change(path)  # type: ignore[operator]
        with pytest.raises(CheckpointError, match=what) as error:
            files.check_unchanged()
        assert str(path) in str(error.value)
