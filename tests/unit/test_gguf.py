"""GGUF files of several families, tensor by tensor: bit by bit what transformers makes of the whole file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from plimsoll.errors import RefusedError
from plimsoll.gguf import open_gguf
from tests.extras import needs
from tests.unit.weights.test_convert import MIB, growth_while

gguf = pytest.importorskip("gguf")

pytestmark = needs("gguf")

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_SIZE, VOCAB, EXPERTS = 64, 96, 4, 2, 16, 40, 3
QWEN3_HEAD, EXPERT_FFN, GPT2_POSITIONS = 128, 768, 1024  # transformers takes these from no key of the file


def attention(head: int, *, norms: bool) -> dict[str, tuple[int, ...]]:
    """Of one layer."""
    return {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HEADS * head, HIDDEN),
        "attn_k.weight": (KV_HEADS * head, HIDDEN),
        "attn_v.weight": (KV_HEADS * head, HIDDEN),
        "attn_output.weight": (HIDDEN, HEADS * head),
        "ffn_norm.weight": (HIDDEN,),
        **(dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (head,)) if norms else {}),
    }


ATTENTION = attention(HEAD_SIZE, norms=False)
MLP = {"ffn_gate.weight": (FFN, HIDDEN), "ffn_up.weight": (FFN, HIDDEN), "ffn_down.weight": (HIDDEN, FFN)}
BIASES = {
    "attn_q.bias": (HEADS * HEAD_SIZE,),
    "attn_k.bias": (KV_HEADS * HEAD_SIZE,),
    "attn_v.bias": (KV_HEADS * HEAD_SIZE,),
}
EXPERT_LAYERS = {
    "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
    "ffn_gate_exps.weight": (EXPERTS, EXPERT_FFN, HIDDEN),
    "ffn_up_exps.weight": (EXPERTS, EXPERT_FFN, HIDDEN),
    "ffn_down_exps.weight": (EXPERTS, HIDDEN, EXPERT_FFN),
}
LAYERS: dict[str, dict[str, tuple[int, ...]]] = {
    "llama": {**ATTENTION, **MLP},
    "qwen2": {**ATTENTION, **BIASES, **MLP},
    "qwen3": {**attention(QWEN3_HEAD, norms=True), **MLP},
    "gemma3": {
        **attention(HEAD_SIZE, norms=True),
        **MLP,
        "post_attention_norm.weight": (HIDDEN,),
        "post_ffw_norm.weight": (HIDDEN,),
    },
    "qwen3moe": {**attention(HEAD_SIZE, norms=True), **EXPERT_LAYERS},
    "gpt2": {
        "attn_norm.weight": (HIDDEN,),
        "attn_norm.bias": (HIDDEN,),
        "attn_qkv.weight": (3 * HIDDEN, HIDDEN),
        "attn_qkv.bias": (3 * HIDDEN,),
        "attn_output.weight": (HIDDEN, HIDDEN),
        "attn_output.bias": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_norm.bias": (HIDDEN,),
        "ffn_up.weight": (4 * HIDDEN, HIDDEN),
        "ffn_up.bias": (4 * HIDDEN,),
        "ffn_down.weight": (HIDDEN, 4 * HIDDEN),
        "ffn_down.bias": (HIDDEN,),
    },
}
"""Family → tensors of a layer, by llama.cpp's names, in torch's order of dims."""


def write_gguf(
    path: Path,
    family: str,
    *,
    tied: bool,
    kind: Any,
    layers: int = 2,
    layer: Mapping[str, tuple[int, ...]] | None = None,
    ffn: int = FFN,
) -> Path:
    """Random weights: matrices of `kind`, vectors float32, as llama.cpp quantizes. `layer`: instead of the family's."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(4 * HIDDEN if family == "gpt2" else ffn)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS if family == "gpt2" else KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    if family == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(EXPERT_FFN)
    tokens = ["t", "1", *(f"t{index}" for index in range(1, VOCAB - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(0)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if family == "gpt2":
        shapes |= {"position_embd.weight": (GPT2_POSITIONS, HIDDEN), "output_norm.bias": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for number in range(layers):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in (layer or LAYERS[family]).items()}
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = generator.standard_normal(shape, dtype=np.float32)
        stored = kind if len(shape) > 1 and "gate_inp" not in name else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(file: Path, folder: Path, dtype: torch.dtype = torch.float32) -> list[str]:
    """What was said."""
    folder.mkdir()
    said: list[str] = []
    model = open_gguf(file, dtype)
    model.write_companions(folder)
    assert model.write_weights(folder, said.append) == model.num_tensors
    return said


CASES = [
    *((family, tied, "Q8_0", torch.float32) for family in LAYERS for tied in (True, False)),
    *(("llama", True, kind, torch.float32) for kind in ("F32", "F16", "BF16", "Q4_0")),
    ("gemma3", True, "F32", torch.bfloat16),
]


@pytest.mark.parametrize(("family", "tied", "kind", "dtype"), CASES)
def test_every_tensor_is_the_one_that_transformers_unpacks(
    tmp_path: Path, family: str, tied: bool, kind: str, dtype: torch.dtype
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", family, tied=tied, kind=gguf.GGMLQuantizationType[kind])

    assert convert(file, tmp_path / "out", dtype) == []

    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    found, wanted = model.state_dict(), expected.state_dict()
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor), name
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    told, meant = model.config.to_diff_dict(), expected.config.to_diff_dict()
    assert {key: told.get(key) for key in meant.keys() - {"quantization_config", "_name_or_path"}} == {
        key: meant[key] for key in meant.keys() - {"quantization_config", "_name_or_path"}
    }


def test_a_tensor_of_another_shape_than_the_config_says_is_refused(tmp_path: Path) -> None:
    layer = LAYERS["qwen2"] | {"ffn_up.weight": (FFN + 32, HIDDEN)}
    file = write_gguf(tmp_path / "a.gguf", "qwen2", tied=True, kind=gguf.GGMLQuantizationType.F32, layer=layer)
    with pytest.raises(RefusedError, match=r"model\.layers\.0\.mlp\.up_proj\.weight has the shape \(128, 64\)"):
        convert(file, tmp_path / "out")


def test_memory_is_that_of_a_few_tensors_and_not_of_the_model(tmp_path: Path) -> None:
    wide = 16384  # 4 MiB a matrix as float32
    layer = ATTENTION | BIASES | dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), (wide, HIDDEN))
    layer["ffn_down.weight"] = (HIDDEN, wide)
    kind = gguf.GGMLQuantizationType.F16
    model = open_gguf(
        write_gguf(tmp_path / "a.gguf", "qwen2", tied=True, kind=kind, layers=14, layer=layer, ffn=wide), torch.float32
    )
    (tmp_path / "out").mkdir()

    growth = growth_while(lambda: model.write_weights(tmp_path / "out", lambda _: None))

    assert model.num_bytes > 168 * MIB
    assert growth < 90 * MIB  # malloc keeps up to 64 MiB of freed blocks
