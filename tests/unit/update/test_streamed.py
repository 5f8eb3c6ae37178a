"""AdamW with moments in the arena gives the bits of torch's fused AdamW, however they are cut into groups."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from plimsoll.config.train import TrainConfig
from plimsoll.memory.resident import Place, storage_bytes
from plimsoll.parallel.mesh import ensure_process_group
from plimsoll.parallel.tensors import local
from plimsoll.plane.local import LocalPlane
from plimsoll.update.adamw import AdamWSettings, DeviceAdamW
from plimsoll.update.optimizer import Optimizer
from plimsoll.update.streamed import StreamedAdamW, plan_stream
from plimsoll.update.worker import PolicyWorker
from plimsoll.weights.limits import STREAM_SLOTS
from tests import tiny
from tests.unit.update.support import (
    full_moments,
    load_state,
    make_batch,
    make_groups,
    make_plan,
    make_recipe,
    save,
    write_state,
)

CPU = torch.device("cpu")
SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
SHAPES = {
    "small": (3, 5),
    "norm": (7,),
    "large": (173, 41),
    "bias": (1,),
    "none": (0, 4),
    "idle": (4, 4),
    "last": (65,),
}
"""`large` has 7093 elements: at 4 bytes, 56,744 bytes of moments, and no multiple of a vector."""


def make_parameters(dtype: torch.dtype, *, sharded: bool = False) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    values = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        values = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in values.items()}
    return {name: nn.Parameter(value) for name, value in values.items()}


def set_gradients(parameters: Mapping[str, nn.Parameter], step: int, without: set[str]) -> None:
    """Equal for equal steps; None for those in `without`."""
    generator = torch.Generator().manual_seed(100 + step)
    for name, parameter in parameters.items():
        gradient = torch.randn(SHAPES[name], generator=generator).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = None if name in without else gradient


def without_gradient(step: int) -> set[str]:
    """One never has a gradient, one has its first late, one misses a step."""
    return {"idle"} | ({"norm"} if step < 2 else set()) | ({"large"} if step == 1 else set())


def assert_equal_moments(ours: Any, expected: Any) -> None:
    assert ours.steps_by_name() == expected.steps_by_name()
    found, wanted = ours.moments(), expected.moments()
    assert list(found) == list(wanted)
    for name, moments in wanted.items():
        for moment, value in moments.items():
            mine = found[name][moment]
            assert type(mine) is type(value)
            assert mine.shape == value.shape
            assert torch.equal(local(mine), local(value)), f"{moment} of {name}"
            if isinstance(value, DTensor):
                assert (mine.placements, mine.device_mesh) == (value.placements, value.device_mesh)


def assert_equal_parameters(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(local(ours[name]), local(value)), name


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("group_bytes", [1, 300, 20_000, 2**20])
def test_streamed_steps_are_bitwise_those_on_the_device(group_bytes: int, dtype: torch.dtype, sharded: bool) -> None:
    if sharded:
        ensure_process_group(CPU)
    mine, theirs = make_parameters(dtype, sharded=sharded), make_parameters(dtype, sharded=sharded)
    ours = StreamedAdamW(mine, SETTINGS, group_bytes=group_bytes)
    expected = DeviceAdamW(theirs, SETTINGS)
    assert ours.moments() == {}
    for step, rate in enumerate((1e-3, 3e-2, 0.0, 1e-2)):
        for parameters, adamw in ((mine, ours), (theirs, expected)):
            set_gradients(parameters, step, without_gradient(step))
            adamw.step(rate)
        assert_equal_parameters(mine, theirs)
        assert_equal_moments(ours, expected)
    assert ours.steps_by_name() == {"small": 4, "norm": 2, "large": 3, "bias": 4, "none": 4, "last": 4}
    ours.close()


def test_the_device_place_is_torchs_own_adamw() -> None:
    """And so the streamed one is, by the test above."""
    mine, theirs = make_parameters(torch.float32), make_parameters(torch.float32)
    adamw = DeviceAdamW(mine, SETTINGS)
    matrices, vectors = ([p for p in theirs.values() if (p.ndim >= 2) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(3):
        set_gradients(mine, step, set())
        set_gradients(theirs, step, set())
        adamw.step(1e-2)
        torchs.step()
    assert_equal_parameters(mine, theirs)


def test_a_gradient_of_other_strides_is_read_by_its_elements() -> None:
    parameter = {"weight": nn.Parameter(torch.randn(40, 30))}
    same = {"weight": nn.Parameter(parameter["weight"].detach().clone())}
    gradient = torch.randn(40, 30)
    parameter["weight"].grad = gradient.t().contiguous().t()
    same["weight"].grad = gradient
    StreamedAdamW(parameter, SETTINGS, group_bytes=1).step(1e-2)
    DeviceAdamW(same, SETTINGS).step(1e-2)
    assert_equal_parameters(parameter, same)


@pytest.mark.parametrize("group_bytes", [1, 300, 8192, 20_000, 57_000, 2**20])
def test_every_element_of_every_moment_goes_through_one_slot_once(group_bytes: int) -> None:
    """By marking bytes: each group's copies and slices, against the places of whole moments."""
    parameters = {name: p.detach() for name, p in make_parameters(torch.float32).items()}
    plan = plan_stream(parameters, group_bytes)
    arena = [torch.zeros(size, dtype=torch.uint8) for size in plan.storages]
    stepped = {name: torch.zeros(p.numel(), dtype=torch.int64) for name, p in parameters.items()}
    for group in plan.groups:
        slot = torch.zeros(plan.slot_bytes, dtype=torch.uint8)
        for part in group.slices:
            stepped[part.name][part.start : part.stop] += 1
            for offset in part.offsets:
                assert offset % 64 == 0
                slot[offset : offset + 4 * (part.stop - part.start)] += 1
        for run in group.runs:
            storage, first = run.place
            arena[storage][first : first + run.num_bytes] += slot[run.offset : run.offset + run.num_bytes]
    assert all(bool((count == 1).all()) for count in stepped.values())
    for name, parameter in parameters.items():
        for storage, first in plan.places[name]:
            moment = arena[storage][first : first + 4 * parameter.numel()]
            assert len(moment) == 4 * parameter.numel()
            assert bool((moment == 1).all()), name
    exact = sum(2 * 4 * p.numel() for p in parameters.values())
    assert sum(int(bytes_.sum()) for bytes_ in arena) == exact
    smallest = 2 * 4 * 1024  # a slice is not shorter
    assert plan.slot_bytes <= max(group_bytes, smallest)
    # The groups are not needlessly many: two neighbours in one storage would have been one.
    assert len(plan.groups) <= 2 * sum(plan.storages) / group_bytes + len(parameters)


