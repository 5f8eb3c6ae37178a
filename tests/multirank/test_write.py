"""Exports written by several ranks at once. Each group of processes is started once and used for many cases."""

import errno
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from plimsoll.errors import PlimsollError
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.export import ExportReport, export_sharded
from plimsoll.weights.write import reserve_space
from tests import tiny
from tests.ranks import run_ranks
from tests.unit.weights.test_export import companions
from tests.unit.weights.test_write import peak_bytes

pytestmark = pytest.mark.timeout(300)

MIB = 2**20
IDS = torch.arange(3, 15)[None]
SMALL = 300
"""Bytes of a file: the small module then has several."""


class Small(nn.Module):
    """Uneven dims, fewer rows than ranks, a tie, a persistent and a passing buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 7)
        self.narrow = nn.Linear(7, 1)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor([3, 4]))
        self.register_buffer("passing", torch.ones(2), persistent=False)


EXPECTED = ("embedding.weight", "inner.weight", "inner.bias", "narrow.weight", "narrow.bias", "steps")


def by_fsdp(mesh: DeviceMesh) -> nn.Module:
    model = Small()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def by_hand(mesh: DeviceMesh, *placements: Any) -> nn.Module:
    """Only the matrix is sharded; all else is plain, and whole on every rank."""
    model = Small()
    weight = distribute_tensor(model.inner.weight.detach(), mesh, list(placements))
    model.inner.weight = nn.Parameter(weight)
    return model


def placements(ranks: int) -> dict[str, Callable[[], nn.Module]]:
    line = init_device_mesh("cpu", (ranks,))
    made: dict[str, Callable[[], nn.Module]] = {
        "one axis": lambda: by_fsdp(line),
        "columns": lambda: by_hand(line, Shard(1)),
        "whole": lambda: by_hand(line, Replicate()),
        "plain": Small,
    }
    if ranks == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        made["norms beside tensor parallelism"] = lambda: by_hand(square["a"], Shard(0))
        made["hybrid"] = lambda: by_fsdp(square)
        made["rows and columns"] = lambda: by_hand(square, Shard(1), Shard(0))
        made["rows in rows"] = lambda: by_hand(square, Shard(0), Shard(0))
    return made


@dataclass
class Failure:
    kind: str
    text: str
    left: list[str]
    """In the folder, when the error had been raised."""


def failing(rank: int, folder: Path, export: Callable[[], object]) -> Failure:
    try:
        export()
    except PlimsollError as error:
        return Failure(kind=type(error).__name__, text=str(error), left=[path.name for path in folder.iterdir()])
    raise AssertionError(f"rank {rank} did not fail")


def full_disk() -> Callable[[int, int], None]:
    files: list[int] = []

    def reserve(descriptor: int, num_bytes: int) -> None:
        files.append(descriptor)
        if len(files) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve_space(descriptor, num_bytes)

    return reserve


def slow_disk(descriptor: int, num_bytes: int) -> None:
    time.sleep(4)  # twice the time-out of the training group
    reserve_space(descriptor, num_bytes)


def limited(work: Callable[[], object]) -> object:
    """No file may grow beyond 64 bytes for this process meanwhile: writes fail in the system itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        return work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def large_export(rank: int, ranks: int, out: Path, control: ControlGroup) -> int:
    """256 MiB of float32, written as bfloat16; growth of the high-water mark of this rank."""
    rows = 8192 // ranks
    part = torch.arange(rank * rows, (rank + 1) * rows).float()[:, None].expand(rows, 8192).contiguous()
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(part, init_device_mesh("cpu", (ranks,)), [Shard(0)]))
    control.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what is resident now
    before = peak_bytes()
    export_sharded(model, out, dtype=torch.bfloat16, control=control, budget_bytes=32 * MIB)
    return peak_bytes() - before


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained_export(folder: Path, name: str, ranks: int, control: ControlGroup) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and weights of a sharded bf16 model after one step, exported."""
    source = folder / name
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    export_sharded(model, folder / f"{name}-out-{ranks}", source=source, control=control)
    with torch.no_grad():
        logits = model(IDS).logits.clone()
    return logits, {key: full(tensor) for key, tensor in model.state_dict().items()}


def work(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    control = ControlGroup()
    found: dict[str, Any] = {}
    for name, build in placements(ranks).items():
        out = folder / f"{name}-{ranks}"
        found[name] = export_sharded(build(), out, control=control, max_file_bytes=SMALL, budget_bytes=256, threads=2)
    bad = folder / f"bad-{ranks}"
    if rank == 0:
        bad.mkdir()
    control.barrier()
    model = placements(ranks)["one axis"]()

    def export(**changes: Any) -> ExportReport:
        return export_sharded(model, bad / "out", control=control, max_file_bytes=SMALL, **changes)

    found["full disk"] = failing(rank, bad, lambda: export(reserve=full_disk()))
    last = rank == ranks - 1
    found["last rank"] = failing(rank, bad, lambda: limited(export) if last else export())
    found["no room"] = failing(rank, bad, lambda: export(free=lambda path: 100))
    found["unlike"] = failing(rank, bad, lambda: export(budget_bytes=256 + 256 * rank))
    found["own control"] = export_sharded(model, folder / f"own-{ranks}")
    export()
    found["taken"] = failing(rank, bad, export)
    if ranks == 2:
        found["growth"] = large_export(rank, ranks, folder / "large", control)
        for name in ("tied", "untied"):
            found[name] = trained_export(folder, name, ranks, control)
    control.close()
    return found


def slow_work(rank: int, ranks: int, out: Path) -> ExportReport:
    return export_sharded(Small(), out, reserve=slow_disk)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    for name in ("tied", "untied"):
        tiny.qwen2(tied=name == "tied", dtype=torch.bfloat16, seed=5).save_pretrained(folder / name)
        companions(folder / name)
    return folder


def results_of(ranks: int, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(work, ranks, folder / f"ranks-{ranks}", folder)


@pytest.fixture(scope="module")
def pair(folder: Path) -> list[dict[str, Any]]:
    return results_of(2, folder)


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, Any]]:
    return results_of(4, folder)


@pytest.fixture(params=["pair", "four"])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return request.getfixturevalue(request.param)


def weights_of(out: Path) -> dict[str, Tensor]:
    return {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}


def cases(results: list[dict[str, Any]]) -> list[str]:
    common = ["one axis", "columns", "whole", "plain", "own control"]
    square = ["hybrid", "rows and columns", "rows in rows", "norms beside tensor parallelism"]
    return common + (square if len(results) == 4 else [])


def test_every_placement_gives_the_same_tensors(results: list[dict[str, Any]]) -> None:
    expected = Small().state_dict()
    for case in cases(results):
        found = weights_of(results[0][case].path)
        assert sorted(found) == sorted(EXPECTED), case
        for name in EXPECTED:
            assert found[name].dtype == expected[name].dtype, (case, name)
            assert torch.equal(found[name], expected[name]), (case, name)


def test_every_byte_is_written_once(results: list[dict[str, Any]]) -> None:
    for case in cases(results):
        reports: list[ExportReport] = [found[case] for found in results]
        tensor_bytes = sum(tensor.nbytes for tensor in weights_of(reports[0].path).values())
        assert sum(report.own_bytes for report in reports) == tensor_bytes, case
        assert all(report.own_bytes for report in reports), case  # replicas share the work
        assert len({(report.num_bytes, report.num_tensors, report.files) for report in reports}) == 1
        sizes = sum(path.stat().st_size for path in reports[0].path.glob("*.safetensors"))
        assert (reports[0].num_bytes, reports[0].num_tensors) == (sizes, len(EXPECTED))


def test_the_index_names_the_file_of_every_tensor(results: list[dict[str, Any]]) -> None:
    path = results[0]["one axis"].path
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert {name: load_file(path / file)[name].shape for name, file in index["weight_map"].items()} == {
        name: tensor.shape for name, tensor in weights_of(path).items()
    }


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("full disk", "CheckpointError", "No space left on device"),
        ("last rank", "CheckpointError", "File too large"),
        ("no room", "RefusedError", "100 B are free"),
        ("unlike", "RefusedError", "give all the same budget_bytes and threads"),
        ("taken", "RefusedError", "is not empty"),
    ],
)
def test_a_failing_export_is_the_same_error_everywhere_and_leaves_nothing(
    case: str, kind: str, words: str, results: list[dict[str, Any]]
) -> None:
    failures: list[Failure] = [found[case] for found in results]
    assert {failure.kind for failure in failures} == {kind}
    assert words in failures[0].text
    assert len({failure.text for failure in failures}) == 1
    assert [failure.left for failure in failures] == [["out"] if case == "taken" else []] * len(results)


def test_a_disk_may_be_slower_than_the_time_out_of_the_training_group(tmp_path: Path) -> None:
    out = tmp_path / "out"
    reports = run_ranks(slow_work, 2, tmp_path / "ranks", out, group_timeout=timedelta(seconds=2))
    assert min(report.seconds for report in reports) > 4
    assert weights_of(out).keys() == set(EXPECTED)


def test_a_rank_holds_its_shard_and_its_buffers(pair: list[dict[str, Any]], folder: Path) -> None:
    assert max(found["growth"] for found in pair) < 64 * MIB
    (written,) = weights_of(folder / "large").values()
    assert torch.equal(written, torch.arange(8192).to(torch.bfloat16)[:, None].expand(8192, 8192))


@pytest.mark.parametrize(("name", "num_tensors"), [("tied", 26), ("untied", 27)])
def test_a_trained_model_loads_again_bit_for_bit(
    name: str, num_tensors: int, pair: list[dict[str, Any]], folder: Path
) -> None:
    out = folder / f"{name}-out-{len(pair)}"
    keys = load_file(out / "model.safetensors")
    assert keys.keys() == load_file(folder / name / "model.safetensors").keys()
    assert len(keys) == num_tensors
    assert ("lm_head.weight" in keys) == (name == "untied")
    assert {tensor.dtype for tensor in keys.values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / file).read_bytes() == (folder / name / file).read_bytes()
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        again = model(IDS).logits
    before = AutoModelForCausalLM.from_pretrained(folder / name, dtype="auto").state_dict()
    for found in pair:
        logits, state = found[name]
        assert torch.equal(logits, again)
        assert state.keys() == model.state_dict().keys()
        for key, tensor in model.state_dict().items():
            assert torch.equal(state[key], tensor), key
        assert not torch.equal(state["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
