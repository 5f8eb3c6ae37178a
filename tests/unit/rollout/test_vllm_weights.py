"""The reload over a small model with packed, padded, tied and ignored weights, and vLLM's protocol played by a fake."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from plimsoll.errors import RunError
from plimsoll.rollout.vllm_weights import ReloadCalls, WeightReload

PADDING = 2


class Layer(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)


class Model(nn.Module):
    """qkv is packed of q, k and v (2 rows each); the embedding's 6 rows are rounded up to 8; the head is tied."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = Layer(6 + PADDING, 3)
        self.qkv = Layer(6, 3)
        self.norm = Layer(3)
        self.head = Layer(6 + PADDING, 3)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(4))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = set()
        for name, tensor in weights:
            module, _, kind = name.rpartition(".")
            if kind == "bias":
                continue  # as vLLM does with a bias that it has no place for
            target, start = (self.qkv, 2 * "qkv".index(module)) if module in ("q", "k", "v") else (None, 0)
            target = target or dict(self.named_children()).get(module)
            if target is None:
                raise ValueError(f"There is no module or parameter named {name!r}")
            target.load(target, start, tensor)
            loaded.add(f"{module}.weight")
        return loaded


@dataclass
class Info:
    load_numel: int = 0
    kernel_tensors: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
    loading: bool = False
    waiting: list[tuple[int, Tensor]] = field(default_factory=list)

    def can_load(self) -> bool:
        return self.loading


class Reload:
    """Layers are put on the meta device, and back, with their weights, when all elements have come."""

    def __init__(self, model: nn.Module) -> None:
        self.infos = {layer: Info() for layer in model.modules()}

    def initialize(self, model: nn.Module) -> None:
        for layer in list(self.infos):
            own = dict(layer.named_parameters(recurse=False))
            self.infos[layer] = Info(kernel_tensors=(own, {}), loading=True)
            for name, parameter in own.items():
                setattr(layer, name, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False))
            layer.load = self.load

    def load(self, layer: Layer, start: int, tensor: Tensor) -> None:
        info = self.infos[layer]
        layer.weight[start : start + len(tensor)].copy_(tensor)
        info.load_numel += tensor.numel()
        info.waiting.append((start, tensor))
        if info.load_numel >= layer.weight.numel():
            self._complete(layer)

    def finalize(self, model: nn.Module) -> None:
        for layer, info in list(self.infos.items()):
            if info.loading:
                self._complete(layer)

    def _complete(self, layer: nn.Module) -> None:
        info = self.infos[layer]
        for name, kept in info.kernel_tensors[0].items():
            setattr(layer, name, kept)
            for start, tensor in info.waiting:
                kept[start : start + len(tensor)].copy_(tensor)
        self.infos[layer] = Info()


def build(*, tied: bool = True) -> tuple[Model, WeightReload]:
    model = Model(tied=tied)
    fake = Reload(model)
    calls = ReloadCalls(
        initialize=fake.initialize,
        finalize=fake.finalize,
        info=lambda layer: fake.infos[layer],
        padding_rows=lambda layer: PADDING if layer in (model.embed, model.head) else 0,
        uncounted=frozenset({"correction"}),
    )
    return model, WeightReload(model, calls)


def weights(value: float) -> list[tuple[str, Tensor]]:
    """Name by name; q, k and v are told apart."""
    return [
        ("embed.weight", torch.full((6, 3), value)),
        ("q.weight", torch.full((2, 3), value + 1)),
        ("k.weight", torch.full((2, 3), value + 2)),
        ("v.weight", torch.full((2, 3), value + 3)),
        ("norm.weight", torch.full((3,), value + 4)),
    ]


def test_packed_parameters_are_filled_over_several_buckets_in_place_version_after_version():
    model, reload = build()
    place = model.qkv.weight.data_ptr()
    for value in (10.0, 20.0):
        reload.begin()
        for start in range(0, 5, 2):
            reload.bucket(weights(value)[start : start + 2])
        reload.commit()
        assert model.qkv.weight[:, 0].tolist() == [value + 1] * 2 + [value + 2] * 2 + [value + 3] * 2
        assert model.embed.weight[:, 0].tolist() == [value] * 6 + [0] * PADDING
        assert model.head.weight is model.embed.weight
    assert model.qkv.weight.data_ptr() == place


@pytest.mark.parametrize(
    ("left_out", "named"),
    [("k.weight", "qkv.weight"), ("norm.weight", "norm.weight"), ("embed.weight", "embed.weight, head.weight")],
)
def test_a_weight_that_never_comes_is_named(left_out: str, named: str):
    _, reload = build()
    reload.begin()
    reload.bucket([pair for pair in weights(1.0) if pair[0] != left_out])
    with pytest.raises(RunError, match=f"that no tensor of the policy has filled: {named}$"):
        reload.commit()


def test_an_untied_head_must_come():
    _, reload = build(tied=False)
    reload.begin()
    reload.bucket(weights(1.0))
    with pytest.raises(RunError, match=r"filled: head\.weight$"):
        reload.commit()


def test_an_unknown_name_is_an_error():
    _, reload = build()
    reload.begin()
    with pytest.raises(RunError, match=r"no place for a weight of the policy: .*'router\.weight'"):
        reload.bucket([*weights(1.0), ("router.weight", torch.ones(2))])


def test_a_bias_that_is_left_out_without_a_word_is_an_error():
    _, reload = build()
    reload.begin()
    with pytest.raises(RunError, match=r"took 18 of 20 elements .* it holds embed\.weight, q\.bias\."):
        reload.bucket([weights(1.0)[0], ("q.bias", torch.ones(2))])


def test_a_name_that_comes_twice_is_a_mistake():
    _, reload = build()
    reload.begin()
    reload.bucket(weights(1.0)[:1])
    with pytest.raises(AssertionError, match=r"came twice: \['embed\.weight'\]"):
        reload.bucket(weights(1.0)[:1])
