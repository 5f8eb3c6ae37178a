"""Critics and reward models from a language model's folder, from their own, and back into one."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from plimsoll.errors import RefusedError
from plimsoll.model.heads import build_sequence_classifier, build_value_model, heads_of, load_with_head
from plimsoll.weights.export import export_sharded
from tests import tiny

KINDS = {
    "reward": (build_sequence_classifier, AutoModelForSequenceClassification),
    "critic": (build_value_model, AutoModelForTokenClassification),
}


def causal(folder: Path, family: str = "llama") -> Path:
    tiny.FAMILIES[family](seed=3).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_the_base_is_the_language_models_and_the_head_is_new(
    tmp_path: Path, family: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = causal(tmp_path / "lm", family)
    model = KINDS[kind][0](folder, torch.float32)
    with caplog.at_level(logging.INFO):
        loaded = load_with_head(model, folder, seed=5)

    base = AutoModelForCausalLM.from_pretrained(folder).base_model.state_dict()
    assert model.base_model.state_dict().keys() == base.keys()
    assert all(torch.equal(tensor, base[name]) for name, tensor in model.base_model.state_dict().items())
    (head,) = heads_of(model)
    bias = {f"{head}.bias"} if kind == "critic" else set[str]()
    assert set(loaded.fresh) == {f"{head}.weight"} | bias
    assert all(not model.get_parameter(name).any() for name in bias)
    weight = model.get_parameter(f"{head}.weight").detach()
    assert weight.shape == (1, 32)
    assert 0.5 < float(weight.std()) / model.config.initializer_range < 1.5
    assert loaded.left_out == (("lm_head.weight",) if family == "llama" else ())  # the other two are tied
    assert f"{folder}: new head {head}." in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_one_comes_back_whole_and_transformers_loads_it(tmp_path: Path, kind: str) -> None:
    build, loader = KINDS[kind]
    folder = causal(tmp_path / "lm")
    model = build(folder, torch.float32)
    load_with_head(model, folder, seed=5)

    export_sharded(model, tmp_path / "saved", dtype=torch.float32)

    again = build(tmp_path / "saved", torch.float32)
    loaded = load_with_head(again, tmp_path / "saved", seed=6)
    assert (loaded.fresh, loaded.left_out) == ((), ())
    theirs, report = loader.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()), report
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
        assert torch.equal(theirs.state_dict()[name], tensor), name
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, theirs.eval()(ids).logits)


def test_values_are_one_a_token_and_scores_one_a_sequence(tmp_path: Path) -> None:
    folder = causal(tmp_path / "lm")
    shapes: dict[str, tuple[int, ...]] = {}
    for kind, (build, _) in KINDS.items():
        model = build(folder, torch.float32)
        load_with_head(model, folder)
        model.config.pad_token_id = 0
        shapes[kind] = tuple(model(torch.arange(1, 9)[None]).logits.shape)
    assert shapes == {"reward": (1, 1), "critic": (1, 8, 1)}


def test_the_seed_alone_decides_about_the_head(tmp_path: Path) -> None:
    folder = causal(tmp_path / "lm")

    def head(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.seed())
        model = build_value_model(folder, torch.float32)
        load_with_head(model, folder, seed=seed)
        return model.get_parameter("score.weight").detach()

    assert torch.equal(head(1), head(1))
    assert not torch.equal(head(1), head(2))


def test_a_hole_in_the_base_is_no_new_head(tmp_path: Path) -> None:
    lm: Any = tiny.llama()
    state = lm.state_dict()
    del state["model.norm.weight"]
    lm.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(RefusedError, match=r"missing tensor: model\.norm\.weight"):
        load_with_head(build_value_model(tmp_path, torch.float32), tmp_path)
