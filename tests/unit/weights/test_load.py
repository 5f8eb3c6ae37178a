"""Loading into one process: modules of any kind, ties, new heads, and what is refused before anything is written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.load import load_sharded, same_values
from plimsoll.weights.pieces import identity_table
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


def test_stored_values_are_compared_bit_by_bit_and_in_parts(tmp_path: Path) -> None:
    a = torch.randn(3000, 1000)
    a[0, 0] = torch.nan
    b = a.clone()
    b[2999, 999] += 1
    save_file({"a": a, "same": a.clone(), "b": b, "half": a.half()}, tmp_path / "model.safetensors")
    tables = {name: identity_table(name, (3000, 1000)) for name in ("a", "same", "b", "half")}
    with WeightFiles(tmp_path) as files:
        assert same_values(files, tables["a"], tables["same"])
        assert not same_values(files, tables["a"], tables["b"])
        assert not same_values(files, tables["a"], tables["half"])
        assert [same_values(files, tables["a"], tables["b"], part, 2) for part in range(2)].count(False) == 1


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