def test_device_memory_is_three_slots_and_host_memory_the_moments() -> None:
    parameters = {"large": nn.Parameter(torch.zeros(100_000)), "small": nn.Parameter(torch.zeros(100))}
    adamw = StreamedAdamW(parameters, SETTINGS, group_bytes=2**16)
    assert adamw.slots_bytes == STREAM_SLOTS * 2**16
    exact = 2 * 4 * 100_100
    assert exact <= adamw.arena_bytes <= 1.01 * exact
    assert storage_bytes(adamw.tensors()) == adamw.arena_bytes


@pytest.mark.parametrize("writer", ["device", "streamed"])
@pytest.mark.parametrize("reader", ["device", "streamed"])
def test_moments_load_from_either_place_into_either(writer: str, reader: str) -> None:
    def make(place: str, parameters: Mapping[str, nn.Parameter]) -> DeviceAdamW | StreamedAdamW:
        if place == "device":
            return DeviceAdamW(parameters, SETTINGS)
        return StreamedAdamW(parameters, SETTINGS, group_bytes=8192)

    first = make_parameters(torch.float32)
    saved = make(writer, first)
    for step in range(2):
        set_gradients(first, step, {"idle", "norm"})
        saved.step(1e-2)
    second = make_parameters(torch.float32)
    loaded = make(reader, second)
    set_gradients(second, 9, set())
    loaded.step(1.0)  # what it held before must not show
    with torch.no_grad():
        for name, parameter in second.items():
            parameter.copy_(first[name])
    steps = saved.steps_by_name()
    targets = loaded.empty_moments()
    assert list(targets) == list(second)
    assert all(not tensor.any() for moments in targets.values() for tensor in moments.values())
    for name, moments in saved.moments().items():
        for moment, tensor in moments.items():
            targets[name][moment].copy_(tensor)
    targets["idle"]["exp_avg"].fill_(5.0)  # has no step count in the file, and is dropped
    loaded.finish_load(steps)
    assert_equal_moments(loaded, saved)
    for parameters, adamw in ((first, saved), (second, loaded)):
        set_gradients(parameters, 2, set())
        adamw.step(1e-2)
    assert_equal_parameters(first, second)
    assert_equal_moments(loaded, saved)


def test_clipping_schedule_and_skipped_steps_are_those_of_the_device() -> None:
    ensure_process_group(CPU)
    config = TrainConfig(learning_rate=1e-2, schedule="cosine", warmup_steps=2, max_grad_norm=0.5)
    outcomes: dict[str, list[Any]] = {}
    found: dict[str, dict[str, nn.Parameter]] = {}
    for location in ("device", "streamed"):
        parameters = make_parameters(torch.float32)
        optimizer = Optimizer(parameters, config, 4, location=cast("Any", location))
        for step in range(4):
            set_gradients(parameters, step, {"idle"})
            if step == 2:
                cast("Tensor", parameters["small"].grad)[0, 0] = float("inf")
            outcomes.setdefault(location, []).append(optimizer.step())
            optimizer.zero_grad()
            assert optimizer.gradients() == []
        assert optimizer.steps == 3
        assert optimizer.steps_by_name()["large"] == 3
        found[location] = parameters
    assert outcomes["device"] == outcomes["streamed"]
    assert [outcome.skipped for outcome in outcomes["device"]] == [False, False, True, False]
    assert_equal_parameters(found["streamed"], found["device"])


