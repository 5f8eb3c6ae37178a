import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from plimsoll.parallel.tensors import full
from plimsoll.rollout.fake import FakeEngine
from plimsoll.sync.buckets import WeightBuckets
from plimsoll.sync.engine import send
from tests import tiny

FAMILIES = {"qwen2": tiny.qwen2, "qwen3": tiny.qwen3, "qwen3_moe": tiny.qwen3_moe, "gpt2": tiny.gpt2}


def collected(buckets: WeightBuckets) -> dict[str, Tensor]:
    return {name: tensor for tensors, _ in buckets() for name, tensor in tensors}


def fake(names: frozenset[str]) -> FakeEngine:
    return FakeEngine(script=lambda asked, version: [5] * 9, accepts=names)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_and_values_are_those_of_the_checkpoint_that_transformers_saves(
    family: str, dtype: torch.dtype, tmp_path: Path
):
    model = FAMILIES[family](seed=3)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    buckets = WeightBuckets(model, dtype, bucket_bytes=4096)
    sent = collected(buckets)
    assert set(sent) == set(saved) == buckets.names
    for name, tensor in saved.items():
        assert sent[name].dtype == dtype
        assert torch.equal(sent[name], tensor.to(dtype)), name


def test_buckets_are_bounded_and_a_larger_tensor_goes_alone():
    model = tiny.qwen2()
    limit = 10_000
    sizes: list[int] = []
    for tensors, size in WeightBuckets(model, torch.bfloat16, limit)():
        assert size == sum(tensor.nbytes for _, tensor in tensors)
        assert size <= limit or len(tensors) == 1
        sizes.append(size)
    assert len(sizes) > 2
    assert sum(sizes) == sum(p.numel() * 2 for p in model.parameters())
    (everything,) = WeightBuckets(model, torch.bfloat16)()
    assert everything.num_bytes == sum(sizes)


def test_equal_dtypes_send_the_trainer_s_own_memory_and_follow_its_updates():
    model = tiny.qwen2()
    buckets = WeightBuckets(model, torch.float32)
    held = dict(model.named_parameters())
    for _ in range(2):
        sent = collected(buckets)
        assert all(tensor.data_ptr() == held[name].data_ptr() for name, tensor in sent.items())
        with torch.no_grad():
            held["model.norm.weight"].add_(1.0)
    assert sent["model.norm.weight"][0].item() == 3.0


class Watching:
    """Holds nothing, and knows how many of the tensors that it was sent are still alive."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Tensor]] = []

    def begin(self, version: int) -> None: ...

    def bucket(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._seen += [weakref.ref(tensor) for _, tensor in tensors]

    def commit(self, version: int) -> None: ...

    def alive(self) -> int:
        return sum(ref() is not None for ref in self._seen)


def test_a_bucket_is_gone_before_anything_of_the_next_is_made(monkeypatch: pytest.MonkeyPatch):
    engine = Watching()
    alive: list[int] = []

    def watched(tensor: Tensor) -> Tensor:
        alive.append(engine.alive())
        return full(tensor)

    monkeypatch.setattr("plimsoll.sync.buckets.full", watched)
    sent = send(WeightBuckets(tiny.qwen2(), torch.bfloat16, 10_000), 1, engine)
    assert sent == sum(p.numel() * 2 for p in tiny.qwen2().parameters())
    assert len(alive) == len(list(tiny.qwen2().parameters()))
    assert set(alive) == {0}


def test_a_sync_ends_with_the_version_when_all_weights_came():
    buckets = WeightBuckets(tiny.qwen3_moe(), torch.bfloat16, 10_000)
    engine = fake(buckets.names)
    send(buckets, 4, engine)
    assert engine.version == 4
    assert engine.events[0] == "engine.begin"
    assert engine.events[-1] == "engine.commit"
    assert set(engine.events[1:-1]) == {"engine.bucket"}


def test_a_name_that_the_engine_misses_or_does_not_know_is_an_error():
    buckets = WeightBuckets(tiny.qwen2(), torch.bfloat16)
    more = fake(buckets.names | {"model.layers.0.adapter.weight"})
    with pytest.raises(AssertionError, match=r"never came: \['model\.layers\.0\.adapter\.weight'\]"):
        send(buckets, 1, more)
    fewer = fake(buckets.names - {"model.norm.weight"})
    with pytest.raises(AssertionError, match=r"no parameter is made of model\.norm\.weight"):
        send(buckets, 1, fewer)
    assert more.version == fewer.version == -1


def test_buffers_that_a_checkpoint_has_keep_their_dtype():
    model = tiny.qwen2()
    model.model.norm.register_buffer("steps", torch.tensor([3]))
    model.model.norm.register_buffer("scratch", torch.tensor([1.0]), persistent=False)
    sent = collected(WeightBuckets(model, torch.bfloat16))
    assert sent["model.norm.steps"].dtype == torch.int64
    assert "model.norm.scratch" not in sent


def test_a_model_under_activation_checkpointing_has_the_same_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = tiny.qwen2()
    plain = WeightBuckets(model, torch.bfloat16).names
    model.model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.model.layers)
    assert WeightBuckets(model, torch.bfloat16).names == plain
