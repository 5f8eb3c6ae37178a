"""Conversions that no family here has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.conversion_mapping as mapping
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, ConversionOps, Interleave, Transpose, WeightConverter

from plimsoll.errors import RefusedError
from plimsoll.model.build import build_meta
from plimsoll.weights.names import CheckpointTables, export_tables
from tests import tiny
from tests.unit.weights.naive import differences, exported, fits, load, reference, save, stored_in


@pytest.fixture
def conversions() -> Iterator[Any]:
    """Registers conversions for the Llama classes, and takes them back."""

    def register(*transforms: Any) -> None:
        mapping.register_checkpoint_conversion_mapping("LlamaForCausalLM", list(transforms), overwrite=True)

    yield register
    mapping._checkpoint_conversion_mapping_cache.pop("LlamaForCausalLM", None)
    mapping.USER_REGISTERED_MAPPINGS.discard("LlamaForCausalLM")


def check_conversion(folder: Path) -> tuple[PreTrainedModel, CheckpointTables]:
    """Stored by transformers' own reverse, read by our tables; compared with from_pretrained."""
    stored = save(tiny.llama(seed=7), folder)
    model = build_meta(folder, torch.float32)
    found = load(model, stored)
    assert fits(found)
    assert differences(model, reference(folder)[0]) == []
    return model, found


@pytest.mark.parametrize("transposed", [True, False])
def test_a_matrix_is_transposed_only_if_its_shape_asks_for_it(
    transposed: bool, conversions: Any, tmp_path: Path
) -> None:
    source = tiny.llama(seed=7)
    stored: dict[str, Tensor] = {}
    for name, tensor in source.named_parameters():
        turned = "up_proj" in name and transposed
        stored[name.replace("up_proj.weight", "up.kernel")] = tensor.T if turned else tensor
    stored = save(source, tmp_path, stored)
    conversions(WeightConverter("mlp.up.kernel", "mlp.up_proj.weight", [Transpose(0, 1, check_dims=True)]))
    model = build_meta(tmp_path, torch.float32)
    found = load(model, stored)
    piece = found.tables["model.layers.0.mlp.up_proj.weight"].pieces[0]
    assert piece.dims == ((1, 0) if transposed else (0, 1))
    assert differences(model, reference(tmp_path)[0]) == []
    assert differences(model, source) == []
    made = exported(model, dict(export_tables(model, found)))
    assert all(torch.equal(made[name], stored[name]) for name in stored)


def test_transposed_and_split_tensors_are_tables_and_go_back(conversions: Any, tmp_path: Path) -> None:
    conversions(
        WeightConverter("mlp.gate.kernel", "mlp.gate_proj.weight", [Transpose(0, 1)]),
        WeightConverter("attn.kv.weight", ["attn.k_proj.weight", "attn.v_proj.weight"], [Chunk(dim=0)]),
    )
    model, found = check_conversion(tmp_path)
    value = found.tables["model.layers.0.self_attn.v_proj.weight"].pieces[0]
    assert (value.stored, value.stored_box.start) == ("model.layers.0.self_attn.kv.weight", (16, 0))
    piece = found.tables["model.layers.0.mlp.gate_proj.weight"].pieces[0]
    assert (piece.stored, piece.dims) == ("model.layers.0.mlp.gate.kernel", (1, 0))
    assert found.stored_shapes[piece.stored] == (32, 64)
    stored = stored_in(tmp_path)
    for source in (found, None):
        made = exported(model, dict(export_tables(model, source)))
        assert made.keys() == stored.keys()
        assert all(torch.equal(made[name], stored[name]) for name in stored)


class Doubled(ConversionOps):
    """Computes, so that no table can stand for it."""

    def convert(self, input_dict: dict[str, Any], source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        (tensors,) = input_dict.values()
        return {target_patterns[0]: (tensors[0] if isinstance(tensors, list) else tensors) * 2}

    @property
    def reverse_op(self) -> ConversionOps:
        return Doubled()


@pytest.mark.parametrize("operation", [Doubled(), Interleave(dim=0)], ids=["computes", "reshapes"])
def test_an_operation_without_a_table_runs_on_whole_tensors_and_refuses_export(
    operation: ConversionOps, conversions: Any, tmp_path: Path
) -> None:
    conversions(WeightConverter("mlp.up.packed", "mlp.up_proj.weight", [operation]))
    model, found = check_conversion(tmp_path)
    table = found.tables["model.layers.0.mlp.up_proj.weight"]
    assert table.conversion is not None
    assert table.conversion.stored == ("model.layers.0.mlp.up.packed",)
    with pytest.raises(RefusedError, match=r"up_proj\.weight was made of .*up\.packed by an operation that has no way"):
        export_tables(model, found)
    name = type(operation).__name__
    with pytest.raises(RefusedError, match=rf"layers\.0\.mlp\.up_proj\.weight .* transformers' {name} takes") as error:
        export_tables(model, None)
    assert len(error.value.causes) == 2
