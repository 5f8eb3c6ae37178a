"""Every family on 1, 2 and 4 ranks: what is loaded shard by shard is what `from_pretrained` gives, and back again."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM, PreTrainedModel

from plimsoll.model.build import build_meta
from plimsoll.model.spec import decoder_layers
from plimsoll.parallel.tensors import full
from plimsoll.weights import export_sharded, load_sharded
from tests import tiny
from tests.ranks import run_ranks
from tests.sharding import TENSOR_PLAN, TOKENS

pytestmark = pytest.mark.timeout(300)

FAMILIES = tuple(tiny.CHECKPOINT_FAMILIES)
PLACEMENTS = {1: ("shard",), 2: ("shard", "tensor"), 4: ("shard", "hybrid", "tensor")}
TENSOR_FAMILIES = ("llama", "qwen2")


def mesh_of(placement: str, ranks: int) -> DeviceMesh:
    if placement == "hybrid":
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    if placement == "tensor":
        return init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shard", "tensor"))
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))


def sharded(folder: Path, placement: str, ranks: int, dtype: torch.dtype) -> PreTrainedModel:
    model = build_meta(folder, dtype)
    mesh = mesh_of(placement, ranks)
    layers = decoder_layers(model)
    if placement == "tensor":
        for layer in layers:
            parallelize_module(layer, mesh["tensor"], TENSOR_PLAN)
        mesh = mesh["shard"]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def differences(model: nn.Module, expected: nn.Module) -> list[str]:
    """Names of parameters and buffers that are not bitwise equal. Collective."""
    wrong: list[str] = []
    for kind in ("named_parameters", "named_buffers"):
        own = dict(getattr(model, kind)(remove_duplicate=False))
        theirs = dict(getattr(expected, kind)(remove_duplicate=False))
        wrong += sorted(set(own) ^ set(theirs))
        for name in theirs:
            tensor = full(own[name])
            if tensor.dtype != theirs[name].dtype or not torch.equal(tensor, theirs[name].detach()):
                wrong.append(name)
    return wrong


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


@cache
def pretrained(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def check(folder: Path, placement: str, ranks: int, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    expected = pretrained(folder, torch.float32)
    model = sharded(folder, placement, ranks, torch.float32).eval()
    load_sharded(model, folder)
    found["loaded"] = differences(model, expected)
    found["logits"] = float((logits(model) - logits(expected)).abs().max())
    found["after_forward"] = differences(model, expected)
    tied = expected.get_input_embeddings().weight is expected.get_output_embeddings().weight
    found["tied"] = (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    export_sharded(model, out, dtype=torch.float32, source=folder)
    if dist.get_rank() == 0:
        again, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
        found["keys"] = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"]) + sorted(info["mismatched_keys"])
        found["exported"] = differences(again, expected)
    if placement == "shard":
        found["half"] = half_precision(folder, placement, ranks)
    return found


def half_precision(folder: Path, placement: str, ranks: int) -> list[str]:
    """The cast on the way is the one that from_pretrained makes."""
    model = sharded(folder, placement, ranks, torch.bfloat16)
    load_sharded(model, folder)
    return differences(model, pretrained(folder, torch.bfloat16))


def check_all(rank: int, ranks: int, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for placement in PLACEMENTS[ranks]:
        for family in TENSOR_FAMILIES if placement == "tensor" else FAMILIES:
            out = root / f"out_{ranks}_{placement}_{family}"
            found[f"{family}-{placement}"] = check(root / family, placement, ranks, out)
            dist.barrier()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        tiny.CHECKPOINT_FAMILIES[family](seed=3).save_pretrained(root / family)
    return root


@pytest.fixture(scope="module")
def found(folders: Path) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """By number of ranks and case: what each rank found."""
    every: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for ranks in PLACEMENTS:
        results = run_ranks(check_all, ranks, folders / f"ranks_{ranks}", folders)
        for case in results[0]:
            every[ranks, case] = [result[case] for result in results]
    return every


CASES = [
    (ranks, f"{family}-{placement}")
    for ranks, placements in PLACEMENTS.items()
    for placement in placements
    for family in (TENSOR_FAMILIES if placement == "tensor" else FAMILIES)
]


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_loaded_and_exported_is_what_from_pretrained_gives(
    ranks: int, case: str, found: dict[tuple[int, str], list[dict[str, Any]]]
) -> None:
    for result in found[ranks, case]:
        assert result["loaded"] == []
        assert result["after_forward"] == []
        assert result["tied"]
        assert result["logits"] <= (1e-5 if case.endswith("tensor") else 0.0)
        assert result.get("half", []) == []
    first = found[ranks, case][0]
    assert first["keys"] == []
    assert first["exported"] == []
    assert ("half" in first) == case.endswith("shard")
