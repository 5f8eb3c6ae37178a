"""A GGUF file becomes a model that trains: what is written here with llama.cpp's own library comes out unchanged."""

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from plimsoll.cli import main
from tests.e2e.small import Small, last_line, metrics, tensors, weights
from tests.extras import needs

gguf = pytest.importorskip("gguf")

pytestmark = needs("gguf")

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_SIZE = 32, 64, 4, 2, 8
CHARACTERS = [chr(code) for code in range(33, 127)]
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
TOKENS = [*SPECIAL, "Ġ", "Ċ", *CHARACTERS, "ab"]  # byte-level: Ġ is a space, Ċ a line's end; "ab" is a merge
TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHAPES = {
    "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_SIZE, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
    "model.layers.0.mlp.gate_proj.weight": (FFN, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (FFN, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, FFN),
}
"""A llama of one layer, by the names of transformers; the head is tied."""

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
}


def random_weights() -> dict[str, Tensor]:
    """Numbers that float16 and bfloat16 hold exactly, so that files of every kind can be compared bit by bit."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(-64, 65, shape, generator=generator) / 128 + (1 if "norm" in name else 0)
        for name, shape in SHAPES.items()
    }


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbouring rows of a head; transformers row i of its first half with row i of its second."""
    rows = weight.reshape(heads, HEAD_SIZE, HIDDEN)
    pairs = [torch.stack([head[i], head[i + HEAD_SIZE // 2]]) for head in rows for i in range(HEAD_SIZE // 2)]
    return torch.cat(pairs)


def write_gguf(path: Path, weights: Mapping[str, Tensor], *, dtype: str = "float32", arch: str = "llama") -> Path:
    """Matrices as `dtype`, vectors as float32, as llama.cpp writes them."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if token in SPECIAL else kinds.NORMAL for token in TOKENS])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        heads = HEADS if ".q_proj." in name else KV_HEADS if ".k_proj." in name else None
        stored = weight if heads is None else interleaved(weight, heads)
        kind = np.dtype(dtype if stored.ndim > 1 else "float32")
        writer.add_tensor(f"{GGUF_NAMES[name.removesuffix('.weight')]}.weight", stored.numpy().astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("stored", ["float32", "float16"])
@pytest.mark.parametrize(("options", "dtype"), [((), "bfloat16"), (("--dtype", "float32"), "float32")])
def test_weights_come_out_as_they_were_written(
    tmp_path: Path, stored: str, options: tuple[str, ...], dtype: str
) -> None:
    weights = random_weights()
    file = write_gguf(tmp_path / "tiny.gguf", weights, dtype=stored)

    assert main(["export", str(file), str(tmp_path / "out"), *options]) == 0

    found = tensors(tmp_path / "out")
    assert set(found) == set(weights)  # the head is tied: it has no tensor of its own
    for name, tensor in found.items():
        assert str(tensor.dtype) == f"torch.{dtype}"
        assert torch.equal(tensor.float(), weights[name]), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert (config["dtype"], config["architectures"]) == (dtype, ["LlamaForCausalLM"])
    assert "quantization_config" not in config
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tokenizer_chat_template_and_end_of_sequence_come_along(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_gguf(tmp_path / "model" / "tiny.gguf", random_weights())

    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out")]) == 0  # the folder's only GGUF file

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a c"}], add_generation_prompt=True)["input_ids"]
    assert ids == [TOKENS.index(token) for token in ("<|user|>", "a", "Ġ", "c", "<|end|>", "<|assistant|>")]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|end|>", 0)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 0


def test_a_recipe_may_name_a_gguf_file(small: Small, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "tiny.v1.gguf", random_weights())
    asked = (f"model.path={file}", f"model.reference={file}", "algorithm.kl_coefficient=0.1")

    run = small.train(*asked, "train.steps=1")

    said = capfd.readouterr().err
    (cached,) = (run / "model_cache").iterdir()  # policy and reference are one model
    assert f"model.path: converted {file} to {cached}" in said
    found = tensors(cached)
    assert all(torch.equal(found[name], tensor) for name, tensor in random_weights().items())
    assert (cached / "config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(run / "checkpoints" / "step_1" / "model")
    assert tokenizer.eos_token == "<|end|>"
    trained = tensors(run / "checkpoints" / "step_1" / "model")
    assert set(trained) == set(found)
    assert not torch.equal(trained["model.norm.weight"], found["model.norm.weight"])
    assert json.loads((run / "recipe.json").read_text())["model"]["path"] == str(file)

    file.unlink()  # a resumed run has all that it needs: its checkpoint, and its reference in the cache
    small.train(*asked, "train.steps=2", "--resume")
    assert [row["step"] for row in metrics(run)] == [0, 1, 2]
    assert metrics(run)[-1]["actor/kl_ref"] > 0


def test_a_run_without_checkpoint_takes_its_conversion_again_unless_the_file_has_changed(
    small: Small, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", random_weights())
    run = small.train(f"model.path={file}", "train.steps=1")
    (first,) = (run / "model_cache").iterdir()
    written = first.stat().st_mtime_ns

    def resume() -> str:
        shutil.rmtree(run / "checkpoints")
        capfd.readouterr()
        small.train(f"model.path={file}", "train.steps=1", "--resume")
        return capfd.readouterr().err

    assert f"{first} is used, converted from {file} before" in resume()
    assert first.stat().st_mtime_ns == written

    (run / "model_cache" / ".half.tmp-1").mkdir()  # left by a process that was killed
    os.utime(file, (1, 1))
    assert "model.path: converted" in resume()
    (second,) = (run / "model_cache").iterdir()
    assert second != first


def test_a_folder_with_a_pickle_alone_trains_on_the_same_weights(small: Small, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(small.model, old)
    (stored,) = old.glob("*.safetensors")
    torch.save(tensors(old), old / "pytorch_model.bin")
    stored.unlink()

    new = small.train("name=new")
    run = small.train("name=old", f"model.path={old}")

    (cached,) = (run / "model_cache").iterdir()
    assert cached.name.startswith("old-")
    before, after = weights(new, 2), weights(run, 2)
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert not list(old.glob("*.safetensors"))  # the source stays as it was


def test_an_evaluation_converts_for_itself(small: Small, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", random_weights())
    assert main(["export", str(file), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    results: list[dict[str, object]] = []
    for target in (file, tmp_path / "out"):
        recipe, *settings = small.arguments()
        assert main(["eval", str(target), "--recipe", recipe, *settings, "--json"]) == 0
        results.append(last_line(capfd))
    assert results[0] == results[1] | {"model": str(file)}
    assert not small.runs.exists()


def test_what_cannot_be_trained_from_is_refused_before_the_run_folder_is_touched(
    small: Small, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", random_weights())
    part = random_weights()
    del part["model.layers.0.mlp.up_proj.weight"]
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / "two" / name, part)

    def said(path: Path) -> str:
        small.train(f"model.path={path}", expect=2)
        assert not small.runs.exists()
        return capfd.readouterr().err

    assert "1 missing tensors: model.layers.0.mlp.up_proj.weight" in said(tmp_path / "two" / "a.gguf")
    assert "holds 2 GGUF files (a.gguf, b.gguf); name one of them in `model.path`" in said(tmp_path / "two")
    assert "does not exist" in said(tmp_path / "none.gguf")
    monkeypatch.setattr("plimsoll.config.files.installed", lambda name: False)
    text = said(file)
    assert "needs gguf and accelerate" in text
    assert "pip install 'plimsoll-rl[gguf]'" in text


def refused(capfd: pytest.CaptureFixture[str], source: Path, out: Path, *options: str) -> str:
    assert main(["export", str(source), str(out), *options]) == 2
    assert not out.exists() or out.name == "full"
    said = capfd.readouterr().err
    assert "Traceback" not in said
    return said


def test_what_cannot_be_converted_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, out, full = write_gguf(tmp_path / "tiny.gguf", random_weights()), tmp_path / "out", tmp_path / "full"
    text, cut, foreign = (tmp_path / name for name in ("text.gguf", "cut.gguf", "foreign.gguf"))
    text.write_text("no model")
    cut.write_bytes(file.read_bytes()[:-5000])
    write_gguf(foreign, random_weights(), arch="nobody-knows")
    full.mkdir()
    (full / "mine").touch()

    assert "does not exist" in refused(capfd, tmp_path / "none.gguf", out)
    assert "is not a GGUF file" in refused(capfd, text, out)
    assert "transformers cannot read" in refused(capfd, cut, out)
    assert "nobody-knows" in refused(capfd, foreign, out)
    assert "is not empty" in refused(capfd, file, full)
    assert "--step 3 is for runs" in refused(capfd, file, out, "--step", "3")
    assert "--dtype int8 is not known" in refused(capfd, file, out, "--dtype", "int8")
    assert "holds 4 GGUF files" in refused(capfd, tmp_path, out)


def test_a_full_disk_is_no_fault_of_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", random_weights())

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("plimsoll.weights.convert.write_specs", full)
    assert main(["export", str(file), str(tmp_path / "deep" / "out")]) == 1
    said = capfd.readouterr().err
    assert "was not written: [Errno 28] No space left on device" in said
    assert "transformers cannot read" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_missing_tensors_are_named_and_not_made_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = random_weights()
    del weights["model.layers.0.mlp.up_proj.weight"]
    said = refused(capfd, write_gguf(tmp_path / "tiny.gguf", weights), tmp_path / "out")
    assert "1 missing tensors: model.layers.0.mlp.up_proj.weight" in said


def test_without_the_extra_the_command_that_installs_it_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", random_weights())
    monkeypatch.setattr("plimsoll.gguf.installed", lambda name: False)
    said = refused(capfd, file, tmp_path / "out")
    assert "needs gguf and accelerate" in said
    assert "pip install 'plimsoll-rl[gguf]'" in said
