"""`train.compile` on layers that were built without memory, sharded, and then read."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from plimsoll.plane.local import LocalPlane
from plimsoll.update.worker import PolicyWorker
from tests import tiny
from tests.unit.update.support import make_batch, make_groups, make_plan, make_recipe, save


def trained(folder: Path, *, compiled: bool) -> dict[str, Tensor]:
    """Weights after two batches at a rate that moves every weight, with a reference beside the policy."""
    recipe = make_recipe(
        folder, train={"compile": compiled, "learning_rate": 1e-2}, algorithm={"kl_coefficient": 0.1}, model={}
    )
    plane = LocalPlane()
    worker = PolicyWorker(recipe, make_plan(), plane)
    for seed in (0, 1):
        batch = make_batch(make_groups(plane, seed=seed))
        worker.score(batch, old=True, reference=True)
        worker.advantages(batch)
        worker.update(batch)
    assert worker.version == 2
    found = {name: tensor.clone() for name, tensor in worker.model_state().items()}
    worker.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch's own tracing, of a layer's input
def test_a_compiled_policy_trains_like_one_that_is_not(tmp_path: Path) -> None:
    folder = save(tiny.qwen2(seed=1), tmp_path / "model")
    before = tiny.qwen2(seed=1, dtype=torch.float64).state_dict()
    plain, compiled = trained(folder, compiled=False), trained(folder, compiled=True)
    assert plain.keys() == compiled.keys()
    for name, tensor in plain.items():
        moved = (tensor - before[name]).norm()
        assert moved > 1e-3
        # Norms compute in fp32 in either, and AdamW enlarges a rounding where a gradient is nearly 0.
        assert (compiled[name] - tensor).norm() < 1e-3 * moved
