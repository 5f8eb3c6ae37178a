"""Two gloo ranks: gathering in the default stream changes no bit of what is trained, and reaches every group."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from plimsoll.config.memory import MemoryConfig
from plimsoll.model.spec import decoder_layers
from plimsoll.plane.local import LocalPlane
from plimsoll.update.worker import PolicyWorker
from tests import tiny
from tests.ranks import run_ranks
from tests.unit.update.support import make_batch, make_groups, make_plan, make_recipe, save

pytestmark = pytest.mark.timeout(240)

WAYS: dict[str, tuple[bool, str]] = {
    "own stream": (False, "none"),
    "default stream": (True, "none"),
    "default stream, recomputed": (True, "full"),
}
"""default_stream_gather, activation_checkpointing."""


def groups_of(worker: PolicyWorker) -> list[Any]:
    """FSDP2's own notes of each group of parameters, the root's first; torch has no public name for them."""
    modules = [module for module in worker.policy.modules() if isinstance(module, FSDPModule)]
    return [cast("Any", module)._get_fsdp_state() for module in modules]


def train(folder: Path, way: str) -> dict[str, Any]:
    gathered, recomputed = WAYS[way]
    recipe = make_recipe(folder / "qwen2", model={"dtype": "float32"}, train={"learning_rate": 0.1, "epsilon": 1.0})
    recipe = recipe.model_copy(update={"memory": MemoryConfig(default_stream_gather=gathered)})
    plane = LocalPlane()
    plan = make_plan(compute_dtype="float32", activation_checkpointing=recomputed)
    worker = PolicyWorker(recipe, plan, plane)
    states = groups_of(worker)
    losses: list[float] = []
    for seed in (0, 1, 2):
        batch = make_batch(make_groups(plane, num_groups=4, seed=seed), token_budget=1)
        worker.advantages(batch)
        losses.append(dict(worker.update(batch).values)["loss"])
    layers = decoder_layers(worker.policy.lm)
    found = {
        "losses": losses,
        "weights": {name: tensor.clone() for name, tensor in worker.model_state().items()},
        "flags": [state._fsdp_param_group.unshard_async_op for state in states],
        "forward": [len(state._states_to_forward_prefetch) for state in states],
        "backward": [len(state._states_to_backward_prefetch) for state in states],
        "layers": len(layers),
    }
    worker.close()
    return found


def work(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {way: train(folder, way) for way in WAYS}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("gather")
    save(tiny.qwen2(seed=1), root / "qwen2")
    return run_ranks(work, 2, root / "ranks", root)


@pytest.mark.parametrize("way", [way for way, (gathered, _) in WAYS.items() if gathered])
def test_losses_and_weights_are_the_same_bits(pair: list[dict[str, Any]], way: str) -> None:
    for found in pair:
        plain, other = found["own stream"], found[way]
        assert len(set(plain["losses"])) == 3
        assert other["losses"] == plain["losses"]
        weights: dict[str, Tensor] = plain["weights"]
        assert weights.keys() == other["weights"].keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, other["weights"][name]), name


def test_every_group_gathers_there_and_prefetches_its_neighbour(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        plain, ours = found["own stream"], found["default stream"]
        layers = ours["layers"]
        assert plain["flags"] == [False] * (1 + layers)
        assert ours["flags"] == [True] * (1 + layers)
        assert plain["forward"] == plain["backward"] == [0] * (1 + layers)
        # The root fetches the first layer, each layer the next one; backward each layer the one before.
        assert ours["forward"] == [1] * layers + [0]
        assert ours["backward"] == [0, 0] + [1] * (layers - 1)
        assert found["default stream, recomputed"]["flags"] == ours["flags"]
