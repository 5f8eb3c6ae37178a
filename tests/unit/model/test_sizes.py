"""Sizes from config.json alone, against the models that transformers builds from the same config."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from plimsoll.errors import RefusedError
from plimsoll.model.sizes import ModelSizes, TensorSize, read_sizes
from plimsoll.model.spec import decoder_layers
from plimsoll.rollout import kv
from tests.tiny import CHECKPOINT_FAMILIES

MODELS = Path(__file__).parents[3] / "recipes" / "models"

SMALL: Mapping[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
"""The numbers that no family may leave out."""

SPARSE: Mapping[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4}


def small(model_type: str, **changes: Any) -> dict[str, Any]:
    """What a hand-written config.json holds."""
    return {"model_type": model_type, **SMALL, **changes}


CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": small("llama"),
    "llama with biases": small("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama with an own head size": small("llama", head_dim=10, num_key_value_heads=2),
    "mistral": small("mistral", num_key_value_heads=2),
    "mistral by default": small("mistral", num_attention_heads=8),
    "mistral without a window": small("mistral", num_key_value_heads=2, sliding_window=None, head_dim=10),
    "phi3": small("phi3", num_key_value_heads=2, sliding_window=16, pad_token_id=0),
    "qwen2": small("qwen2", num_key_value_heads=2),
    "qwen2 whose windows are off": small("qwen2", num_key_value_heads=2, sliding_window=8, max_window_layers=1),
    "qwen2 with windows": small(
        "qwen2", num_key_value_heads=None, sliding_window=8, max_window_layers=1, use_sliding_window=True
    ),
    "qwen3": small("qwen3", num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3 with biases": small("qwen3", num_key_value_heads=1, attention_bias=True, head_dim=6),
    "gemma3": small("gemma3_text", num_hidden_layers=7),
    "gemma3 with a pattern": small("gemma3_text", sliding_window_pattern=2, sliding_window=8, head_dim=6),
    "gemma3, both sides": small("gemma3_text", use_bidirectional_attention=True, sliding_window=8),
    "gemma3 untied": small("gemma3_text", tie_word_embeddings=False, num_key_value_heads=2, attention_bias=True),
    "gpt2": {"model_type": "gpt2", "vocab_size": 40, "n_embd": 24, "n_layer": 2, "n_head": 4},
    "gpt2 untied": {
        "model_type": "gpt2",
        "vocab_size": 40,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "n_positions": 16,
        "n_inner": 10,
        "tie_word_embeddings": False,
    },
    "mixtral": small("mixtral", num_attention_heads=8),
    "mixtral with a window": small("mixtral", num_key_value_heads=2, num_local_experts=3, sliding_window=8),
    "qwen3_moe": small("qwen3_moe", **SPARSE),
    "qwen3_moe by default": small("qwen3_moe"),
    "qwen3_moe, some layers dense": small("qwen3_moe", **SPARSE, mlp_only_layers=[1], decoder_sparse_step=2),
    "qwen3_moe without experts": small("qwen3_moe", num_experts=0, head_dim=10),
    "qwen3_moe with a window": small("qwen3_moe", **SPARSE, use_sliding_window=True, sliding_window=8),
    "qwen3_next": small("qwen3_next", **SPARSE, num_hidden_layers=5),
    "qwen3_next by default": small("qwen3_next", num_experts=2),
    "qwen3_next, every third": small(
        "qwen3_next",
        **SPARSE,
        full_attention_interval=3,
        mlp_only_layers=[1, 2],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=3,
        attention_bias=True,
    ),
}


def built(values: Mapping[str, Any]) -> PreTrainedModel:
    """The model of a config's contents, without memory."""
    rest = {key: value for key, value in values.items() if key != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(values["model_type"], **rest))


def saved(config: PreTrainedConfig) -> dict[str, Any]:
    """What transformers writes into config.json."""
    return json.loads(config.to_json_string())


def shapes(tensors: tuple[TensorSize, ...]) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in tensors}


def attentions(config: PreTrainedConfig) -> list[tuple[str, int | None]]:
    """What each layer keeps in the cache of transformers says what it looks at."""
    found: list[tuple[str, int | None]] = []
    for layer in DynamicCache(config=config).layers or [DynamicLayer()] * config.num_hidden_layers:
        if isinstance(layer, LinearAttentionLayer):
            found.append(("linear", None))
        elif isinstance(layer, DynamicSlidingWindowLayer):
            found.append(("sliding", layer.sliding_window))
        else:
            found.append(("full", None))
    return found


