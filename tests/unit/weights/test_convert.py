"""pytorch_model.bin becomes safetensors: the same tensors bit by bit, one at a time, nothing executed."""

import gc
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from plimsoll.errors import RefusedError
from plimsoll.memory.host import HostReader, PeakSampler
from plimsoll.weights.convert import check_torch_weights, convert_torch_weights, find_torch_weights
from plimsoll.weights.tensors import TensorFiles
from tests import tiny

MIB = 1 << 20


def save_bin(folder: Path, model: PreTrainedModel, shards: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    """As transformers wrote models before safetensors; a tied head twice, with one storage. What was saved."""
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if shards == 1:
        torch.save(OrderedDict(state), folder / "pytorch_model.bin", **options)
        return state
    names = list(state)
    listed: dict[str, str] = {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin"
        part = {name: state[name].clone() for name in names[shard::shards]}
        torch.save(part, folder / file, **options)
        listed |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return state


def growth_while(work: Callable[[], object]) -> int:
    """Bytes of anonymous memory that `work` took at most."""
    read = HostReader().anonymous
    sampler = PeakSampler(read, interval=0.002)
    gc.collect()
    start = read()
    sampler.begin()
    work()
    peak = sampler.end()
    sampler.close()
    assert start is not None
    assert peak is not None
    return peak - start


def convert(source: Path, out: Path) -> list[str]:
    """What was said."""
    weights = find_torch_weights(source)
    assert weights is not None
    check_torch_weights(weights)
    out.mkdir()
    said: list[str] = []
    convert_torch_weights(weights, out, said.append)
    return said


def test_memory_is_that_of_one_tensor_and_not_of_the_file(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", tiny.llama())
    # Above 32 MiB each: smaller blocks may stay with malloc after they are freed.
    state = {f"weight_{index}": torch.full((10 * MIB,), float(index)).reshape(2560, 4096).T for index in range(6)}
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    del state

    growth = growth_while(lambda: convert(tmp_path / "bin", tmp_path / "out"))  # turned: each is made contiguous

    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 240 * MIB
    assert growth < 90 * MIB


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("build", [tiny.llama, tiny.qwen2, tiny.gpt2])
def test_every_tensor_is_the_one_that_transformers_reads(tmp_path: Path, build: Any, shards: int) -> None:
    state = save_bin(tmp_path / "bin", build(), shards)

    assert convert(tmp_path / "bin", tmp_path / "out") == []

    stored = TensorFiles(sorted((tmp_path / "out").glob("*.safetensors")))
    assert all(torch.equal(stored[name], state[name]) for name in stored)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "bin").state_dict()
    assert {name for name, tensor in model.state_dict().items() if torch.equal(tensor, expected[name])} == set(expected)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == shards
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_the_same_memory_is_left_out_only_where_the_config_ties_it(tmp_path: Path, tied: bool) -> None:
    model = tiny.qwen2(tied=True)
    model.config.tie_word_embeddings = tied  # the file says nothing of it
    save_bin(tmp_path / "bin", model)

    convert(tmp_path / "bin", tmp_path / "out")

    stored = TensorFiles([tmp_path / "out" / "model.safetensors"])
    assert ("lm_head.weight" in stored) != tied
    assert "model.embed_tokens.weight" in stored


def test_dtypes_strides_and_empty_tensors_stay(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", tiny.llama())
    state = {
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "long": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "part": torch.arange(10.0)[2:5],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")

    convert(tmp_path / "bin", tmp_path / "out")

    stored = TensorFiles([tmp_path / "out" / "model.safetensors"])
    assert set(stored) == set(state)
    for name, tensor in state.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name], tensor), name


def test_a_file_of_the_old_format_is_read_whole_and_this_is_said(tmp_path: Path) -> None:
    state = save_bin(tmp_path / "bin", tiny.llama(), _use_new_zipfile_serialization=False)

    (said,) = convert(tmp_path / "bin", tmp_path / "out")

    assert "before torch 1.6" in said
    stored = TensorFiles([tmp_path / "out" / "model.safetensors"])
    assert set(stored) == set(state)
    assert all(torch.equal(stored[name], state[name]) for name in state)


def test_safetensors_come_first_and_a_folder_with_neither_is_not_ours(tmp_path: Path) -> None:
    save_bin(tmp_path / "both", tiny.llama())
    tiny.llama(seed=1).save_pretrained(tmp_path / "both")
    assert find_torch_weights(tmp_path / "both") is None
    (tmp_path / "none").mkdir()
    assert find_torch_weights(tmp_path / "none") is None


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("trapped",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"weight": torch.ones(2), "step": 3}, "step"),
        ({"state_dict": {"weight": torch.ones(2)}}, "state_dict"),
        ([torch.ones(2)], "holds a list"),
        ({"weight": torch.ones(2, dtype=torch.complex64)}, "weight"),
        ({"weight": torch.ones(2, 2).to_sparse()}, "weight"),
        ({"weight": _Trap()}, "cannot be read as plain tensors"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_what_is_no_dense_tensor_is_refused_by_name_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, reason: str, zipped: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    save_bin(tmp_path / "bin", tiny.llama())
    torch.save(content, tmp_path / "bin" / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(RefusedError, match=reason):
        convert(tmp_path / "bin", tmp_path / "out")
    assert not (tmp_path / "trapped").exists()
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_shards_that_do_not_fit_their_index_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", tiny.llama(), 2)
    index = tmp_path / "bin" / "pytorch_model.bin.index.json"
    listed = json.loads(index.read_text())["weight_map"]

    def refusal(weight_map: Any) -> str:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(RefusedError) as error:
            convert(tmp_path / "bin", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return str(error.value)

    assert "extra.weight" in refusal({**listed, "extra.weight": next(iter(listed.values()))})
    assert "absent.bin" in refusal({**listed, "extra.weight": "absent.bin"})
    assert "is not an index" in refusal(None)
    index.unlink()
    with pytest.raises(RefusedError, match=r"pytorch_model\.bin\.index\.json is missing"):
        find_torch_weights(tmp_path / "bin")


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", tiny.llama())
    file = tmp_path / "bin" / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(RefusedError, match="cannot be read as plain tensors"):
        convert(tmp_path / "bin", tmp_path / "out")
