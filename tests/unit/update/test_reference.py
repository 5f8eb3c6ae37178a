"""The frozen reference in its four placements: the same numbers, and nothing of it left between passes."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from plimsoll.errors import CheckpointError, RunError
from plimsoll.memory.host import HostReader
from plimsoll.memory.resident import Place
from plimsoll.parallel.mesh import close_process_group
from plimsoll.parallel.tensors import full, local
from plimsoll.plane.local import LocalPlane
from plimsoll.types import TrainBatch
from plimsoll.update.reference import FrozenReference, KeptInFiles, Placement
from plimsoll.update.worker import PolicyWorker
from plimsoll.weights import arena
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.mapped import RegistrationRefusedError
from plimsoll.weights.offload import storage_sizes
from plimsoll.weights.pieces import identity_table
from plimsoll.weights.read import Source
from tests import tiny
from tests.processes import host_buffer_bytes, open_files
from tests.ranks import run_ranks
from tests.unit.update.support import make_batch, make_groups, make_plan, make_recipe, save

PLACEMENTS: tuple[Placement, ...] = ("device", "page_cache", "ring", "arena")
FROM_FILES: tuple[Placement, ...] = ("page_cache", "ring")
EMPTY_BETWEEN: tuple[Placement, ...] = ("page_cache", "ring", "arena")


@pytest.fixture(autouse=True, scope="module")
def _group() -> Any:
    yield
    close_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny.qwen2(vocab=65), tmp_path / "model")


def build(folder: Path, plane: LocalPlane, placement: str, **model: Any) -> PolicyWorker:
    recipe = make_recipe(
        folder,
        model={"dtype": "float32", "reference_placement": placement, **model},
        algorithm={"kl_coefficient": 0.1},
        train={"learning_rate": 0.1, "epochs_per_rollout": 2},
    )
    return PolicyWorker(recipe, make_plan(compute_dtype="float32"), plane)


def column(plane: LocalPlane, batch: TrainBatch, name: str) -> Tensor:
    return torch.cat([plane.get(sample.ref, name) for sample in batch.samples()])


@contextmanager
def admitted(worker: PolicyWorker) -> Generator[FrozenReference]:
    """As in its phase and after the border to the next."""
    assert worker.reference is not None
    worker.reference.admit()
    yield worker.reference
    worker.reference.evict()


def scored(worker: PolicyWorker, plane: LocalPlane, batch: TrainBatch, *, old: bool = False) -> Tensor:
    with admitted(worker):
        worker.score(batch, old=old, reference=True)
    return column(plane, batch, "ref_logprobs").clone()


def held(worker: PolicyWorker) -> int:
    """Bytes of the reference's parameters now."""
    (resident,) = (each for each in worker.residents() if each.name == "reference_parameters")
    return resident.measured()


def trained(worker: PolicyWorker, batch: TrainBatch) -> None:
    worker.advantages(batch)
    worker.update(batch)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_first_and_later_passes_give_the_numbers_of_the_policy_before_its_first_update(
    folder: Path, placement: Placement
) -> None:
    plane = LocalPlane()
    worker = build(folder, plane, placement)
    batch = make_batch(make_groups(plane))
    first = scored(worker, plane, batch, old=True)
    old = column(plane, batch, "old_logprobs").clone()
    assert old.abs().sum() > 0
    assert torch.equal(first, old)  # a KL of exactly 0
    trained(worker, batch)
    later = scored(worker, plane, batch, old=True)
    assert torch.equal(later, first)
    assert not torch.equal(column(plane, batch, "old_logprobs"), old)  # while the policy has moved


@pytest.mark.parametrize("placement", EMPTY_BETWEEN)
def test_no_parameter_has_memory_on_the_device_between_passes(folder: Path, placement: Placement) -> None:
    plane = LocalPlane()
    worker = build(folder, plane, placement)
    assert held(worker) == 0
    size = sum(tensor.nbytes for tensor in tiny.qwen2(vocab=65).parameters())
    with admitted(worker):
        assert held(worker) == size
    assert held(worker) == 0
    scored(worker, plane, make_batch(make_groups(plane)))
    assert held(worker) == 0
    on_host = {each.name: each.measured() for each in worker.residents() if each.place is Place.HOST}
    if placement == "arena":
        assert size <= on_host["reference_arena"] <= size + 64 * 1024
    else:
        assert on_host == {}


