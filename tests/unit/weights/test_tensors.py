"""Our safetensors writer against the library's reader."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plimsoll.errors import CheckpointError
from plimsoll.weights.tensors import TensorFiles, TensorSpec, check_whole, write_specs, write_tensors


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def samples() -> dict[str, Tensor]:
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    special = torch.tensor([float("nan"), float("-inf"), -0.0, 5e-324, 1 + 2**-52], dtype=torch.float64)
    return {
        "float64": special,
        "bfloat16": torch.randn(3, 5).to(torch.bfloat16),
        "float16": torch.randn(7).to(torch.float16),
        "float32.transposed": base.t(),
        "float32.strided": base[::2, 1:3],
        "shared": base,
        "shared.again": base,
        "step": torch.tensor(17.0),
        "int64": torch.tensor([[-(2**63), 2**63 - 1]]),
        "bool": torch.tensor([True, False, True]),
        "uint8": torch.arange(3, dtype=torch.uint8),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "name with é": torch.ones(1),
    }


def test_the_library_reads_every_bit_that_was_written(tmp_path: Path) -> None:
    tensors = samples()

    size = write_tensors(tmp_path / "x.safetensors", tensors)

    assert size == (tmp_path / "x.safetensors").stat().st_size
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(loaded[name]) == bits(tensor.detach()), name


def test_data_starts_where_any_dtype_may_be_mapped(tmp_path: Path) -> None:
    for length in range(1, 10):
        write_tensors(tmp_path / "x", {"n" * length: torch.ones(3, dtype=torch.uint8), "d": torch.ones(1).double()})
        assert int.from_bytes((tmp_path / "x").read_bytes()[:8], "little") % 8 == 0


def test_files_are_read_one_tensor_at_a_time_by_name(tmp_path: Path) -> None:
    write_tensors(tmp_path / "1", {"a": torch.arange(3)})
    write_tensors(tmp_path / "2", {"b": torch.ones(2, 2, dtype=torch.bfloat16)})

    files = TensorFiles([tmp_path / "1", tmp_path / "2"])

    assert sorted(files) == ["a", "b"]
    assert files["a"].tolist() == [0, 1, 2]
    assert (files.spec("b").dtype, files.spec("b").shape, files.spec("b").num_bytes) == (torch.bfloat16, (2, 2), 8)
    assert torch.equal(files.spec("b").read(), files["b"])
    with pytest.raises(KeyError):
        files["c"]


def test_a_tensor_is_asked_for_only_when_its_turn_comes(tmp_path: Path) -> None:
    asked: list[str] = []

    def spec(name: str) -> TensorSpec:
        def read() -> Tensor:
            asked.append(name)
            return torch.ones(2)

        return TensorSpec(name=name, dtype=torch.float32, shape=(2,), read=read)

    specs = [spec("b"), spec("a")]
    assert asked == []
    write_specs(tmp_path / "x", specs)
    assert asked == ["a", "b"]


def test_a_tensor_that_is_not_what_was_announced_is_our_mistake(tmp_path: Path) -> None:
    spec = TensorSpec(name="a", dtype=torch.float32, shape=(2,), read=lambda: torch.ones(3))
    with pytest.raises(AssertionError, match="not what was announced"):
        write_specs(tmp_path / "x", [spec])


def test_a_file_of_another_length_than_its_header_says_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, samples())
    check_whole(path)
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"x", whole[:40], b"", b"not a file of this kind at all"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"cut off or damaged|not a safetensors file"):
            check_whole(path)
