"""Loading into one process: modules of any kind, ties, new heads, and what is refused before anything is written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
)

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.model.build import build_meta
from plimsoll.weights.checkpoint_tables import CheckpointTables, TiedPair
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.load import load_sharded
from plimsoll.weights.names import plain_name
from plimsoll.weights.pieces import Conversion, identity_table
from plimsoll.weights.ties import broken_ties
from tests import tiny


class Pair(nn.Module):
    """Two layers of one weight, a norm with statistics, and a table that no file holds."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Tensor]:
    source = Pair()
    with torch.no_grad():
        source.norm.running_mean.normal_()  # type: ignore[union-attr]
    state = {name: tensor.clone() for name, tensor in source.state_dict().items() if name != "second.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return state


def meta_pair() -> Pair:
    with torch.device("meta"):
        pair = Pair()
    pair.register_buffer("table", torch.arange(3.0), persistent=False)
    return pair


def equals(pair: Pair, saved: dict[str, Tensor]) -> bool:
    state = pair.state_dict()
    return all(torch.equal(state[name], tensor) for name, tensor in saved.items())


def test_a_plain_module_takes_tensors_by_its_own_names_and_keeps_ties_and_real_buffers(
    tmp_path: Path, saved: dict[str, Tensor]
) -> None:
    pair = meta_pair()
    report = load_sharded(pair, tmp_path)
    assert equals(pair, saved)
    assert pair.second.weight is pair.first.weight
    assert pair.table.tolist() == [0, 1, 2]
    assert report.num_parameters == 16 + 8
    assert report.num_bytes_read == sum(tensor.nbytes for tensor in saved.values())
    assert list(report.files) == [tmp_path / "model.safetensors"]


def test_memory_that_is_there_is_filled_and_not_replaced(tmp_path: Path, saved: dict[str, Tensor]) -> None:
    pair = Pair()
    before = {name: tensor.data_ptr() for name, tensor in pair.state_dict().items()}
    load_sharded(pair, tmp_path)
    assert equals(pair, saved)
    assert {name: tensor.data_ptr() for name, tensor in pair.state_dict().items()} == before


def test_a_buffer_that_nobody_can_make_is_refused(tmp_path: Path, saved: dict[str, Tensor]) -> None:
    with torch.device("meta"):
        pair = Pair()
    with pytest.raises(RefusedError, match="table: no checkpoint holds this buffer"):
        load_sharded(pair, tmp_path)
    assert pair.first.weight.is_meta


def test_half_a_model_on_the_meta_device_is_refused(tmp_path: Path, saved: dict[str, Tensor]) -> None:
    pair = Pair()
    pair.norm = nn.BatchNorm1d(4, device="meta")
    with pytest.raises(RefusedError, match="some are not"):
        load_sharded(pair, tmp_path)


def test_all_that_does_not_match_is_said_at_once_and_nothing_is_written(
    tmp_path: Path, saved: dict[str, Tensor]
) -> None:
    wrong = {name: tensor for name, tensor in saved.items() if name != "norm.bias"}
    save_file(wrong | {"first.weight": torch.ones(4, 5), "extra": torch.ones(2)}, tmp_path / "model.safetensors")
    pair = Pair()
    weight = pair.norm.running_mean.clone()  # type: ignore[operator,union-attr]
    with pytest.raises(RefusedError) as error:
        load_sharded(pair, tmp_path)
    assert [cause.split(" has ")[1] for cause in error.value.causes] == [
        "1 missing tensor: norm.bias [4]",
        "1 unexpected tensor: extra [2]",
        "1 misshapen tensor: first.weight is [4, 4] in the model, [4, 5] in the checkpoint",
    ]
    assert torch.equal(pair.norm.running_mean, weight)  # type: ignore[arg-type]


def test_a_file_that_changed_since_it_was_opened_is_refused(tmp_path: Path, saved: dict[str, Tensor]) -> None:
    with WeightFiles(tmp_path) as files:
        (tmp_path / "other").write_bytes((tmp_path / "model.safetensors").read_bytes())
        (tmp_path / "other").replace(tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="inode"):
            load_sharded(Pair(), files)


def with_head(folder: Path, head: str) -> Any:
    """A tied model whose file holds the head as well. Returns the model on the meta device."""
    tiny.qwen2(tied=True, seed=5).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    embedding = state["model.embed_tokens.weight"]
    state["lm_head.weight"] = embedding.clone() if head == "equal" else embedding + 1
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def test_a_tied_head_that_is_stored_with_the_same_values_stays_tied(tmp_path: Path) -> None:
    model = with_head(tmp_path, "equal")
    load_sharded(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, load_file(tmp_path / "model.safetensors")["lm_head.weight"])


def test_a_tied_head_that_is_stored_with_other_values_is_refused_with_both_names(tmp_path: Path) -> None:
    model = with_head(tmp_path, "different")
    with pytest.raises(RefusedError, match=r"lm_head.weight and model.embed_tokens.weight are one parameter"):
        load_sharded(model, tmp_path)
    assert model.lm_head.weight.is_meta


def test_a_tie_whose_stored_values_differ_by_less_than_the_models_dtype_tells_stays_a_tie(tmp_path: Path) -> None:
    tiny.qwen2(tied=True).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    embedding = state["model.embed_tokens.weight"]
    save_file(
        state | {"lm_head.weight": embedding * (1 + 1e-6)}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    expected: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model: Any = build_meta(tmp_path, torch.bfloat16)
    load_sharded(model, tmp_path)
    assert expected.lm_head.weight is expected.model.embed_tokens.weight
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
    alone: Any = build_meta(tmp_path, torch.float32)
    assert alone.lm_head.weight is not alone.model.embed_tokens.weight


def test_two_values_for_one_weight_of_a_plain_module_are_refused(tmp_path: Path, saved: dict[str, Tensor]) -> None:
    both = saved | {"second.weight": saved["first.weight"].clone()}
    save_file(both, tmp_path / "model.safetensors")
    pair = meta_pair()
    load_sharded(pair, tmp_path)
    assert equals(pair, both)
    save_file(both | {"second.weight": both["first.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(RefusedError, match=r"second\.weight and first\.weight are one parameter"):
        load_sharded(meta_pair(), tmp_path)


def one_tie(values: dict[str, Tensor], folder: Path, conversion: Conversion | None = None) -> tuple[Any, ...]:
    """Files and tables of two names, "a" and "b", of one fp32 tensor."""
    save_file(values, folder / "model.safetensors")
    a, b = (identity_table(name, tuple(values[name].shape)) for name in ("a", "b"))
    if conversion is not None:
        b = replace(b, pieces=(), conversion=conversion)
    found = CheckpointTables(
        tables={"a": a},
        missing=(),
        forgiven=(),
        unexpected=(),
        mismatched=(),
        tied_pairs_to_compare=(TiedPair(name="b", kept="a", table=b),),
        stored_shapes={},
    )
    return found, {"a": torch.empty(a.shape, device="meta")}


def test_stored_values_are_compared_in_parts(tmp_path: Path) -> None:
    a = torch.randn(3000, 1000)
    b = a.clone()
    b[2999, 999] += 1
    for other, parted in ((a.clone(), 0), (b, 1)):
        found, members = one_tie({"a": a, "b": other}, tmp_path)
        with WeightFiles(tmp_path) as files:
            assert len(broken_ties(files, found, members)) == parted
            assert sum(len(broken_ties(files, found, members, part=part, parts=2)) for part in range(2)) == parted


def test_a_tie_to_what_is_computed_from_the_files_is_refused(tmp_path: Path) -> None:
    computed = Conversion(stored=("b",), convert=lambda tensors: tensors["b"] * 2)
    found, members = one_tie({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, computed)
    with WeightFiles(tmp_path) as files, pytest.raises(RefusedError, match=r"b is tied by the config.*tie_word_embedd"):
        broken_ties(files, found, members)


def test_compiled_and_checkpointed_layers_keep_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    tiny.gemma3(seed=4).save_pretrained(tmp_path)
    model: Any = build_meta(tmp_path, torch.float32)
    model.model.embed_tokens = torch.compile(model.model.embed_tokens)  # has a buffer of its own
    model.model.layers[0] = torch.compile(model.model.layers[0])
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    load_sharded(torch.compile(model), tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    made = {plain_name(name): tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    wanted = dict((*expected.named_parameters(), *expected.named_buffers()))
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in wanted.items())


def test_what_a_family_allows_a_checkpoint_to_lack_is_initialised(tmp_path: Path) -> None:
    config = BartConfig(
        vocab_size=61,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=32,
    )
    BartForConditionalGeneration(config).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["final_logits_bias"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = BartForConditionalGeneration(config).eval()
    model.final_logits_bias.fill_(3)
    report = load_sharded(model, tmp_path)
    assert not model.final_logits_bias.any()
    assert report.fresh == ()


def test_a_new_head_is_made_from_the_seed_and_the_rest_is_read(tmp_path: Path) -> None:
    tiny.llama(seed=2).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_labels = 1

    def loaded(seed: int) -> Any:
        with torch.device("meta"):
            model: Any = AutoModelForSequenceClassification.from_config(config)
        load_sharded(model, tmp_path, fresh=("score",), seed=seed)
        return model

    one, same, other = loaded(1), loaded(1), loaded(2)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(one.model.embed_tokens.weight, stored["model.embed_tokens.weight"])
    assert torch.equal(one.score.weight, same.score.weight)
    assert not torch.equal(one.score.weight, other.score.weight)
    assert 0 < one.score.weight.std() < 10 * config.initializer_range
