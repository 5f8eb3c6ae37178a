"""Two gloo ranks train what one rank trains. One pair of processes is started and used for every case."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from plimsoll.config.parallel import ParallelConfig
from plimsoll.config.train import TrainConfig
from plimsoll.plane.local import LocalPlane
from plimsoll.types import TrainBatch
from plimsoll.update.optimizer import Optimizer
from plimsoll.update.worker import PolicyWorker
from tests import tiny
from tests.ranks import run_ranks
from tests.unit.update.support import load_state, make_batch, make_groups, make_plan, make_recipe, save, write_state

pytestmark = pytest.mark.timeout(240)

RANKS = 2
# With an epsilon of 1 a step of AdamW is nearly proportional to the gradient, so a gradient that was averaged over
# ranks instead of added shows in the weights; with the usual epsilon the step has the same length whatever the scale.
TRAIN: dict[str, Any] = {"learning_rate": 0.1, "epsilon": 1.0}
CASES: dict[str, tuple[str, str, int | None]] = {
    "float32": ("qwen2", "float32", None),
    "float64": ("gemma3", "float64", None),
    "untied": ("llama", "float64", None),
    "hybrid": ("qwen2", "float64", 1),  # every rank holds all parameters
}


def worker_of(folder: Path, case: str, plane: LocalPlane) -> PolicyWorker:
    family, dtype, shard = CASES[case]
    recipe = make_recipe(folder / family, model={"dtype": dtype}, train=TRAIN)
    recipe = recipe.model_copy(update={"parallel": ParallelConfig(shard=shard if dist.is_initialized() else None)})
    return PolicyWorker(recipe, make_plan(compute_dtype=dtype), plane)


def share_of(batch: TrainBatch, rank: int, ranks: int) -> TrainBatch:
    """Every `ranks`-th micro-batch; denominators stay those of the whole mini-batch."""
    minis = [replace(mini, micro_batches=mini.micro_batches[rank::ranks]) for mini in batch.mini_batches]
    return replace(batch, mini_batches=tuple(minis))


def step(worker: PolicyWorker, plane: LocalPlane, seed: int, rank: int, ranks: int, *, spoil: bool = False) -> Any:
    whole = make_batch(make_groups(plane, num_groups=4, seed=seed), token_budget=1)
    batch = share_of(whole, rank, ranks)
    worker.advantages(batch)
    if spoil and rank == ranks - 1:
        sample = batch.samples()[0]
        plane.put(sample.ref, advantages=torch.full((sample.length,), float("nan")))
    return dict(worker.update(batch).values)


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def train_case(folder: Path, case: str, rank: int, ranks: int) -> dict[str, Any]:
    """Two steps; then, on several ranks, a step that one rank spoils, and a resume."""
    plane = LocalPlane()
    worker = worker_of(folder, case, plane)
    values = [step(worker, plane, seed, rank, ranks) for seed in (0, 1)]
    found: dict[str, Any] = {"values": values, "weights": copied(worker.model_state())}
    if ranks > 1:
        written, counters = write_state(worker, folder / f"state_{case}"), worker.counters()
        found["spoiled"] = step(worker, plane, 2, rank, ranks, spoil=True)
        found["after_spoiled"] = copied(worker.model_state())
        found["spoiled_version"] = worker.version
        resumed = worker_of(folder, case, plane)
        load_state(resumed, written, counters)
        found["next"] = [step(each, plane, 3, rank, ranks) for each in (worker, resumed)]
        found["next_weights"] = [copied(each.model_state()) for each in (worker, resumed)]
    return found


def clip_case() -> dict[str, Any]:
    """W = 0, gradient [[3, 0], [4, 0]] split by rows; then the same beside an unsharded gradient of 12."""
    mesh = init_device_mesh("cpu", (RANKS,))
    found: dict[str, Any] = {}
    for name in ("sharded", "mixed"):
        weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]))
        weight.grad = distribute_tensor(torch.tensor([[3.0, 0.0], [4.0, 0.0]]), mesh, [Shard(0)])
        parameters = {"weight": weight}
        if name == "mixed":
            parameters["plain"] = nn.Parameter(torch.zeros(1, 1))
            parameters["plain"].grad = torch.full((1, 1), 12.0)
        norm = Optimizer(parameters, TrainConfig(max_grad_norm=1.0), 1).step().grad_norm
        found[name] = (norm, weight.grad.full_tensor())
    return found


def work(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {case: train_case(folder, case, rank, ranks) for case in CASES} | {"clip": clip_case()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    for family in ("qwen2", "gemma3", "llama"):
        save(tiny.FAMILIES[family](dtype=torch.float64, seed=1), root / family)
    return root


@pytest.fixture(scope="module")
def pair(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(work, RANKS, folder / "ranks", folder)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_weights_and_the_norm_of_one(case: str, folder: Path, pair: list[dict[str, Any]]) -> None:
    alone = train_case(folder, case, 0, 1)
    relative = 1e-5 if CASES[case][1] == "float32" else 1e-8
    for found in (each[case] for each in pair):
        for name, tensor in alone["weights"].items():
            assert (found["weights"][name] - tensor).abs().max() < 1e-6, name
        for ours, theirs in zip(found["values"], alone["values"], strict=True):
            assert ours == pytest.approx(theirs, rel=relative, abs=1e-7)
    first, second = (each[case]["values"] for each in pair)
    assert [values["train/grad_norm"] for values in first] == [values["train/grad_norm"] for values in second]


@pytest.mark.parametrize("case", CASES)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_both(case: str, pair: list[dict[str, Any]]) -> None:
    for found in (each[case] for each in pair):
        assert found["spoiled"]["train/skipped_steps"] == 1
        assert found["spoiled_version"] == 2
        assert all(torch.equal(found["after_spoiled"][name], found["weights"][name]) for name in found["weights"])


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_pair_goes_on_bit_for_bit(case: str, pair: list[dict[str, Any]]) -> None:
    for found in (each[case] for each in pair):
        assert found["next"][0] == found["next"][1]
        went_on, resumed = found["next_weights"]
        assert all(torch.equal(went_on[name], resumed[name]) for name in went_on)


def test_the_norm_is_global_and_equal_and_clips_alike_with_plain_parameters_beside(pair: list[dict[str, Any]]) -> None:
    for found in (each["clip"] for each in pair):
        norm, clipped = found["sharded"]
        assert norm == 5.0
        torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.0], [0.8, 0.0]]))
        norm, clipped = found["mixed"]
        assert norm == 13.0
        torch.testing.assert_close(clipped, torch.tensor([[3.0, 0.0], [4.0, 0.0]]) / 13)
