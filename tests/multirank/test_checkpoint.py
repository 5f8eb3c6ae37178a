"""Checkpoints that several ranks write together, and that any number of ranks goes on from."""

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plimsoll.checkpoint.saving import TrainingSaver
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import MODEL, OPTIMIZER, read_training_checkpoint
from plimsoll.config.parallel import ParallelConfig
from plimsoll.errors import CheckpointError
from plimsoll.parallel.tensors import full, local
from plimsoll.plane.local import LocalPlane
from plimsoll.types import TrainBatch
from plimsoll.update.report import StepReport
from plimsoll.update.state import StateFolders
from plimsoll.update.worker import Counters, PolicyWorker
from plimsoll.weights.tensors import TensorFiles, write_tensors
from plimsoll.weights.write import ShardWriter
from tests import tiny
from tests.ranks import run_ranks
from tests.unit.checkpoint.states import training_state
from tests.unit.update.support import full_moments, make_batch, make_groups, make_plan, make_recipe, save

pytestmark = pytest.mark.timeout(240)

LOCATIONS = ("device", "streamed")
FAMILIES = ("qwen2", "llama")  # tied, untied
STEPS = 2
RESUMED = {"1": (1, None), "3": (3, None), "4": (4, None), "2x2": (4, 2)}
"""Name → ranks, ranks of a shard group."""


def worker_of(
    model: Path, plane: LocalPlane, shard: int | None = None, *, optimizer_state: str = "device"
) -> PolicyWorker:
    train = {"learning_rate": 1e-2, "optimizer_state": optimizer_state}
    recipe = make_recipe(model, model={"dtype": "float32"}, train=train)
    recipe = recipe.model_copy(update={"parallel": ParallelConfig(shard=shard)})
    return PolicyWorker(recipe, make_plan(compute_dtype="float32"), plane)


def share(worker: PolicyWorker, plane: LocalPlane, seed: int, rank: int, ranks: int) -> TrainBatch:
    """Twelve micro-batches of one sample; as many on each of 1, 2, 3 or 4 ranks."""
    whole = make_batch(make_groups(plane, num_groups=3, seed=seed), token_budget=1)
    minis = [replace(mini, micro_batches=mini.micro_batches[rank::ranks]) for mini in whole.mini_batches]
    batch = replace(whole, mini_batches=tuple(minis))
    worker.advantages(batch)
    return batch


def next_gradient(worker: PolicyWorker, plane: LocalPlane, rank: int, ranks: int) -> dict[str, Tensor]:
    batch = share(worker, plane, STEPS, rank, ranks)
    worker.accumulate(batch.mini_batches[0], StepReport())
    named = {name: parameter.grad for name, parameter in worker.lm.named_parameters()}
    found = {name: full(gradient).clone() for name, gradient in named.items() if gradient is not None}
    worker.optimizer.zero_grad()
    return found


def save_in(store: CheckpointStore, worker: PolicyWorker, *, background: bool = False) -> TrainingSaver:
    counters = worker.counters()
    state = training_state(step=STEPS, policy_version=counters.version, optimizer_steps=counters.optimizer_steps)

    def prepare(folder: Path) -> ShardWriter:
        folders = StateFolders(model=folder / MODEL, optimizer=folder / OPTIMIZER, tokenizer=store.folder)
        return worker.state_writer(folders, budget_bytes=4096)

    saver = TrainingSaver(store)
    saver.save(state, prepare, background=background)
    return saver


def gathered(worker: PolicyWorker, plane: LocalPlane, rank: int, ranks: int) -> dict[str, Any]:
    return {
        "weights": {name: tensor.clone() for name, tensor in worker.model_state().items()},
        "moments": full_moments(worker),
        "counters": worker.counters(),
        "gradient": next_gradient(worker, plane, rank, ranks),
    }


def placed(worker: PolicyWorker) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    """Device, address and local shape of everything that is saved."""
    tensors = dict(worker.lm.named_parameters())
    tensors |= {f"{n}.{m}": t for n, held in worker.optimizer.moments().items() for m, t in held.items()}
    own = {name: local(tensor) for name, tensor in tensors.items()}
    return {name: (str(t.device), t.data_ptr(), tuple(t.shape)) for name, t in own.items()}


