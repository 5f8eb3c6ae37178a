from pathlib import Path

import pytest
import torch

from plimsoll.plane.local import LocalPlane
from plimsoll.sync import inprocess
from plimsoll.sync.inprocess import RolloutWeights, sync
from plimsoll.update.worker import PolicyWorker
from tests import tiny
from tests.unit.update.support import make_batch, make_groups, make_plan, make_recipe, save


class FakeEngine:
    def __init__(self) -> None:
        self.version = -1

    def set_version(self, version: int) -> None:
        self.version = version


def build(folder: Path, plane: LocalPlane, *, checkpointing: str = "none") -> PolicyWorker:
    plan = make_plan(compute_dtype="float32", activation_checkpointing=checkpointing)
    return PolicyWorker(make_recipe(folder, model={"dtype": "float32"}), plan, plane)


def train(worker: PolicyWorker, plane: LocalPlane, seed: int) -> None:
    batch = make_batch(make_groups(plane, seed=seed))
    worker.advantages(batch)
    worker.update(batch)


def expected_logits(worker: PolicyWorker, family: str, ids: torch.Tensor) -> torch.Tensor:
    plain = tiny.FAMILIES[family]()
    plain.load_state_dict({name: t.clone() for name, t in worker.model_state().items()}, strict=False)
    plain.tie_weights()
    with torch.no_grad():
        return plain(ids).logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_equal_dtypes_share_memory_before_and_after_updates(family: str, checkpointing: str, tmp_path: Path) -> None:
    plane = LocalPlane()
    worker = build(save(tiny.FAMILIES[family](seed=1), tmp_path), plane, checkpointing=checkpointing)
    weights, engine = RolloutWeights(worker, torch.float32), FakeEngine()
    ids = torch.arange(3, 15)[None]
    before = expected_logits(worker, family, ids)
    for seed in range(2):
        train(worker, plane, seed)
        assert sync(worker, weights, engine) == 0
        assert engine.version == worker.version == seed + 1
        held = dict(weights.model.named_parameters())
        for name, tensor in worker.model_state().items():
            assert held[name].data_ptr() == tensor.data_ptr()
    with torch.no_grad():
        logits = weights.model(ids).logits
    torch.testing.assert_close(logits, expected_logits(worker, family, ids), atol=1e-6, rtol=0)
    assert (logits - before).abs().max() > 1e-4  # what is served changed with the update
    assert weights.copied_bytes == 0
    assert weights.residents() == ()


def test_another_dtype_is_a_counted_copy_that_follows_at_sync(tmp_path: Path) -> None:
    plane = LocalPlane()
    worker = build(save(tiny.qwen2(seed=1), tmp_path), plane)
    weights, engine = RolloutWeights(worker, torch.bfloat16), FakeEngine()
    held = dict(weights.model.named_parameters())
    size = sum(tensor.numel() * 2 for tensor in worker.model_state().values())
    assert weights.copied_bytes == size
    assert [(r.name, r.measured()) for r in weights.residents()] == [("rollout_parameters", size)]
    stale = {name: parameter.clone() for name, parameter in held.items()}
    train(worker, plane, 0)
    assert all(torch.equal(held[name], stale[name]) for name in held)
    assert sync(worker, weights, engine) == size
    for name, tensor in worker.model_state().items():
        assert torch.equal(held[name], tensor.to(torch.bfloat16))
    assert any(not torch.equal(held[name], stale[name]) for name in held)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_weights_stay_tied_and_untied_ones_untied(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    worker = build(save(tiny.qwen2(tied=tied, seed=1), tmp_path), LocalPlane())
    model = RolloutWeights(worker, dtype).model
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == tied


def test_the_engine_s_model_keeps_its_own_attention(tmp_path: Path) -> None:
    worker = build(save(tiny.qwen2(seed=1), tmp_path), LocalPlane())
    model = RolloutWeights(worker, torch.float32).model
    assert model.config._attn_implementation == "sdpa"
    assert worker.config._attn_implementation == "plimsoll_padded"


def test_a_copy_that_left_the_device_is_of_no_version_until_it_is_refreshed(tmp_path: Path) -> None:
    plane = LocalPlane()
    worker = build(save(tiny.qwen2(seed=1), tmp_path), plane)
    weights, engine = RolloutWeights(worker, torch.bfloat16), FakeEngine()
    (resident,) = weights.residents()
    assert resident.mover is weights
    assert resident.version is not None
    held, size = dict(weights.model.named_parameters()), weights.copied_bytes
    assert (weights.version, weights.borrowed, weights.present) == (0, False, True)
    train(worker, plane, 0)
    assert resident.version() == 0
    for _ in range(2):
        assert weights.evict() == 0
        assert (resident.version(), resident.measured(), weights.present) == (-1, 0, False)
        with pytest.raises(AssertionError, match="not on the device"):
            sync(worker, weights, engine)
        assert weights.admit() == 0
        assert (resident.version(), resident.measured()) == (-1, size)
        assert sync(worker, weights, engine) == size
        assert resident.version() == engine.version == worker.version == 1
        for name, tensor in worker.model_state().items():
            assert torch.equal(held[name], tensor.to(torch.bfloat16))


def test_a_refresh_that_fails_half_way_leaves_weights_of_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = build(save(tiny.qwen2(seed=1), tmp_path), LocalPlane())
    weights = RolloutWeights(worker, torch.bfloat16)

    def fails(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("lost a rank")

    monkeypatch.setattr(inprocess, "full", fails)
    with pytest.raises(RuntimeError, match="lost a rank"):
        weights.refresh(worker)
    assert weights.version == -1


def test_borrowed_weights_have_nothing_to_move(tmp_path: Path) -> None:
    worker = build(save(tiny.qwen2(seed=1), tmp_path), LocalPlane())
    weights = RolloutWeights(worker, torch.float32)
    assert weights.borrowed
    assert weights.residents() == ()
