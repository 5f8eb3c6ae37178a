"""A tied embedding on two ranks is one weight from the first read to the export, and gets the gradient of both uses."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from plimsoll.model.build import build_meta
from plimsoll.model.spec import decoder_layers
from plimsoll.parallel.mesh import build_mesh
from plimsoll.parallel.tensors import full, local
from plimsoll.plane.local import LocalPlane
from plimsoll.types import TrainBatch
from plimsoll.update.state import StateFolders
from plimsoll.update.worker import PolicyWorker
from plimsoll.weights import export_sharded, load_sharded
from plimsoll.weights.ties import untie
from tests import tiny
from tests.ranks import run_ranks
from tests.unit.update.support import make_batch, make_groups, make_plan, make_recipe, save

pytestmark = pytest.mark.timeout(240)

FAMILIES = ("qwen2", "gemma3", "gpt2")
"""Tied by their configs; gemma3 scales the embedding, so that its two uses differ by more than their place."""
VOCAB = 65  # uneven over two ranks
TOKENS = torch.arange(3, 3 + 22).reshape(2, 11)


def is_tied(model: PreTrainedModel) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def gradient_of_tied(rank: int, folder: Path, family: str) -> Tensor:
    model = build_meta(folder / family, torch.float64)
    mesh = build_mesh(torch.device("cpu"), None)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    load_sharded(model, folder / family)
    assert is_tied(model)
    loss_of(model, TOKENS[rank : rank + 1]).backward()  # FSDP2 averages over ranks
    gradient = cast("Tensor", model.get_input_embeddings().weight.grad)
    return full(gradient).clone()


def worker_of(folder: Path) -> tuple[PolicyWorker, LocalPlane]:
    plane = LocalPlane()
    recipe = make_recipe(folder, model={"dtype": "float32"}, train={"learning_rate": 1e-2})
    return PolicyWorker(recipe, make_plan(compute_dtype="float32"), plane), plane


def step(worker: PolicyWorker, plane: LocalPlane, rank: int, seed: int) -> None:
    whole = make_batch(make_groups(plane, num_groups=2, seed=seed), token_budget=1)
    minis = [replace(mini, micro_batches=mini.micro_batches[rank::2]) for mini in whole.mini_batches]
    batch: TrainBatch = replace(whole, mini_batches=tuple(minis))
    worker.advantages(batch)
    worker.update(batch)


def tie_after_each_stage(rank: int, folder: Path, family: str) -> dict[str, Any]:
    """build → shard → load → step → save → resume → step → export."""
    worker, plane = worker_of(folder / family)
    tied = {"loaded": is_tied(worker.lm)}
    step(worker, plane, rank, 0)
    tied["stepped"] = is_tied(worker.lm)
    state = folder / f"{family}_state"
    folders = StateFolders(model=state / "model", optimizer=state / "optimizer", tokenizer=folder / family)
    if rank == 0:
        for each in (folders.model, folders.optimizer):
            each.mkdir(parents=True)
    dist.barrier()
    writer = worker.state_writer(folders, budget_bytes=4096)
    dist.barrier()
    writer.run()
    dist.barrier()
    saved = local(worker.lm.get_input_embeddings().weight).clone()
    resumed, other_plane = worker_of(folders.model)
    resumed.load_state(sorted(folders.optimizer.iterdir()), worker.counters())
    tied["resumed"] = is_tied(resumed.lm)
    same = torch.equal(local(resumed.lm.get_input_embeddings().weight), saved)
    step(resumed, other_plane, rank, 1)
    tied["stepped_again"] = is_tied(resumed.lm)
    export_sharded(resumed.lm, folder / f"{family}_export", dtype=torch.float32, source=folder / family)
    found = {"tied": tied, "same": same, "weight": full(resumed.lm.get_input_embeddings().weight).clone()}
    for each in (worker, resumed):
        each.close()
    return found


def work(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {
        family: {"gradient": gradient_of_tied(rank, folder, family), **tie_after_each_stage(rank, folder, family)}
        for family in FAMILIES
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tied")
    for family in FAMILIES:
        save(tiny.FAMILIES[family](vocab=VOCAB, seed=2), root / family)
    return root


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, 2, tmp_path_factory.mktemp("ranks"), folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_a_tied_weight_is_the_sum_of_both_uses(
    family: str, folder: Path, pair: list[dict[str, Any]]
) -> None:
    """Against two weights of equal values, each used once."""
    model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float64).eval()
    name = next(name for name, weight in model.named_parameters(remove_duplicate=False) if name.startswith("lm_head"))
    values = model.get_input_embeddings().weight.detach().clone()
    untie(model, name)
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(values)
    (sum(loss_of(model, TOKENS[rank : rank + 1]) for rank in (0, 1)) / 2).backward()
    uses = [model.get_input_embeddings().weight.grad, model.get_output_embeddings().weight.grad]
    assert all(use.abs().max() > 1e-3 for use in uses)
    for found in pair:
        torch.testing.assert_close(found[family]["gradient"], uses[0] + uses[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tie_holds_through_step_save_resume_and_export(
    family: str, folder: Path, pair: list[dict[str, Any]]
) -> None:
    for found in (each[family] for each in pair):
        assert found["same"]
        assert found["tied"] == dict.fromkeys(("loaded", "stepped", "resumed", "stepped_again"), True)
    exported, info = AutoModelForCausalLM.from_pretrained(folder / f"{family}_export", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert is_tied(exported)
    assert torch.equal(exported.get_input_embeddings().weight, pair[0][family]["weight"])