def fail_to_save(worker: PolicyWorker, folder: Path, rank: int) -> str:
    """The last rank cannot write beyond a few bytes: files are there, other ranks have written; what was said."""
    store = CheckpointStore(folder, keep=1, control=worker.control)  # making a group writes to the ranks' own store
    if rank == 0:
        store.folder.mkdir(parents=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        save_in(store, worker)
    except CheckpointError as error:
        left = [path.name for path in store.folder.iterdir()]
        return f"{error} {left}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "nothing failed"


def save_without_a_trace(folder: Path, location: str, rank: int, ranks: int) -> str:
    """That a save, and one that fails half-way, leave weights and moments where they were, bit for bit."""
    plane = LocalPlane()
    worker = worker_of(folder / "qwen2", plane, optimizer_state=location)
    worker.update(share(worker, plane, 0, rank, ranks))
    before, values = placed(worker), bits(worker)
    said = fail_to_save(worker, folder / f"failing_{location}", rank)
    assert placed(worker) == before
    assert all(torch.equal(now, then) for now, then in zip(bits(worker), values, strict=True))
    store = CheckpointStore(folder / f"good_{location}", keep=1)
    if rank == 0:
        store.folder.mkdir(parents=True)
    worker.control.barrier()
    save_in(store, worker)
    assert placed(worker) == before
    assert all(torch.equal(now, then) for now, then in zip(bits(worker), values, strict=True))
    return said


def bits(worker: PolicyWorker) -> list[Tensor]:
    moments = [tensor for held in worker.optimizer.moments().values() for tensor in held.values()]
    return [local(tensor).detach().clone() for tensor in [*worker.lm.parameters(), *moments]]


def train_and_save(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for family in FAMILIES:
        plane = LocalPlane()
        worker = worker_of(folder / family, plane)
        for seed in range(STEPS):
            worker.update(share(worker, plane, seed, rank, ranks))
        before = placed(worker)
        store = CheckpointStore(folder / "checkpoints" / family, keep=1)
        if rank == 0:
            store.folder.mkdir(parents=True)
        save_in(store, worker)
        assert placed(worker) == before
        found[family] = gathered(worker, plane, rank, ranks)
        # In the background: what is written is the state at the time of the save, whatever comes after.
        later = CheckpointStore(folder / "background" / family, keep=1)
        if rank == 0:
            later.folder.mkdir(parents=True)
        saver = save_in(later, worker, background=True)
        saver.wait_read()
        worker.update(share(worker, plane, STEPS, rank, ranks))
        saver.finish()
    found["failed"] = {location: save_without_a_trace(folder, location, rank, ranks) for location in LOCATIONS}
    return found


def resume(rank: int, ranks: int, folder: Path, names: list[str]) -> dict[str, Any]:
    """Everything that was saved, on these ranks; then it is saved once more."""
    found: dict[str, Any] = {}
    for name in names:
        for family in FAMILIES:
            plane = LocalPlane()
            read = read_training_checkpoint(folder / "checkpoints" / family / f"step_{STEPS}")
            worker = worker_of(read.model, plane, RESUMED[name][1])
            counters = Counters(
                version=read.state.policy_version,
                optimizer_steps=read.state.optimizer_steps,
                skipped_nonfinite=0,
                skipped_empty=0,
            )
            worker.load_state(read.optimizer, counters)
            found[f"{name} {family}"] = gathered(worker, plane, rank, ranks)
            again = CheckpointStore(folder / f"again_{name}" / family, keep=1)
            if rank == 0:
                again.folder.mkdir(parents=True)
            save_in(again, worker)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoint")
    for family in FAMILIES:
        save(tiny.FAMILIES[family](seed=1), root / family)
    return root


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, Any]:
    """Of rank 0 of the pair that trained."""
    return run_ranks(train_and_save, 2, folder / "pair", folder)[0]


@pytest.fixture(scope="module")
def resumed(folder: Path, saved: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ranks in (1, 3, 4):
        names = [name for name, (wanted, _) in RESUMED.items() if wanted == ranks]
        if ranks == 1:
            found |= resume(0, 1, folder, names)
        else:
            found |= run_ranks(resume, ranks, folder / f"resume_{ranks}", folder, names)[0]
    return found


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def tensors_of(step: Path, part: str) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in TensorFiles(sorted((step / part).glob("*.safetensors"))).items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RESUMED)
def test_another_number_of_ranks_goes_on_from_the_same_bits(
    name: str, family: str, saved: dict[str, Any], resumed: dict[str, Any]
) -> None:
    ours, theirs = resumed[f"{name} {family}"], saved[family]
    assert equal(ours["weights"], theirs["weights"])
    assert equal(ours["moments"], theirs["moments"])
    assert ours["counters"] == theirs["counters"]
    assert len(theirs["moments"]) == 3 * len(theirs["weights"])
    assert any(tensor.abs().max() > 0 for n, tensor in theirs["moments"].items() if n.endswith("exp_avg_sq"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RESUMED)
def test_the_next_gradient_is_that_of_the_ranks_that_saved(
    name: str, family: str, saved: dict[str, Any], resumed: dict[str, Any]
) -> None:
    ours, theirs = resumed[f"{name} {family}"]["gradient"], saved[family]["gradient"]
    assert ours.keys() == theirs.keys()
    flat, expected = (torch.cat([each[name].double().flatten() for name in theirs]) for each in (ours, theirs))
    norm, difference = expected.square().sum().sqrt(), (flat - expected).square().sum().sqrt()
    assert norm > 0
    assert difference <= 1e-6 * norm


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_every_mesh_writes_the_same_tensors(
    part: str, family: str, folder: Path, saved: dict[str, Any], resumed: dict[str, Any]
) -> None:
    assert saved
    assert resumed
    first = tensors_of(folder / "checkpoints" / family / f"step_{STEPS}", part)
    expected = saved[family]["weights" if part == "model" else "moments"]
    assert equal(first, expected)
    for name in ("background", *(f"again_{name}" for name in RESUMED)):
        assert equal(tensors_of(folder / name / family / f"step_{STEPS}", part), first), name


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_save_that_fails_half_way_leaves_weights_and_moments_where_they_were(
    location: str, saved: dict[str, Any]
) -> None:
    said = saved["failed"][location]
    assert f"the checkpoint of step {STEPS} was not written" in said
    assert "File too large" in said
    assert said.endswith("[]")  # and nothing in the folder


def test_moments_in_one_file_beside_the_model_are_read_too(folder: Path, saved: dict[str, Any]) -> None:
    step = folder / "checkpoints" / "qwen2" / f"step_{STEPS}"
    write_tensors(folder / "optimizer.safetensors", saved["qwen2"]["moments"])
    worker = worker_of(step / "model", LocalPlane())
    worker.load_state([folder / "optimizer.safetensors"], saved["qwen2"]["counters"])
    assert equal(full_moments(worker), saved["qwen2"]["moments"])
