"""An exported folder is what transformers loads: keys, dtype, tie, tokenizer, and nothing half written."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from plimsoll import export
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import start_training_checkpoint
from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.tensors import TensorFiles, write_tensors
from tests import tiny
from tests.unit.checkpoint.states import training_state
from tests.unit.weights.test_convert import save_bin

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def save(run: Path, model: PreTrainedModel, step: int = 4, *, compute: str = "float32", shard: str = "5GB") -> Path:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    tokenizer.chat_template = TEMPLATE

    def write_model(folder: Path) -> None:
        model.save_pretrained(folder, max_shard_size=shard)
        tokenizer.save_pretrained(folder)
        (folder / "extra").mkdir()
        (folder / "extra" / "note.txt").write_text("kept")

    def write(folder: Path) -> None:
        start_training_checkpoint(folder, training_state(step=step, plan={"compute_dtype": compute}))
        write_model(folder / "model")
        write_tensors(folder / "optimizer" / "optimizer.safetensors", {"m": torch.ones(1)})

    return CheckpointStore(run / "checkpoints", keep=None).save(step, write)


def keys(folder: Path) -> set[str]:
    return set(TensorFiles(sorted(folder.glob("*.safetensors"))))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_transformers_loads_the_trained_weights_in_the_compute_dtype(tmp_path: Path, tied: bool, compute: str) -> None:
    model = tiny.qwen2(tied=tied)
    save(tmp_path / "run", model, compute=compute)
    dtype = export.DTYPES[compute]

    summary = export.run(tmp_path / "run", None, tmp_path / "out", None)

    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.dtype == dtype
    ids = torch.arange(8)[None]
    assert torch.equal(loaded(ids).logits, model.to(dtype)(ids).logits)
    assert ("lm_head.weight" in keys(tmp_path / "out")) != tied
    assert (summary.step, summary.dtype, summary.num_tensors) == (4, compute, 26 if tied else 27)
    assert summary.num_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_tokenizer_template_and_generation_config_come_along(tmp_path: Path) -> None:
    path = save(tmp_path / "run", tiny.qwen2())

    export.run(path, None, tmp_path / "deep" / "out", "bfloat16")

    out = tmp_path / "deep" / "out"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert (out / "generation_config.json").is_file()
    assert (out / "extra" / "note.txt").read_text() == "kept"
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert not {"manifest.json", "state.json", "optimizer"} & set(os.listdir(out))


def test_files_are_cut_as_in_the_checkpoint_and_the_index_stays_true(tmp_path: Path) -> None:
    model = tiny.qwen2()
    save(tmp_path / "run", model, shard="20KB")

    export.run(tmp_path / "run", None, tmp_path / "out", "bfloat16")

    out = tmp_path / "out"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        assert name in TensorFiles([out / file])
    unique = {parameter.data_ptr(): parameter for parameter in model.parameters()}.values()
    assert index["metadata"]["total_size"] == sum(2 * parameter.numel() for parameter in unique)
    assert not any(AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)[1].values())


def test_the_newest_step_or_the_one_that_was_named(tmp_path: Path) -> None:
    save(tmp_path / "run", tiny.qwen2(), 4)
    save(tmp_path / "run", tiny.qwen2(seed=1), 8)

    assert export.run(tmp_path / "run", None, tmp_path / "newest", None).step == 8
    assert export.run(tmp_path / "run", 4, tmp_path / "named", None).step == 4
    first, second = (TensorFiles([tmp_path / name / "model.safetensors"]) for name in ("newest", "named"))
    assert not torch.equal(first["model.embed_tokens.weight"], second["model.embed_tokens.weight"])


def refused(run: Path, out: Path, *, step: int | None = None, dtype: str | None = None) -> str:
    with pytest.raises(RefusedError) as error:
        export.run(run, step, out, dtype)
    return str(error.value)


def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, full, file = tmp_path / "run", tmp_path / "full", tmp_path / "file"
    path = save(run, tiny.qwen2())
    full.mkdir()
    (full / "mine").touch()
    file.touch()

    assert "is not empty" in refused(run, full)
    assert "is a file" in refused(run, file)
    assert "no checkpoint of step 5; complete ones: 4" in refused(run, tmp_path / "out", step=5)
    assert "--dtype int8 is not known; the dtypes are bfloat16" in refused(run, tmp_path / "out", dtype="int8")
    assert "Hugging Face folder already" in refused(path / "model", tmp_path / "out")
    assert "does not exist" in refused(tmp_path / "none", tmp_path / "out")
    monkeypatch.setattr(export, "free_bytes", lambda folder: 1000)
    assert "1000 B are free" in refused(run, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["file", "full", "run"]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    save(tmp_path / "run", tiny.qwen2())
    (tmp_path / "out").mkdir()

    export.run(tmp_path / "run", None, tmp_path / "out", None)

    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_folder_of_pytorch_model_bin_becomes_safetensors(tmp_path: Path, shards: int, dtype: str | None) -> None:
    model = tiny.llama(dtype=torch.float16)
    save_bin(tmp_path / "old", model, shards)
    before = sorted(os.listdir(tmp_path / "old"))

    summary = export.run(tmp_path / "old", None, tmp_path / "out", dtype)

    expected = dtype or "float16"
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    state = model.state_dict()
    assert all(torch.equal(t, state[name].to(export.DTYPES[expected])) for name, t in loaded.state_dict().items())
    assert (summary.source, summary.step, summary.dtype) == (tmp_path / "old", None, expected)
    assert summary.num_tensors == len(keys(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("dtype") == dtype  # None: as it was
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert sorted(os.listdir(tmp_path / "old")) == before
    assert "--step 4 is for runs" in refused(tmp_path / "old", tmp_path / "again", step=4)


def test_what_the_weights_will_take_in_the_new_dtype_must_be_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bin(tmp_path / "old", tiny.llama(dtype=torch.float16))
    need = (tmp_path / "old" / "pytorch_model.bin").stat().st_size
    monkeypatch.setattr(export, "free_bytes", lambda folder: need)
    assert "are free" in refused(tmp_path / "old", tmp_path / "out", dtype="float64")
    export.run(tmp_path / "old", None, tmp_path / "out", "float16")


def disk_full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def abandoned(*_: object) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("fault", "expected"), [(disk_full, CheckpointError), (abandoned, KeyboardInterrupt)])
def test_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., int], expected: type[BaseException]
) -> None:
    save(tmp_path / "run", tiny.qwen2())
    monkeypatch.setattr(export, "write_specs", fault)

    with pytest.raises(expected):
        export.run(tmp_path / "run", None, tmp_path / "out", None)

    assert os.listdir(tmp_path) == ["run"]