def check_against(lm: PreTrainedModel, sizes: ModelSizes) -> None:
    """Names and shapes of every layer and of the root, and what attention each layer has."""
    layers = decoder_layers(lm)
    assert len(sizes.layers) == len(layers)
    inside: set[str] = set()
    for module, layer in zip(layers, sizes.layers, strict=True):
        wanted = {name: tuple(p.shape) for name, p in lm.named_parameters() if any(p is q for q in module.parameters())}
        assert shapes(layer.parameters) == wanted
        inside |= set(wanted)
    assert [(layer.attention, layer.window) for layer in sizes.layers] == attentions(lm.config)
    assert shapes(sizes.root) == {name: tuple(p.shape) for name, p in lm.named_parameters() if name not in inside}
    assert sizes.num_parameters == sum(p.numel() for p in lm.parameters())
    assert sizes.tied == (lm.get_output_embeddings().weight is lm.get_input_embeddings().weight)
    assert sizes.max_positions == kv.max_positions(lm.config)
    assert (sizes.hidden, sizes.vocab) == (lm.config.hidden_size, lm.config.vocab_size)


@pytest.mark.parametrize("name", list(CHECKPOINT_FAMILIES))
def test_sizes_are_those_of_the_built_model(name: str) -> None:
    lm = CHECKPOINT_FAMILIES[name]()
    check_against(lm, read_sizes(saved(lm.config)))


@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS.keys())
def test_what_a_config_leaves_out_is_what_its_class_in_transformers_says(values: dict[str, Any]) -> None:
    lm = built(values)
    check_against(lm, read_sizes(values))
    check_against(lm, read_sizes(saved(lm.config)))


@pytest.mark.parametrize("folder", sorted(path for path in MODELS.iterdir()), ids=lambda path: path.name)
def test_sizes_of_a_shipped_config_are_those_of_the_built_model(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    check_against(lm, read_sizes(folder))
    assert read_sizes(folder) == read_sizes(folder / "config.json")


def test_the_language_model_of_a_multimodal_config_is_looked_through_to() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 8}
    values = {"model_type": "gemma3", "text_config": text, "vision_config": {"num_hidden_layers": 1}}
    rest = {key: value for key, value in values.items() if key != "model_type"}
    with torch.device("meta"):
        lm = Gemma3ForConditionalGeneration(AutoConfig.for_model("gemma3", **rest))
    sizes = read_sizes(values)
    assert (sizes.family, sizes.vocab, len(sizes.layers), sizes.tied) == ("gemma3_text", 262_208, 2, True)
    assert sizes.num_parameters == sum(p.numel() for p in lm.model.language_model.parameters())
    assert not read_sizes(values | {"tie_word_embeddings": False}).tied
    del text["model_type"]
    assert read_sizes(values) == sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CHECKPOINT_FAMILIES if name != "qwen3_next"])
