from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForTokenClassification

from plimsoll.errors import RefusedError
from plimsoll.model.build import build_meta
from plimsoll.weights.buffers import rebuild_buffers
from plimsoll.weights.names import (
    checkpoint_tables,
    export_tables,
    misfit_error,
    module_tensors,
    plain_name,
)
from plimsoll.weights.ties import empty_on, untie
from tests import tiny
from tests.unit.weights.naive import CPU, differences, exported, fits, load, reference, save, stored_in

FAMILIES = tiny.CHECKPOINT_FAMILIES
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_and_buffer_is_what_from_pretrained_makes(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    stored = save(FAMILIES[family](seed=3), tmp_path)
    model = build_meta(tmp_path, dtype)
    found = load(model, stored)
    assert fits(found)
    expected, _ = reference(tmp_path, dtype)
    assert differences(model, expected) == []
    ids = torch.arange(12).reshape(1, 12) % 60 + 3
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected.eval()(ids).logits)


@pytest.mark.parametrize("like_the_source", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_writes_what_save_pretrained_writes(family: str, like_the_source: bool, tmp_path: Path) -> None:
    stored = save(FAMILIES[family](seed=3), tmp_path)
    model = build_meta(tmp_path, torch.float32)
    found = load(model, stored)
    tables = export_tables(model, found if like_the_source else None)
    made = exported(model, dict(tables))
    assert made.keys() == stored.keys()
    assert [name for name in stored if not torch.equal(made[name], stored[name])] == []


def test_a_model_that_no_checkpoint_was_read_into_is_exported_as_save_pretrained_does(tmp_path: Path) -> None:
    model = tiny.qwen3_moe()
    tables = export_tables(model, None)
    made = exported(model, dict(tables))
    stored = save(model, tmp_path)
    assert made.keys() == stored.keys()
    assert "model.layers.1.mlp.experts.10.gate_proj.weight" in made
    assert all(torch.equal(made[name], stored[name]) for name in stored)


def test_experts_are_stacked_by_number_not_by_the_order_of_their_names(tmp_path: Path) -> None:
    stored = save(tiny.qwen3_moe(), tmp_path)
    found = checkpoint_tables(build_meta(tmp_path, torch.float32), stored)
    pieces = found.tables["model.layers.1.mlp.experts.gate_up_proj"].pieces
    assert len(pieces) == 22
    for piece in pieces:
        expert = int(piece.stored.split(".experts.")[1].split(".")[0])
        half = 8 if "up_proj" in piece.stored else 0
        assert piece.target_box.start == (expert, half, 0)
        assert piece.dims == (None, 0, 1)


def test_a_checkpoint_that_is_stacked_already_is_read_and_exported_stacked(tmp_path: Path) -> None:
    source = tiny.qwen3_moe(seed=4)
    stored = save(source, tmp_path, dict(source.named_parameters()))
    assert "model.layers.1.mlp.experts.gate_up_proj" in stored
    model = build_meta(tmp_path, torch.float32)
    found = load(model, stored)
    expected, _ = reference(tmp_path)
    assert differences(model, expected) == []
    expected.save_pretrained(tmp_path / "again")
    written = stored_in(tmp_path / "again").keys()
    assert export_tables(model, found).keys() == written
    assert export_tables(model, None).keys() == written


def test_a_base_model_without_its_prefix_and_with_old_buffers_is_read(tmp_path: Path) -> None:
    source = tiny.gpt2(seed=5)
    base = source.base_model.state_dict()
    stored = save(source, tmp_path, base | {"h.0.attn.bias": torch.ones(1, 1, 128, 128)})
    assert "h.1.mlp.c_fc.weight" in stored
    model = build_meta(tmp_path, torch.float32)
    found = load(model, stored)
    expected, info = reference(tmp_path)
    assert (sorted(info["missing_keys"]), sorted(info["unexpected_keys"])) == ([], [])
    assert fits(found)
    assert differences(model, expected) == []
    assert export_tables(model, found).keys() == base.keys()


def test_all_that_does_not_fit_is_one_error_with_names_and_shapes(tmp_path: Path) -> None:
    stored = save(tiny.llama(), tmp_path)
    del stored["lm_head.weight"], stored["model.layers.1.mlp.up_proj.weight"]
    stored["model.norm.weight"] = torch.ones(31)
    stored |= {f"model.extra.{index}": torch.ones(2, 3) for index in range(11)}
    save(tiny.llama(), tmp_path, stored)
    found = checkpoint_tables(build_meta(tmp_path, torch.float32), stored)
    error = misfit_error(found, "some/folder")
    assert error is not None
    missing, unexpected, misshapen = error.causes
    assert missing.endswith(
        "some/folder has 2 missing tensors: lm_head.weight [64, 32], model.layers.1.mlp.up_proj.weight [64, 32]"
    )
    assert "has 11 unexpected tensors: model.extra.0 [2, 3], " in unexpected
    assert unexpected.endswith("model.extra.7 [2, 3], and 3 more")
    assert misshapen.endswith("1 misshapen tensor: model.norm.weight is [32] in the model, [31] in the checkpoint")
    backwards = dict(reversed(stored.items()))
    again = misfit_error(checkpoint_tables(build_meta(tmp_path, torch.float32), backwards), "some/folder")
    assert again is not None
    assert again.causes == error.causes


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "gemma3"])
def test_missing_and_unexpected_are_those_of_from_pretrained(family: str, tmp_path: Path) -> None:
    source = FAMILIES[family]()
    stored = save(source, tmp_path)
    gone = [name for name in stored if ".1." in name and ("down_proj" in name or "c_proj.bias" in name)]
    for name in gone:
        del stored[name]
    stored |= {"stray": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save(source, tmp_path, stored)
    found = checkpoint_tables(build_meta(tmp_path, torch.float32), stored)
    _, info = reference(tmp_path)
    assert [entry.name for entry in found.missing] == sorted(info["missing_keys"]) != []
    assert sorted(entry.name for entry in found.unexpected) == sorted(info["unexpected_keys"])


def test_an_expert_that_is_not_stored_makes_the_stack_misshapen(tmp_path: Path) -> None:
    stored = save(tiny.qwen3_moe(), tmp_path)
    del stored["model.layers.1.mlp.experts.3.down_proj.weight"]
    found = checkpoint_tables(build_meta(tmp_path, torch.float32), stored)
    assert [(entry.name, entry.shape, entry.stored_shape) for entry in found.mismatched] == [
        ("model.layers.1.mlp.experts.down_proj", (11, 24, 8), (10, 24, 8))
    ]
    stored["model.layers.1.mlp.experts.3.down_proj.weight"] = torch.ones(23, 8)
    found = checkpoint_tables(build_meta(tmp_path, torch.float32), stored)
    assert [entry.stored_shape for entry in found.mismatched] == [None]
    assert "its 11 stored tensors do not fit together" in str(misfit_error(found, "folder"))


# Ties


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_a_tied_weight_may_be_stored_under_either_name(name: str, tmp_path: Path) -> None:
    source = tiny.qwen2(seed=6)
    weights = save(source, tmp_path)
    weights[name] = weights.pop(EMBEDDING)
    stored = save(source, tmp_path, weights)
    model = build_meta(tmp_path, torch.float32)
    found = load(model, stored)
    assert fits(found)
    assert found.tables[EMBEDDING].aliases == (HEAD,)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert differences(model, reference(tmp_path)[0]) == []
    assert export_tables(model, found).keys() == stored.keys()
    assert EMBEDDING in export_tables(model, None)


def test_a_tie_stored_twice_with_equal_values_stays_and_both_names_are_exported(tmp_path: Path) -> None:
    source = tiny.qwen2(seed=6)
    stored = save(source, tmp_path)
    stored = save(source, tmp_path, stored | {HEAD: stored[EMBEDDING]})
    model = build_meta(tmp_path, torch.float32)
    found = load(model, stored)
    assert [pair.name for pair in found.tied_pairs_to_compare] == [HEAD]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    made = exported(model, dict(export_tables(model, found)))
    assert made.keys() == stored.keys()
    assert torch.equal(made[HEAD], stored[HEAD])
    assert HEAD not in export_tables(model, None)


def test_a_tie_stored_with_two_values_is_no_tie_whatever_the_config_says(tmp_path: Path) -> None:
    source = tiny.qwen2(seed=6)
    stored = save(source, tmp_path)
    head = stored[EMBEDDING].clone()
    head[-1, -1] += 1e-3
    stored = save(source, tmp_path, stored | {HEAD: head})
    model = build_meta(tmp_path, torch.float32)
    found = load(model, stored)
    assert model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, head)
    assert differences(model, reference(tmp_path)[0]) == []
    assert found.tied_pairs_to_compare == ()
    assert export_tables(model, None).keys() == export_tables(model, found).keys() == stored.keys()


