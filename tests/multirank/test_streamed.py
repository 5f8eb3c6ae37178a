"""On two ranks with uneven shards: moments in the arena, and parameters that go there and come back."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from plimsoll.parallel.tensors import full, local
from plimsoll.update.adamw import AdamWSettings, DeviceAdamW
from plimsoll.update.streamed import StreamedAdamW
from plimsoll.weights.arena import HostArena
from plimsoll.weights.offload import Offloader, storage_sizes
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)


class Model(nn.Module):
    """Of odd lengths; `scale` has one element, so the second rank has none of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.sigmoid(hidden @ self.embedding.weight.t())


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in cast("Any", model).layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, *, streamed: bool, offloaded: bool, rank: int) -> dict[str, Any]:
    parameters = dict(model.named_parameters())
    adamw = StreamedAdamW(parameters, SETTINGS, group_bytes=64) if streamed else DeviceAdamW(parameters, SETTINGS)
    found: dict[str, Any] = {"logits": [], "gradients": []}
    offloader: Offloader | None = None
    for step in range(3):
        logits = model(torch.arange(5) + rank + step)
        logits.square().mean().backward()
        found["logits"].append(logits.detach().clone())
        found["gradients"].append([local(cast("Tensor", p.grad)).clone() for p in parameters.values()])
        adamw.step(0.05)
        for parameter in parameters.values():
            parameter.grad = None
        if offloaded:
            # Made after the first forward, in which FSDP2 pads shards that are uneven.
            if offloader is None:
                arena = HostArena({"parameters": storage_sizes(parameters.values())}, device=torch.device("cpu"))
                offloader = Offloader(arena, "parameters", parameters.values())
            found["bytes"] = (offloader.offload().num_bytes, storage_sizes(parameters.values()))
            offloader.onload()
    found["shapes"] = {name: tuple(local(p).shape) for name, p in parameters.items()}
    found["parameters"] = {name: full(p).clone() for name, p in parameters.items()}
    found["moments"] = {
        f"{name}.{moment}": full(tensor).clone()
        for name, moments in adamw.moments().items()
        for moment, tensor in moments.items()
    }
    return found


def work(rank: int, ranks: int) -> dict[str, Any]:
    plain = Model()
    ways = {"plain": (False, False), "streamed": (True, False), "offloaded": (False, True), "both": (True, True)}
    return {
        name: train(shard(copy.deepcopy(plain)), streamed=streamed, offloaded=offloaded, rank=rank)
        for name, (streamed, offloaded) in ways.items()
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, 2, tmp_path_factory.mktemp("streamed") / "ranks")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in cast("dict[str, Any]", a))
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("way", ["streamed", "offloaded", "both"])
def test_uneven_shards_train_to_the_same_bits(pair: list[dict[str, Any]], way: str) -> None:
    for found in pair:
        for key in ("logits", "gradients", "parameters", "moments"):
            assert same(found[way][key], found["plain"][key]), key


def test_the_shards_were_uneven_and_the_padding_travels(pair: list[dict[str, Any]]) -> None:
    shapes = [found["plain"]["shapes"] for found in pair]
    assert [shape["embedding.weight"] for shape in shapes] == [(6, 7), (5, 7)]
    assert [shape["scale"] for shape in shapes] == [(1,), (0,)]
    padded = 4 * (6 * 7 + 2 * (4 * 7 + 4) + 1)
    for found in pair:
        num_bytes, left = found["offloaded"]["bytes"]
        assert num_bytes == padded
        assert sum(left) == 0


def test_moments_gathered_from_the_arena_are_whole(pair: list[dict[str, Any]]) -> None:
    moments = pair[0]["streamed"]["moments"]
    assert moments["embedding.weight.exp_avg"].shape == (11, 7)
    assert moments["scale.exp_avg_sq"].shape == (1,)
    assert bool((moments["layers.0.0.weight.exp_avg_sq"] > 0).any())