def test_kv_bytes_are_those_of_the_native_engine(name: str, dtype: torch.dtype) -> None:
    config = CHECKPOINT_FAMILIES[name]().config
    assert read_sizes(saved(config)).kv_bytes_per_token(dtype.itemsize) == kv.kv_bytes_per_token(config, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_keeps_a_state_and_no_keys(dtype: torch.dtype) -> None:
    lm = CHECKPOINT_FAMILIES["qwen3_next"](dtype=dtype)
    sizes = read_sizes(saved(lm.config) | {"dtype": str(dtype).removeprefix("torch.")})
    tokens = 5
    with torch.no_grad():
        cache = lm(torch.arange(3, 3 + tokens)[None], use_cache=True).past_key_values
    linear, full = cache.layers
    state: list[Tensor] = [linear.conv_states[0], linear.recurrent_states[0]]
    assert sizes.state_bytes_per_sequence() == sum(tensor.nbytes for tensor in state)
    assert sizes.kv_bytes_per_token(dtype.itemsize) == (full.keys.nbytes + full.values.nbytes) / tokens


def counted(lm: PreTrainedModel, tokens: int) -> int:
    """FLOPs of a forward, counted operation by operation as it runs (the counter knows no fused ones of a CPU)."""
    lm.set_attn_implementation("eager")
    lm.set_experts_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        lm(torch.arange(tokens)[None] % 30 + 3)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", [name for name in CHECKPOINT_FAMILIES if name != "qwen3_next"])
def test_flops_are_those_that_a_forward_takes(name: str) -> None:
    """On a CPU attention computes the whole square, masked or not: each token attends to all, within the window."""
    lm = CHECKPOINT_FAMILIES[name]()
    assert read_sizes(saved(lm.config)).forward_flops(8, 8.0) == counted(lm, 8)


def test_flops_of_linear_attention_are_those_of_its_chunks() -> None:
    """The counter knows no triangular systems; the convolution pads the row on both sides and cuts what is over."""
    lm, tokens = CHECKPOINT_FAMILIES["qwen3_next"](), 64
    sizes = read_sizes(saved(lm.config))
    linear = sizes.layers[0]
    systems = linear.heads * tokens * 64 * (linear.head_dim + linear.value_dim)
    (convolution,) = (tensor for tensor in linear.parameters if "conv1d" in tensor.name)
    padding = 2 * convolution.numel * (convolution.shape[-1] - 1)
    assert sizes.forward_flops(tokens, float(tokens)) == counted(lm, tokens) + systems - padding


def test_a_window_caps_what_a_token_attends_to() -> None:
    config = CHECKPOINT_FAMILIES["gemma3"]().config  # a window of 8 in one of two layers, 4 heads of 8
    sizes = read_sizes(saved(config))
    assert sizes.forward_flops(3, 20.0) - sizes.forward_flops(3, 10.0) == 3 * 4 * 4 * 8 * 10
    assert sizes.forward_flops(3, 8.0) - sizes.forward_flops(3, 6.0) == 2 * 3 * 4 * 4 * 8 * 2


@pytest.mark.parametrize(
    ("name", "experts", "sent_to"), [("mixtral", 4, 2), ("qwen3_moe", 11, 2), ("qwen3_next", 4, 2)]
)
def test_active_parameters_leave_out_the_other_experts_and_the_embedding(name: str, experts: int, sent_to: int) -> None:
    lm = CHECKPOINT_FAMILIES[name]()
    idle = sum(p.numel() for key, p in lm.named_parameters() if ".experts." in key) // experts * (experts - sent_to)
    everything = sum(p.numel() for p in lm.parameters())
    assert (
        read_sizes(saved(lm.config)).active_parameters == everything - idle - lm.get_input_embeddings().weight.numel()
    )


def test_a_tied_head_is_active_and_positions_are_not() -> None:
    gpt2 = CHECKPOINT_FAMILIES["gpt2"]()
    positions = gpt2.transformer.wpe.weight.numel()
    everything = sum(p.numel() for p in gpt2.parameters())
    assert read_sizes(saved(gpt2.config)).active_parameters == everything - positions


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "mamba2"}, ["'mamba2'", "llama", "qwen3_next", "gpt2", "model.config"]),
        ({}, ["model_type None", "model.config"]),
        (small("llama") | {"hidden_size": None}, ["'llama'", "`hidden_size`", "model.config"]),
        ({key: value for key, value in small("qwen2").items() if key != "vocab_size"}, ["'qwen2'", "`vocab_size`"]),
        ({"model_type": "gpt2", "vocab_size": 40, "n_layer": 2, "n_head": 4}, ["'gpt2'", "`n_embd`"]),
        (small("gpt2", n_embd=24, n_layer=2, n_head=4, add_cross_attention=True), ["`add_cross_attention`"]),
        (small("llama", num_hidden_layers=-1), ["-1", "`num_hidden_layers`"]),
        (small("llama", num_attention_heads=True), ["True", "`num_attention_heads`"]),
        (small("llama", head_dim=2.5), ["2.5", "`head_dim`"]),
        (small("llama", attention_bias="no"), ["'no'", "`attention_bias`"]),
        (small("qwen3_moe", mlp_only_layers=3), ["3", "`mlp_only_layers`"]),
        (small("gemma3_text", layer_types=["full_attention"]), ["1 entries", "`layer_types`", "4 layers"]),
        (small("gemma3_text", layer_types=["chunked_attention"] * 4), ["`layer_types`", "'chunked'"]),
        (small("qwen3", layer_types=["linear_attention"] * 4), ["`layer_types`", "'linear'"]),
    ],
)
def test_what_cannot_be_read_is_named(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RefusedError) as refused:
        read_sizes(values)
    (cause,) = refused.value.causes
    assert [word for word in words if word not in cause] == []


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda folder: None, "neither a config.json nor a folder with one"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "no JSON object"),
        (lambda folder: (folder / "config.json").mkdir(), "cannot be read as JSON"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, prepare: Callable[[Path], object], words: str) -> None:
    prepare(tmp_path)
    with pytest.raises(RefusedError, match=words):
        read_sizes(tmp_path)


def test_sizes_are_read_without_torch_and_transformers() -> None:
    code = (
        "import sys; from pathlib import Path; from plimsoll.model.sizes import read_sizes;"
        f" read_sizes(Path({str(MODELS / 'Qwen3-Next-80B-A3B-Instruct')!r}));"
        " assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
