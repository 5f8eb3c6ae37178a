from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from plimsoll.errors import RefusedError
from plimsoll.model.build import build_meta
from plimsoll.weights.buffers import init_fresh, rebuild_buffers
from plimsoll.weights.ties import empty_on
from tests import tiny
from tests.unit.weights.naive import CPU


def emptied(folder: Path, **options: Any) -> PreTrainedModel:
    """With memory that holds a recognisable wrong value everywhere."""
    model = build_meta(folder, torch.float32, **options)
    empty_on(model, CPU)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(7)
    return model


@pytest.mark.parametrize("family", tiny.CHECKPOINT_FAMILIES)
def test_buffers_are_those_of_from_pretrained_and_parameters_are_left_alone(family: str, tmp_path: Path) -> None:
    tiny.CHECKPOINT_FAMILIES[family]().save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = emptied(tmp_path)
    state = torch.get_rng_state()
    rebuild_buffers(model, CPU)
    theirs = dict(expected.named_buffers())
    own = dict(model.named_buffers())
    assert own.keys() == theirs.keys()
    assert own or family == "gpt2"
    for name, buffer in own.items():
        assert torch.equal(buffer, theirs[name]), name
        assert buffer.dtype == theirs[name].dtype
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.state_dict().keys() == expected.state_dict().keys()


def test_buffers_of_a_model_on_the_meta_device_get_memory(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    model = build_meta(tmp_path, torch.float32)
    rebuild_buffers(model, CPU)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)
    assert "model.rotary_emb.inv_freq" not in model.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_buffer_that_nothing_computes_is_refused_by_name_or_given(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    model = emptied(tmp_path)
    model.model.layers[1].register_buffer("table", torch.zeros(3, dtype=dtype), persistent=False)
    with pytest.raises(RefusedError, match=r"buffer model\.layers\.1\.table is in no checkpoint"):
        rebuild_buffers(model, CPU)
    value = torch.tensor([1, 0, 1], dtype=dtype)
    rebuild_buffers(model, CPU, {"model.layers.1.table": value})
    assert torch.equal(model.model.layers[1].table, value)
    with pytest.raises(RefusedError, match=r"no computed buffer model\.nowhere"):
        rebuild_buffers(model, CPU, {"model.nowhere": value, "model.layers.1.table": value})


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_refused(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    model = emptied(tmp_path)
    model.model.norm.scale = torch.ones(2, device="meta")
    with pytest.raises(RefusedError, match=r"model\.norm\.scale is a tensor that is neither"):
        rebuild_buffers(model, CPU)


def test_a_new_head_follows_the_seed_and_nothing_else_is_touched(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    heads: list[nn.Module] = []
    for seed in (1, 1, 2):
        model = emptied(tmp_path, auto_class="token_classification", num_labels=5)
        torch.manual_seed(seed + 10 * len(heads))  # what the process drew before does not matter
        init_fresh(model, ["score.weight", "score.bias"], seed)
        assert all(bool((p == 7).all()) for name, p in model.named_parameters() if not name.startswith("score."))
        heads.append(model.score)
    first, again, other = (head.weight for head in heads)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.3 < float(first.detach().std() / 0.02) < 3  # the config's initializer_range
    assert torch.equal(heads[0].bias, torch.zeros(5))
    with pytest.raises(RefusedError, match="no parameter value_head"):
        init_fresh(model, ["value_head"], 1)
