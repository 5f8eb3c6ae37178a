"""Sizes from the model itself: those from config.json where a family is known, and runs of families that are not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedConfig, PreTrainedModel

from plimsoll.cli import main
from plimsoll.errors import RefusedError
from plimsoll.jsonl import read_jsonl
from plimsoll.model.measure import sizes_of
from plimsoll.model.sizes import read_sizes
from plimsoll.sizing import model_sizes
from tests.e2e.small import TOKENIZER, Small
from tests.tiny import CHECKPOINT_FAMILIES

MIXTURES = {"qwen3_moe", "mixtral", "qwen3_next"}


def unknown(vocab: int = 64) -> PreTrainedModel:
    """GPT-NeoX: untied, biases everywhere, half of each head rotated; no rules of ours."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return GPTNeoXForCausalLM(config).eval()


def values_of(config: PreTrainedConfig) -> dict[str, Any]:
    return json.loads(config.to_json_string())


@pytest.mark.parametrize("family", list(CHECKPOINT_FAMILIES))
def test_parameters_are_those_of_the_rules(family: str) -> None:
    lm = CHECKPOINT_FAMILIES[family]()
    measured, known = sizes_of(lm), read_sizes(values_of(lm.config))
    assert measured.num_parameters == known.num_parameters == sum(p.numel() for p in lm.parameters())
    assert [layer.num_parameters for layer in measured.layers] == [layer.num_parameters for layer in known.layers]
    for ranks in (1, 3):
        assert measured.parameter_bytes(2, ranks) == known.parameter_bytes(2, ranks)
    assert (measured.hidden, measured.vocab, measured.tied) == (known.hidden, known.vocab, known.tied)


@pytest.mark.parametrize("family", [family for family in CHECKPOINT_FAMILIES if family not in MIXTURES])
def test_the_cache_of_a_dense_family_is_that_of_the_rules(family: str) -> None:
    lm = CHECKPOINT_FAMILIES[family]()
    measured, known = sizes_of(lm), read_sizes(values_of(lm.config))
    assert measured.kv_bytes_per_token(2) == known.kv_bytes_per_token(2)
    assert [layer.intermediate for layer in measured.layers] == [layer.intermediate for layer in known.layers]


def test_a_family_without_rules_is_built_and_measured() -> None:
    lm = unknown()
    with pytest.raises(RefusedError):
        read_sizes(values_of(lm.config))
    sizes = model_sizes(lm.config)
    assert sizes == sizes_of(lm)  # without memory as with it
    assert sizes.num_parameters == sum(p.numel() for p in lm.parameters())
    assert sizes.kv_bytes_per_token(4) == 3 * 2 * 32 * 4
    assert {layer.intermediate for layer in sizes.layers} == {96}


def test_a_family_without_rules_is_planned_trained_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    model = tmp_path / "model"
    lm = unknown(len(tokenizer))
    lm.save_pretrained(model)
    tokenizer.save_pretrained(model)
    run = Small(tmp_path, model).train("train.steps=2")
    plan = json.loads((run / "plan.json").read_text())
    wanted = 4 * sum(p.numel() for p in lm.parameters())
    for row in plan["memory"]["phases"]:
        assert row["residents"]["actor_parameters"] == wanted
    measured = list(read_jsonl(run / "memory.jsonl"))
    assert measured[-1]["residents"]["actor_parameters"] == wanted
    assert measured[-1]["residents"]["kv_cache"] == plan["kv_bytes"]
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [0, 1, 2]
    assert main(["eval", str(run)]) == 0
