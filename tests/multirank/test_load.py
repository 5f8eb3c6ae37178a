"""Every rank reads its own part: the model is what `from_pretrained` makes, and memory is what the shard takes."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from plimsoll.errors import RefusedError
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.layout import local_boxes, local_tensor
from plimsoll.weights.load import load_sharded
from plimsoll.weights.names import checkpoint_tables, module_tensors
from plimsoll.weights.read import read_parameters
from tests import tiny
from tests.ranks import run_ranks
from tests.sharding import TENSOR_PLAN, TOKENS

pytestmark = pytest.mark.timeout(300)

FAMILIES = ("qwen2", "llama")


def on_meta(folder: Path, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).eval()


def shard(model: Any, mesh: DeviceMesh) -> PreTrainedModel:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def line(model: Any) -> PreTrainedModel:
    return shard(model, init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))


def hybrid(model: Any) -> PreTrainedModel:
    return shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(model: Any) -> PreTrainedModel:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tensor"], TENSOR_PLAN)
    return shard(model, mesh["shard"])


def whole(model: Any) -> PreTrainedModel:
    return model


WAYS: dict[str, Callable[[Any], PreTrainedModel]] = {
    "whole": whole,
    "line": line,
    "hybrid": hybrid,
    "tensor": tensor_parallel,
}


def differing(model: nn.Module, expected: nn.Module) -> list[str]:
    """Names of what this rank holds and is not, bit by bit, its part of what was expected."""
    theirs = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    wrong = sorted(set(own) ^ set(theirs))
    for name, tensor in own.items():
        made = torch.full_like(local_tensor(tensor), 7)
        for box in local_boxes(tensor):
            made[box.local.slices] = theirs[name].detach()[box.full.slices]
        if made.dtype != theirs[name].dtype or not torch.equal(made, local_tensor(tensor)):
            wrong.append(name)
    return wrong


def load_case(folder: Path, way: str, dtype: torch.dtype) -> dict[str, Any]:
    expected: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model: Any = WAYS[way](on_meta(folder, dtype))
    report = load_sharded(model, folder)
    found: dict[str, Any] = {"loaded": differing(model, expected)}
    found["read"] = report.num_bytes_read
    found["expected"] = sum(t.numel() for t in map(local_tensor, model.parameters())) * 2  # bf16 in the file
    found["wrapped"] = any(isinstance(parameter.data, DTensor) for parameter in model.parameters())
    with torch.no_grad():
        logits, theirs = (m(input_ids=TOKENS, use_cache=False).logits for m in (model, expected))
    found["logits"] = float((logits - theirs).abs().max())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    found["after the first forward"] = differing(model, expected)
    found["tied"] = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return found


def again(folder: Path) -> list[str]:
    """Existing tensors are filled in place, from a map or through buffers."""
    model = line(on_meta(folder, torch.bfloat16))
    wrong: list[str] = []
    with WeightFiles(folder) as files:
        load_sharded(model, files)
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        tables = checkpoint_tables(model, files.tensors).tables
        members = module_tensors(model)
        targets = {name: members[name] for name in tables}
        addresses = [local_tensor(tensor).data_ptr() for tensor in targets.values()]
        for source in ("map", "ring"):
            for tensor in targets.values():
                local_tensor(tensor).fill_(9)
            read_parameters(files, tables, targets, source=source)
            wrong += differing(model, expected)
        assert addresses == [local_tensor(tensor).data_ptr() for tensor in targets.values()]
        files.check_unchanged()
    return wrong


def refusals(root: Path, rank: int, control: ControlGroup) -> dict[str, Any]:
    """A model of another shape; a folder that one rank alone cannot see; all ranks go on together afterwards."""
    found: dict[str, Any] = {}
    config = AutoConfig.from_pretrained(root / "qwen2")
    config.intermediate_size += 4
    config.attention_bias = True
    with torch.device("meta"):
        other = line(AutoModelForCausalLM.from_config(config))
    for name, model, folder in (
        ("misshapen", other, root / "qwen2"),
        ("one rank", line(on_meta(root / "qwen2", torch.float32)), root / ("absent" if rank == 2 else "qwen2")),
    ):
        with pytest.raises(RefusedError) as error:
            load_sharded(model, folder, control=control)
        found[name] = list(error.value.causes)
        assert all(parameter.is_meta for parameter in model.parameters())
    return found


def load_all(rank: int, ranks: int, root: Path) -> dict[str, Any]:
    control = ControlGroup()
    found: dict[str, Any] = {
        f"{family}-{way}-{dtype}": load_case(root / family, way, dtype)
        for family in FAMILIES
        for way in WAYS
        for dtype in (torch.float32, torch.bfloat16)
    }
    found["again"] = again(root / "qwen2")
    found["refusals"] = refusals(root, rank, control)
    dist.barrier()
    control.close()
    return found


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        # 61 rows: the embedding is uneven on two ranks and on four.
        tiny.FAMILIES[family](61, dtype=torch.bfloat16, seed=3).save_pretrained(root / family)
    return run_ranks(load_all, 4, tmp_path_factory.mktemp("ranks"), root)


CASES = [f"{family}-{way}-{dtype}" for family in FAMILIES for way in WAYS for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_model_is_the_one_that_from_pretrained_gives(four: list[dict[str, Any]], case: str) -> None:
    for found in (rank[case] for rank in four):
        assert found["wrapped"] == ("whole" not in case)
        assert found["loaded"] == []
        assert found["after the first forward"] == []
        assert found["tied"] == case.startswith("qwen2")
        if "tensor" not in case:
            assert found["logits"] == 0.0
        elif "float32" in case:
            assert found["logits"] < 1e-5


@pytest.mark.parametrize("case", [case for case in CASES if "tensor" not in case])
def test_a_rank_reads_the_bytes_of_its_part_and_no_others(four: list[dict[str, Any]], case: str) -> None:
    for found in (rank[case] for rank in four):
        assert found["read"] == found["expected"]


def test_tensors_that_exist_are_filled_in_place(four: list[dict[str, Any]]) -> None:
    assert [found["again"] for found in four] == [[]] * 4


def test_what_one_rank_cannot_load_is_refused_on_all(four: list[dict[str, Any]]) -> None:
    for kind in ("misshapen", "one rank"):
        first, *others = (found["refusals"][kind] for found in four)
        assert others == [first] * 3
    assert "misshapen tensors" in four[0]["refusals"]["misshapen"][0]
    assert "absent is not a folder" in four[0]["refusals"]["one rank"][0]


def peak_growth_mib(work: Callable[[], Any]) -> float:
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is now what is there
    before = status_mib("VmRSS")
    work()
    return status_mib("VmHWM") - before


def status_mib(key: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) / 1024


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False, dtype=torch.float32) for _ in range(64)))


def load_256_mib(rank: int, ranks: int, path: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,))
    with torch.device("meta"):
        model = stack()
        half = stack().to(torch.bfloat16)
    for module in (model, half):
        for layer in module:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    dist.barrier()
    found: dict[str, Any] = {"growth": peak_growth_mib(lambda: load_sharded(model, [path]))}
    found["cast"] = peak_growth_mib(lambda: load_sharded(half, [path]))
    found["mark"] = [bool(local_tensor(p).eq(i).all()) for m in (model, half) for i, p in enumerate(m.parameters())]
    return found


def test_two_ranks_load_256_mib_with_little_more_than_half_of_it_each(tmp_path: Path) -> None:
    state: dict[str, Tensor] = {f"{i}.weight": torch.full((1024, 1024), float(i)) for i in range(64)}
    save_file(state, tmp_path / "weights.safetensors")
    found = run_ranks(load_256_mib, 2, tmp_path / "ranks", tmp_path / "weights.safetensors")
    for rank in found:
        assert all(rank["mark"])
        assert 120 < rank["growth"] < 177  # a shard is 128
        assert 60 < rank["cast"] < 64 + 49  # a shard is 64; the buffers of four readers beside it