@pytest.mark.parametrize("placement", EMPTY_BETWEEN)
def test_a_pass_that_fails_leaves_nothing_gathered_and_no_weights(
    folder: Path, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = LocalPlane()
    worker = build(folder, plane, placement)
    batch = make_batch(make_groups(plane))
    first = scored(worker, plane, batch)
    reference = worker.reference
    assert reference is not None
    reference.admit()
    before = {id(parameter) for parameter in reference.policy.parameters()}

    def fails(*_: Any, **__: Any) -> Any:
        layers = reference.policy.lm.get_decoder().layers
        layers[0].unshard()  # as a forward that stops in the middle of a layer leaves it
        reference.policy.unshard()
        assert {id(parameter) for parameter in reference.policy.parameters()} != before
        raise ValueError("half-way")

    monkeypatch.setattr(worker, "_score_with", fails)
    with pytest.raises(ValueError, match="half-way"):
        worker.score(batch, old=False, reference=True)
    assert held(worker) == 0
    assert not reference.present
    assert {id(parameter) for parameter in reference.policy.parameters()} == before
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="not on the device"):
        worker.score(batch, old=False, reference=True)
    assert torch.equal(scored(worker, plane, batch), first)


def rewritten(file: Path) -> None:
    tensors = load_file(file)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def replaced(file: Path) -> None:
    copy = file.with_suffix(".new")
    copy.write_bytes(file.read_bytes())
    times = file.stat()
    os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
    copy.replace(file)


def longer(file: Path) -> None:
    times = file.stat()
    with file.open("ab") as stream:
        stream.write(b"\0" * 8)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("change", [rewritten, replaced, longer])
