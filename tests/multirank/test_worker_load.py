"""Workers of 1, 2 and 4 ranks read their models from disk: the logits are those of `from_pretrained`, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from plimsoll.config.parallel import ParallelConfig
from plimsoll.errors import CheckpointError, RefusedError, RunError
from plimsoll.model.rows import pack_rows
from plimsoll.plane.local import LocalPlane
from plimsoll.types import TrainBatch
from plimsoll.update.worker import PolicyWorker
from plimsoll.weights import arena
from plimsoll.weights.registered import HostBuffer
from tests import tiny
from tests.ranks import run_ranks
from tests.unit.update.support import make_batch, make_groups, make_plan, make_recipe, save

pytestmark = pytest.mark.timeout(240)

VOCAB = 65  # divides over no number of ranks: the last shard is shorter, and padded
PLACEMENTS = ("device", "page_cache", "ring", "arena")
IDS = torch.arange(17) * 7 % VOCAB


def build(
    folder: Path,
    plane: LocalPlane,
    *,
    shard: int | None = None,
    checkpointing: str = "none",
    train: dict[str, Any] | None = None,
    **model: Any,
) -> Any:
    recipe = make_recipe(
        folder,
        model={"dtype": "float32", **model},
        algorithm={"kl_coefficient": 0.1},
        train={"learning_rate": 0.1, **(train or {})},
    )
    recipe = recipe.model_copy(update={"parallel": ParallelConfig(shard=shard)})
    return PolicyWorker(recipe, make_plan(compute_dtype="float32", activation_checkpointing=checkpointing), plane)


@torch.no_grad()
def own_logits(worker: PolicyWorker) -> Tensor:
    """Logits [T, V] of one unpacked sequence, as the model itself gives them inside the sharded policy."""
    found: list[Tensor] = []
    hook = worker.lm.register_forward_hook(lambda _module, _args, output: found.append(output.logits[0].clone()))
    packing = worker.policy.packing
    worker.policy.set_packing("single")
    rows = pack_rows([IDS], [torch.arange(len(IDS)) > 0], worker.device)
    worker.policy(rows, temperature=1.0, own_logits=True)
    worker.policy.set_packing(packing)
    hook.remove()
    return found[0]


def column(plane: LocalPlane, batch: TrainBatch, name: str) -> Tensor:
    return torch.cat([plane.get(sample.ref, name) for sample in batch.samples()]).clone()


def held(worker: PolicyWorker) -> int:
    (resident,) = (each for each in worker.residents() if each.name == "reference_parameters")
    return resident.measured()


def placement_case(folder: Path, placement: str, shard: int | None) -> dict[str, Any]:
    plane = LocalPlane()
    worker = build(folder, plane, shard=shard, reference_placement=placement)
    batch = make_batch(make_groups(plane))
    found: dict[str, Any] = {"before": held(worker)}
    assert worker.reference is not None
    for name in ("first", "later"):
        worker.reference.admit()
        worker.score(batch, old=True, reference=True)
        worker.reference.evict()
        found |= {name: column(plane, batch, "ref_logprobs"), f"{name}_old": column(plane, batch, "old_logprobs")}
        found[f"after_{name}"] = held(worker)
        worker.advantages(batch)
        worker.update(batch)
    return found


def refused(work: Any) -> str:
    try:
        work()
    except (CheckpointError, RefusedError, RunError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def changed_case(folder: Path, rank: int, placement: str) -> tuple[str, int]:
    """Each rank has files of its own, and only those of rank 1 change."""
    mine = folder / f"own_{placement}_{rank}"
    plane = LocalPlane()
    worker = build(mine, plane, reference_placement=placement)
    assert worker.reference is not None
    if rank == 1:
        (mine / "model.safetensors").touch()
    return refused(worker.reference.admit), held(worker)


def broken_case(folder: Path, rank: int) -> str:
    """The model of rank 1 has no weights."""
    return refused(lambda: build(folder / f"broken_{rank}", LocalPlane()))


class NoRoom(HostBuffer):
    """What an arena finds on a host that is full."""

    def __init__(self, num_bytes: int, **_: Any) -> None:
        raise RunError(f"{num_bytes} bytes of host memory could not be mapped")


def no_room_case(folder: Path, rank: int, **settings: Any) -> str:
    """Rank 1 has no host memory for what the others put there."""
    found = arena.HostBuffer
    if rank == 1:
        arena.HostBuffer = NoRoom
    try:
        return refused(lambda: build(folder / "qwen2", LocalPlane(), **settings))
    finally:
        arena.HostBuffer = found


def read_models(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"logits": {}, "sharded": {}}
    for family in tiny.FAMILIES:
        worker = build(folder / family, LocalPlane())
        found["sharded"][family] = all(isinstance(parameter, DTensor) for parameter in worker.lm.parameters())
        found["logits"][family] = own_logits(worker)
    found["checkpointed"] = own_logits(build(folder / "qwen2", LocalPlane(), checkpointing="full"))
    if ranks == 2:
        found["placed"] = {each: placement_case(folder / "qwen2", each, None) for each in PLACEMENTS}
        found["hybrid"] = {each: placement_case(folder / "qwen2", each, 1) for each in PLACEMENTS}
        found["changed"] = {each: changed_case(folder, rank, each) for each in ("page_cache", "ring")}
        found["broken"] = broken_case(folder, rank)
        found["no_room"] = [
            no_room_case(folder, rank, reference_placement="arena"),
            no_room_case(folder, rank, train={"optimizer_state": "streamed"}),
        ]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family, make in tiny.FAMILIES.items():
        save(make(vocab=VOCAB), root / family)
    for rank in (0, 1):
        for name in ("own_page_cache", "own_ring", "broken"):
            save(tiny.qwen2(vocab=VOCAB), root / f"{name}_{rank}")
    (root / "broken_1" / "model.safetensors").unlink()
    return root


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    positions = torch.arange(len(IDS))[None]
    for family in tiny.FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32).eval()
        with torch.no_grad():
            found[family] = model(input_ids=IDS[None], position_ids=positions, use_cache=False).logits[0]
    return found


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(read_models, 2, tmp_path_factory.mktemp("pair"), folder)


def check_logits(ranks: list[dict[str, Any]], expected: dict[str, Tensor]) -> None:
    for found in ranks:
        assert {
            family for family, logits in found["logits"].items() if not torch.equal(logits, expected[family])
        } == set()
        assert torch.equal(found["checkpointed"], expected["qwen2"])
        assert all(found["sharded"].values())


@pytest.mark.parametrize("ranks", [1, 4])
def test_logits_are_bitwise_those_of_from_pretrained(
    ranks: int, folder: Path, expected: dict[str, Tensor], tmp_path: Path
) -> None:
    check_logits(run_ranks(read_models, ranks, tmp_path / "ranks", folder), expected)


def test_logits_on_two_ranks_are_bitwise_those_of_from_pretrained(
    pair: list[dict[str, Any]], expected: dict[str, Tensor]
) -> None:
    check_logits(pair, expected)


@pytest.mark.parametrize("mesh", ["placed", "hybrid"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_reference_stays_what_the_policy_was_at_first(
    pair: list[dict[str, Any]], placement: str, mesh: str
) -> None:
    for found in (each[mesh][placement] for each in pair):
        assert torch.equal(found["first"], found["first_old"])
        assert torch.equal(found["later"], found["first"])
        assert not torch.equal(found["later_old"], found["first_old"])
        between = {found["before"], found["after_first"], found["after_later"]}
        assert (between == {0}) == (placement != "device")


@pytest.mark.parametrize("placement", ["page_cache", "ring"])
def test_a_file_that_changed_under_one_rank_is_refused_by_all(pair: list[dict[str, Any]], placement: str) -> None:
    for message, left in (each["changed"][placement] for each in pair):
        assert message.startswith("CheckpointError")
        assert f"own_{placement}_1" in message
        assert left == 0


def test_weights_that_one_rank_cannot_read_are_refused_by_all(pair: list[dict[str, Any]]) -> None:
    for message in (each["broken"] for each in pair):
        assert message.startswith("RefusedError: model.path: ")
        assert "broken_1" in message


def test_host_memory_that_one_rank_does_not_get_is_said_by_all(pair: list[dict[str, Any]]) -> None:
    first, second = (each["no_room"] for each in pair)
    assert first == second
    for message in first:
        assert message.startswith("RunError: ")
        assert "could not be mapped" in message