def test_a_worker_trains_and_goes_on_from_a_checkpoint_alike_wherever_the_moments_are(tmp_path: Path) -> None:
    folder = save(tiny.qwen2(seed=1), tmp_path / "model")

    def build(location: str) -> tuple[PolicyWorker, LocalPlane]:
        plane = LocalPlane()
        train = {"optimizer_state": location, "learning_rate": 1e-2}
        recipe = make_recipe(folder, model={"dtype": "float32"}, train=train)
        return PolicyWorker(recipe, make_plan(compute_dtype="float32", optimizer_steps=6), plane), plane

    def train(worker: PolicyWorker, plane: LocalPlane, seed: int) -> None:
        batch = make_batch(make_groups(plane, seed=seed))
        worker.advantages(batch)
        worker.update(batch)

    def state(worker: PolicyWorker) -> dict[str, Tensor]:
        return {**{name: t.clone() for name, t in worker.model_state().items()}, **full_moments(worker)}

    found: dict[str, list[dict[str, Tensor]]] = {}
    for location, other in (("device", "streamed"), ("streamed", "device")):
        worker, plane = build(location)
        places = {resident.name: resident.place for resident in worker.residents()}
        assert places["optimizer_state"] == (Place.HOST if location == "streamed" else Place.DEVICE)
        train(worker, plane, 0)
        written = write_state(worker, tmp_path / location)
        resumed, other_plane = build(other)
        load_state(resumed, written, worker.counters())
        train(worker, plane, 1)
        train(resumed, other_plane, 1)
        found[location] = [state(worker), state(resumed)]
    expected = found["device"][0]
    for states in found.values():
        for one in states:
            assert one.keys() == expected.keys()
            assert all(torch.equal(one[name], expected[name]) for name in expected)


def test_what_would_step_wrongly_is_our_mistake() -> None:
    shared = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(AssertionError, match="under two names"):
        StreamedAdamW({"embedding": shared, "head": shared}, SETTINGS)
    with pytest.raises(AssertionError, match="contiguous"):
        StreamedAdamW({"weight": nn.Parameter(torch.randn(4, 3).t())}, SETTINGS)
    parameter = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.ones(4)
    adamw = StreamedAdamW({"weight": parameter}, SETTINGS)
    with pytest.raises(AssertionError, match=r"gradient of weight is torch\.float32"):
        adamw.step(1e-2)
    assert adamw.steps_by_name() == {}


def test_views_of_one_storage_step_as_they_do_on_the_device() -> None:
    """Neighbours in one piece of memory, as of an engine that packs its weights."""

    def halves() -> dict[str, nn.Parameter]:
        whole = torch.arange(24.0).view(4, 6)
        return {"first": nn.Parameter(whole[:2]), "second": nn.Parameter(whole[2:])}

    mine, theirs = halves(), halves()
    for parameters, adamw in (
        (mine, StreamedAdamW(mine, SETTINGS, group_bytes=64)),
        (theirs, DeviceAdamW(theirs, SETTINGS)),
    ):
        for number, parameter in enumerate(parameters.values()):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        adamw.step(1e-1)
    assert_equal_parameters(mine, theirs)


def test_places_of_more_than_two_gib_are_counted_in_whole_numbers() -> None:
    """Of a parameter that no memory is taken for."""
    big = {"big": torch.empty(3 * 2**31 + 5, dtype=torch.float32, device="meta"), "small": torch.empty(3)}
    plan = plan_stream(big, 256 * 2**20)
    parts = [part for group in plan.groups for part in group.slices if part.name == "big"]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, 3 * 2**31 + 5)
    assert max(part.stop - part.start for part in parts) * 8 <= 256 * 2**20
    last = next(group for group in plan.groups if group.slices[0] is parts[-1])
    assert [run.place[1] + run.num_bytes for run in last.runs] == [4 * (3 * 2**31 + 5)] * 2


def test_a_closed_optimizer_holds_nothing() -> None:
    parameters = make_parameters(torch.float32)
    num_bytes = 2 * sum(parameter.nbytes for parameter in parameters.values())
    for location, before in (("device", num_bytes), ("streamed", num_bytes)):
        optimizer = Optimizer(parameters, TrainConfig(), total_steps=4, location=cast("Any", location))
        assert storage_bytes(optimizer.tensors()) >= before
        optimizer.close()
        optimizer.close()
        assert storage_bytes(optimizer.tensors()) == 0
