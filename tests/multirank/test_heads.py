"""A critic on two ranks: the head is made equal without a broadcast, and every rank writes its part."""

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForTokenClassification, PreTrainedModel

from plimsoll.model.heads import build_value_model, load_with_head
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.export import export_sharded
from tests import tiny
from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _two_ranks(rank: int, ranks: int, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    model = build_value_model(folder, torch.float32)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    control = ControlGroup()
    loaded = load_with_head(model, folder, seed=5, control=control)
    assert set(loaded.fresh) == {"score.weight", "score.bias"}
    export_sharded(model, out, dtype=torch.float32, control=control)
    control.close()
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def test_two_ranks_hold_what_one_holds_and_write_it(tmp_path: Path) -> None:
    folder = tmp_path / "lm"
    tiny.llama(seed=3).save_pretrained(folder)
    alone = build_value_model(folder, torch.float32)
    load_with_head(alone, folder, seed=5)

    found = run_ranks(_two_ranks, 2, tmp_path / "ranks", folder, tmp_path / "saved")

    saved: PreTrainedModel = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    for name, tensor in alone.state_dict().items():
        assert all(torch.equal(state[name], tensor) for state in found), name
        assert torch.equal(saved.state_dict()[name], tensor), name