@pytest.mark.parametrize("placement", FROM_FILES)
def test_files_that_changed_since_they_were_opened_are_refused(folder: Path, placement: Placement, change: Any) -> None:
    plane = LocalPlane()
    worker = build(folder, plane, placement)
    batch = make_batch(make_groups(plane))
    scored(worker, plane, batch)
    change(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        scored(worker, plane, batch)
    assert held(worker) == 0  # nothing half-read is left for anybody to use


@pytest.mark.parametrize("placement", ["device", "arena"])
def test_a_reference_that_is_held_in_memory_does_not_need_its_files_any_more(
    folder: Path, placement: Placement
) -> None:
    plane = LocalPlane()
    worker = build(folder, plane, placement)
    batch = make_batch(make_groups(plane))
    first = scored(worker, plane, batch)
    (folder / "model.safetensors").unlink()
    assert torch.equal(scored(worker, plane, batch), first)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_another_folder_is_the_reference_when_it_is_named(folder: Path, tmp_path: Path, placement: Placement) -> None:
    other = save(tiny.qwen2(vocab=65, seed=9), tmp_path / "other")
    plane = LocalPlane()
    worker = build(folder, plane, placement, reference=str(other))
    batch = make_batch(make_groups(plane))
    found = [scored(worker, plane, batch) for _ in range(2)]
    alone = build(other, plane, "device")
    alone.score(batch, old=True, reference=False)
    assert torch.equal(found[0], column(plane, batch, "old_logprobs"))
    assert torch.equal(found[1], found[0])


def test_nothing_is_copied_back_from_a_pass_to_the_arena(folder: Path) -> None:
    plane = LocalPlane()
    worker = build(folder, plane, "arena")
    batch = make_batch(make_groups(plane))
    first = scored(worker, plane, batch)
    with admitted(worker) as reference, torch.no_grad():
        for parameter in reference.policy.lm.parameters():
            local(parameter).fill_(7)  # which a copy back would keep
    assert torch.equal(scored(worker, plane, batch), first)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads the open files from /proc")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_closed_worker_holds_no_file_and_no_host_memory(folder: Path, placement: Placement) -> None:
    recipe = make_recipe(
        folder,
        model={"dtype": "float32", "reference_placement": placement},
        algorithm={"kl_coefficient": 0.1},
        train={"optimizer_state": "streamed"},
    )
    plane = LocalPlane()
    worker = PolicyWorker(recipe, make_plan(compute_dtype="float32"), plane)
    scored(worker, plane, make_batch(make_groups(plane)))
    assert len(open_files(folder)) == (placement in FROM_FILES)
    on_host = [each.measured() for each in worker.residents() if each.place is Place.HOST and each.measured()]
    assert len(on_host) == 1 + (placement == "arena")
    before = host_buffer_bytes()
    worker.close()
    assert open_files(folder) == []
    assert before - host_buffer_bytes() >= sum(on_host) > 0
    worker.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads the open files from /proc")
def test_a_worker_that_cannot_be_built_leaves_no_file_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise RunError("no host memory")

    monkeypatch.setattr(arena, "HostBuffer", no_room)
    with pytest.raises(RunError, match="no host memory"):
        build(folder, LocalPlane(), "arena")
    assert open_files(folder) == []


@pytest.mark.parametrize("placement", FROM_FILES)
def test_files_that_changed_before_the_first_pass_are_refused(folder: Path, placement: Placement) -> None:
    plane = LocalPlane()
    worker = build(folder, plane, placement)
    rewritten(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        scored(worker, plane, make_batch(make_groups(plane)))
    assert held(worker) == 0


class Watched(KeptInFiles):
    """Says how often it read; its files may change behind what has just been read."""

    num_reads = 0
    changes_meanwhile = False

    def _read(self) -> None:
        self.num_reads += 1
        super()._read()
        if self.changes_meanwhile:
            for path in self._files.identities:
                rewritten(path)


@pytest.mark.parametrize("meanwhile", [False, True])
@pytest.mark.parametrize("source", ["map", "ring"])
def test_files_are_compared_before_anything_is_read_and_once_more_afterwards(
    folder: Path, source: Source, meanwhile: bool
) -> None:
    parameters = dict(tiny.qwen2(vocab=65).named_parameters())
    with WeightFiles(folder) as files:
        tables = {name: identity_table(name, tuple(tensor.shape)) for name, tensor in parameters.items()}
        store = Watched(parameters, files, tables, source)
        store.vacate()
        store.fill()
        store.vacate()
        if meanwhile:
            store.changes_meanwhile = True
        else:
            rewritten(folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            store.fill()
        assert store.num_reads == (2 if meanwhile else 1)
        assert meanwhile or storage_sizes(parameters.values()) == [0] * len(parameters)  # no memory was taken for it


class WithoutRegistration(KeptInFiles):
    """As on a device that registers no map of a file."""

    def _read(self) -> None:
        if self._source == "map":
            raise RegistrationRefusedError("CUDA does not register a map of a file")
        super()._read()


def test_where_no_map_can_be_registered_the_ring_reads_and_that_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = dict(tiny.qwen2(vocab=65).named_parameters())
    expected = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with WeightFiles(folder) as files:
        tables = {name: identity_table(name, tuple(tensor.shape)) for name, tensor in parameters.items()}
        store = WithoutRegistration(parameters, files, tables, "map")
        for _ in range(2):
            store.vacate()
            store.fill()
            assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    assert [record.message for record in caplog.records] == [
        "model.reference_placement: ring from now on instead of page_cache: CUDA does not register a map of a file"
    ]


def random(folder: Path) -> dict[str, Any]:
    return {"init": "random", "config": str(folder), "path": None}


@pytest.mark.parametrize("placement", ["auto", "device", "arena"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_weights_are_kept_as_they_were_before_the_first_update_and_made_again_after_a_resume(
    folder: Path, tmp_path: Path, placement: str, dtype: str
) -> None:
    plane = LocalPlane()
    recipe = make_recipe(
        folder,
        model={"dtype": "float32", "reference_placement": placement, **random(folder)},
        algorithm={"kl_coefficient": 0.1},
        train={"learning_rate": 0.1},
    )
    plan = make_plan(compute_dtype=dtype)
    worker = PolicyWorker(recipe, plan, plane)
    batch = make_batch(make_groups(plane))
    first = scored(worker, plane, batch, old=True)
    assert torch.equal(first, column(plane, batch, "old_logprobs"))
    trained(worker, batch)
    assert torch.equal(scored(worker, plane, batch), first)
    # As a resumed run has it: the policy's weights are in a folder, and `init` still says what came before them.
    model = tiny.qwen2(vocab=65)
    model.load_state_dict({name: full(tensor) for name, tensor in worker.lm.state_dict().items()})
    checkpoint = save(model, tmp_path / "checkpoint")
    resumed = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(checkpoint)})})
    again = PolicyWorker(resumed, plan, plane)
    assert torch.equal(scored(again, plane, batch, old=True), first)
    assert not torch.equal(column(plane, batch, "old_logprobs"), first)


def measure_anonymous(rank: int, ranks: int, folder: Path, placement: str) -> dict[str, int]:
    """RssAnon of a process of its own after a first pass, within a second one, and after it."""
    reader = HostReader()

    def anonymous() -> int:
        found = reader.anonymous()
        assert found is not None
        return found

    plane = LocalPlane()
    worker = build(folder, plane, placement)
    batch = make_batch(make_groups(plane, num_groups=1, samples=2))
    scored(worker, plane, batch)
    found = {"before": anonymous()}
    with admitted(worker):
        found["within"] = anonymous()
    scored(worker, plane, batch)
    return found | {"after": anonymous()}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from /proc")
@pytest.mark.parametrize("placement", FROM_FILES)
def test_anonymous_memory_returns_after_a_pass_from_files(tmp_path: Path, placement: Placement) -> None:
    model = tiny.qwen2(vocab=2**19)  # 64 MiB
    size = sum(parameter.nbytes for parameter in model.parameters())
    folder = save(model, tmp_path / "model")
    (found,) = run_ranks(measure_anonymous, 1, tmp_path / "ranks", folder, placement)
    assert found["within"] - found["before"] > 0.9 * size
    assert found["after"] - found["before"] < 4 * 2**20
