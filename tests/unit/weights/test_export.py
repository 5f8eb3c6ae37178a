import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.export import export_sharded, write_hf_folder
from plimsoll.weights.write import reserve_space
from tests import tiny

IDS = torch.arange(3, 15)[None]


def companions(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_text(f'{{"file": "{name}"}}')
    return folder


def own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """A tied head left out."""
    tied = model.config.tie_word_embeddings
    return {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def trained(source: Path) -> PreTrainedModel:
    """After one step in float32."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    return model


def check(out: Path, source: Path, model: PreTrainedModel) -> None:
    """`out` has the names of `source` and the weights of `model` as bfloat16."""
    loaded, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    assert loaded.dtype == torch.bfloat16
    # Not `model.to`: that would cast the rotary table too.
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    expected.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, expected(IDS).logits)
    keys: set[str] = set()
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        keys |= tensors.keys()
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert ("lm_head.weight" in keys) == (not model.config.tie_word_embeddings)
    assert keys == load_file(source / "model.safetensors").keys()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 8_000])
def test_an_export_after_training_loads_without_missing_or_unexpected_tensors(
    tied: bool, shard_bytes: int, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    tiny.qwen2(tied=tied, seed=1).save_pretrained(source)
    model = trained(source)
    out = tmp_path / "out"
    written = write_hf_folder(
        out,
        own_tensors(model),
        model.config,
        torch.bfloat16,
        architecture=type(model).__name__,
        tokenizer_folder=companions(source),
        shard_bytes=shard_bytes,
    )
    assert sorted(written) == sorted(path for path in out.rglob("*") if path.is_file())
    check(out, source, model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("named", [True, False])  # after the source's names, or after those of transformers
def test_a_model_is_exported_in_the_dtype_of_its_source(tied: bool, named: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny.qwen2(tied=tied, seed=1, dtype=torch.bfloat16).save_pretrained(source)
    companions(source)
    model = trained(source)
    out = tmp_path / "deep" / "out"
    report = (
        export_sharded(model, out, source=source, max_file_bytes=8_000)
        if named
        else export_sharded(model, out, dtype=torch.bfloat16, tokenizer_folder=source)
    )
    check(out, source, model)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    assert report.files == tuple(files)
    assert (len(list(out.glob("*.safetensors"))) > 1) == named
    assert report.num_tensors == len(load_file(source / "model.safetensors"))
    assert report.num_bytes == sum(path.stat().st_size for path in files if path.suffix == ".safetensors")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert str(tmp_path) not in (out / "config.json").read_text()


def test_without_a_source_the_dtype_is_that_of_the_models_config(tmp_path: Path) -> None:
    export_sharded(tiny.llama(dtype=torch.float16), tmp_path / "half")
    values = json.loads((tmp_path / "half" / "config.json").read_text())
    assert (values["dtype"], values["architectures"]) == ("float16", ["LlamaForCausalLM"])
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.float16}
    assert sorted(path.name for path in (tmp_path / "half").iterdir()) == ["config.json", "model.safetensors"]


def test_an_empty_folder_is_taken_and_one_with_a_file_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    empty, full, file = tmp_path / "empty", tmp_path / "full", tmp_path / "file"
    empty.mkdir()
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    file.write_text("mine")
    export_sharded(model, empty)
    assert load_file(empty / "model.safetensors").keys() == {"weight", "bias"}
    for taken, words in ((full, "is not empty"), (file, "is a file")):
        with pytest.raises(RefusedError, match=words):
            export_sharded(model, taken)
    assert [path.name for path in full.iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]


def test_an_export_that_the_disk_has_no_room_for_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"4\.1 KiB are needed, 4\.0 KiB are free"):
        export_sharded(torch.nn.Linear(32, 32, bias=False), tmp_path / "out", free=lambda folder: 4096)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_at_the_second_file_leaves_nothing(tmp_path: Path) -> None:
    made: list[int] = []

    def reserve(descriptor: int, num_bytes: int) -> None:
        made.append(num_bytes)
        if len(made) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve_space(descriptor, num_bytes)

    with pytest.raises(CheckpointError, match=r"No space left on device .* are free there"):
        export_sharded(torch.nn.Linear(8, 8), tmp_path / "out", max_file_bytes=1, reserve=reserve)
    assert len(made) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_folder_that_is_gone_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is gone"):
        export_sharded(torch.nn.Linear(8, 8), tmp_path / "out", tokenizer_folder=tmp_path / "gone")
    assert list(tmp_path.iterdir()) == []


def test_a_source_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="config of the source"):
        export_sharded(torch.nn.Linear(8, 8), tmp_path / "out", source=tmp_path)


def test_tokenizer_template_and_generation_config_come_along(tmp_path: Path) -> None:
    model = tiny.llama()
    source = companions(tmp_path)
    out = tmp_path / "out"
    state = model.state_dict()
    write_hf_folder(out, state, model.config, torch.float32, architecture="LlamaForCausalLM", tokenizer_folder=source)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_text() == (source / name).read_text()
    values = json.loads((out / "config.json").read_text())
    assert values["dtype"] == "float32"
    assert values["architectures"] == ["LlamaForCausalLM"]
    assert str(tmp_path) not in (out / "config.json").read_text()
    assert AutoConfig.from_pretrained(out).to_dict()["hidden_size"] == model.config.hidden_size


def test_an_index_maps_every_tensor_and_no_file_is_larger_than_the_limit(tmp_path: Path) -> None:
    model = tiny.llama()
    state = model.state_dict()
    write_hf_folder(
        tmp_path,
        state,
        model.config,
        torch.float32,
        architecture="LlamaForCausalLM",
        tokenizer_folder=None,
        shard_bytes=20_000,
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == state.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in state.values())
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert sum(opened.get_tensor(key).nbytes for key in opened.keys()) <= 20_000  # noqa: SIM118