def test_untying_twice_and_memory_for_tied_weights() -> None:
    with torch.device("meta"):
        model = tiny.qwen2()
    model.to_empty(device="cpu")
    assert model.lm_head.weight is not model.model.embed_tokens.weight, "torch keeps ties by itself: drop empty_on"
    with torch.device("meta"):
        model = tiny.qwen2()
    empty_on(model, CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untie(model, HEAD)
    untie(model, HEAD)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


# Heads of another task


def test_a_new_head_may_be_missing_and_the_old_one_unused(tmp_path: Path) -> None:
    stored = save(tiny.llama(), tmp_path)
    critic = build_meta(tmp_path, torch.float32, auto_class="token_classification", num_labels=1)
    found = checkpoint_tables(critic, stored)
    refused = misfit_error(found, "folder")
    assert refused is not None
    assert "2 missing tensors: score.bias [1], score.weight [1, 32]" in refused.causes[0]
    assert "1 unexpected tensor: lm_head.weight" in refused.causes[1]
    assert misfit_error(found, "folder", fresh=["score"]) is None
    assert misfit_error(found, "folder", fresh=["score.weight"]) is not None
    stored["model.layers.7.stray"] = torch.ones(1)
    found = checkpoint_tables(critic, stored)
    assert misfit_error(found, "folder", fresh=["score"]) is not None, "what is stray in the body stays an error"


def test_a_stored_head_is_read(tmp_path: Path) -> None:
    config = tiny.llama().config
    config.num_labels = 1
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    model = build_meta(tmp_path, torch.float32, auto_class="token_classification")
    assert fits(load(model, stored_in(tmp_path)))
    assert differences(model, AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float32)) == []


