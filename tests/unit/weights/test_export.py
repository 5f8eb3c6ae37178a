import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll.plane.local import LocalPlane
from plimsoll.update.worker import PolicyWorker
from plimsoll.weights.export import write_hf_folder
from tests import tiny
from tests.unit.update.support import make_batch, make_groups, make_plan, make_recipe, save


def companions(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_text(f'{{"file": "{name}"}}')
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 8_000])
def test_an_export_after_training_loads_without_missing_or_unexpected_tensors(
    tied: bool, shard_bytes: int, tmp_path: Path
) -> None:
    source = save(tiny.qwen2(tied=tied, seed=1), tmp_path / "source")
    plane = LocalPlane()
    plan = make_plan(compute_dtype="float32")
    worker = PolicyWorker(make_recipe(source, model={"dtype": "float32"}), plan, plane)
    batch = make_batch(make_groups(plane))
    worker.advantages(batch)
    worker.update(batch)
    out = tmp_path / "out"
    written = write_hf_folder(
        out,
        worker.model_state(),
        worker.config,
        torch.bfloat16,
        architecture=type(worker.lm).__name__,
        tokenizer_folder=companions(source),
        shard_bytes=shard_bytes,
    )
    assert sorted(written) == sorted(path for path in out.rglob("*") if path.is_file())
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert loaded.dtype == torch.bfloat16
    ids = torch.arange(3, 15)[None]
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    expected.load_state_dict({n: t.to(torch.bfloat16) for n, t in worker.model_state().items()}, strict=False)
    expected.tie_weights()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
    keys: set[str] = set()
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            keys |= set(opened.keys())
            assert {opened.get_tensor(key).dtype for key in opened.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert ("lm_head.weight" in keys) == (not tied)
    with safe_open(source / "model.safetensors", "pt") as opened:
        assert keys == set(opened.keys())


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