# Sharded models


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gpt2"])
def test_a_sharded_model_has_the_same_tables(family: str, one_rank: None, tmp_path: Path) -> None:
    stored = save(FAMILIES[family](), tmp_path)
    plain = checkpoint_tables(build_meta(tmp_path, torch.float32), stored)
    model = build_meta(tmp_path, torch.float32)
    layers = model.base_model.h if family == "gpt2" else model.base_model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    for layer in layers:
        fully_shard(layer)
    if family == "qwen3_moe":  # no class is left by which transformers would find the family's conversions
        fully_shard(model.base_model)
    fully_shard(model)
    found = checkpoint_tables(model, stored)
    assert fits(found)
    assert found.tables == plain.tables
    assert type(model).__name__.startswith("FSDP")
    assert export_tables(model, None).keys() == stored.keys()
    assert module_tensors(model).keys() == module_tensors(build_meta(tmp_path, torch.float32)).keys()
    empty_on(model, CPU)
    rebuild_buffers(model, CPU)
    buffers = {plain_name(name): buffer for name, buffer in model.named_buffers()}
    expected = dict(reference(tmp_path)[0].named_buffers())
    assert buffers.keys() == expected.keys()
    assert all(torch.equal(buffer, expected[name]) for name, buffer in buffers.items())
    if family != "qwen3_moe":
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_tie_that_sharding_lost_is_refused(one_rank: None, tmp_path: Path) -> None:
    stored = save(tiny.qwen2(), tmp_path)
    model = build_meta(tmp_path, torch.float32)
    fully_shard(model.model.embed_tokens)
    fully_shard(model)
    with pytest.raises(RefusedError, match=r"lm_head\.weight and model\.embed_tokens\.weight .* same group"):
        checkpoint_tables(model, stored)
