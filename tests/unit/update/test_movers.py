"""The trainer's residents really leave and come back: training with evictions in every step is training without."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from plimsoll.checkpoint.saving import TrainingSaver
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.checkpoint.training import MODEL, OPTIMIZER
from plimsoll.errors import RunError
from plimsoll.memory import names
from plimsoll.memory.enter import Memory
from plimsoll.memory.phases import Phase
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.resident import Resident
from plimsoll.memory.schedule import Schedule
from plimsoll.parallel.mesh import close_process_group
from plimsoll.plane.local import LocalPlane
from plimsoll.rollout.movers import kv_resident
from plimsoll.rollout.native import NativeEngine
from plimsoll.sync.inprocess import RolloutWeights, sync
from plimsoll.update import movers
from plimsoll.update.movers import HostMover
from plimsoll.update.state import StateFolders
from plimsoll.update.worker import PolicyWorker
from plimsoll.weights.write import ShardWriter
from tests import tiny
from tests.processes import host_buffer_bytes
from tests.unit.checkpoint.states import training_state
from tests.unit.rollout.requests import drain, request
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
TRAINER = frozenset({names.ACTOR_PARAMETERS, names.OPTIMIZER_STATE})
ENGINE = frozenset({names.ROLLOUT_PARAMETERS, names.KV_CACHE})
REFERENCE = frozenset({names.REFERENCE_PARAMETERS})
EVERYTHING_MOVES = Schedule(
    evicted={
        Phase.ROLLOUT: TRAINER | REFERENCE,
        Phase.LOGPROB: ENGINE | REFERENCE,
        Phase.REFERENCE: ENGINE | TRAINER,
        Phase.UPDATE: ENGINE | REFERENCE,
        Phase.SYNC: frozenset({names.KV_CACHE, names.OPTIMIZER_STATE}) | REFERENCE,
        Phase.SAVE: ENGINE | REFERENCE,
    }
)


@pytest.fixture(autouse=True, scope="module")
def _group() -> Any:
    yield
    close_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny.qwen2(vocab=65), tmp_path / "model")


class Run:
    """A tiny trainer and a native engine with a copy of its weights, under one Memory."""

    def __init__(self, folder: Path, schedule: Schedule, log: Path, *, placement: str = "arena") -> None:
        self.plane = LocalPlane()
        recipe = make_recipe(
            folder,
            model={"dtype": "float32", "reference_placement": placement},
            algorithm={"kl_coefficient": 0.1},
            train={"learning_rate": 1e-2, "mini_batches_per_step": 2},
        )
        self.worker = PolicyWorker(recipe, make_plan(compute_dtype="float32"), self.plane)
        self.weights = RolloutWeights(self.worker, torch.bfloat16)
        self.engine = NativeEngine(self.weights.model, num_slots=3, slot_tokens=24, prefill_tokens=16)
        self.saver: TrainingSaver | None = None
        self.recorder = Recorder(log, rank=0, device=None, residents=self.residents, interval=1.0)
        self.memory = Memory(
            self.recorder,
            residents=self.residents,
            schedule=schedule,
            policy_version=lambda: self.worker.version,
            quiesce=self.quiesce,
        )

    def residents(self) -> list[Resident]:
        return [*self.worker.residents(), *self.weights.residents(), kv_resident(self.engine, None)]

    def quiesce(self, phase: Phase, leaving: frozenset[str]) -> None:
        if self.saver is not None and leaving & TRAINER:
            self.saver.wait_read()

    def sizes(self) -> dict[str, int]:
        return {each.name: each.measured() for each in self.residents()}

    def step(self, seed: int) -> dict[str, Any]:
        """What happened, and what was on the device in each phase."""
        batch = make_batch(make_groups(self.plane, seed=seed), mini_batches=2)
        held: dict[Phase, dict[str, int]] = {}
        with self.memory.enter(Phase.SYNC):
            sync(self.worker, self.weights, self.engine)
            held[Phase.SYNC] = self.sizes()
        with self.memory.enter(Phase.ROLLOUT):
            said = drain(self.engine, [request(0, [5, 6, 7], max_tokens=9), request(1, [5, 6, 8, 9], max_tokens=9)])
            held[Phase.ROLLOUT] = self.sizes()
        with self.memory.enter(Phase.LOGPROB):
            self.worker.score(batch, old=True, reference=False)
            held[Phase.LOGPROB] = self.sizes()
        with self.memory.enter(Phase.REFERENCE):
            self.worker.score(batch, old=False, reference=True)
            held[Phase.REFERENCE] = self.sizes()
        self.worker.advantages(batch)
        with self.memory.enter(Phase.UPDATE):
            stats = self.worker.update(batch)
            held[Phase.UPDATE] = self.sizes()
        said = {name: (done.token_ids, done.logprobs) for name, done in said.items()}
        return {"said": said, "stats": dict(stats.values), "held": held}

    def state(self) -> dict[str, Tensor]:
        with self.memory.enter(Phase.SAVE):
            model = {name: tensor.clone() for name, tensor in self.worker.model_state().items()}
            return {**model, **full_moments(self.worker)}

    def close(self) -> None:
        self.memory.close()
        self.worker.close()


@pytest.fixture
def moving(folder: Path, tmp_path: Path) -> Iterator[Run]:
    run = Run(folder, EVERYTHING_MOVES, tmp_path / "moving.jsonl")
    yield run
    run.close()


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_training_with_everything_moved_in_every_step_is_bitwise_the_training_without(
    folder: Path, tmp_path: Path, moving: Run
) -> None:
    still = Run(folder, Schedule(), tmp_path / "still.jsonl", placement="device")
    for seed in range(3):
        one, other = still.step(seed), moving.step(seed)
        assert one["stats"] == other["stats"]
        assert one["said"] == other["said"]
        assert moving.worker.version == still.worker.version == 2 * (seed + 1)
    assert equal(still.state(), moving.state())
    still.close()


def test_what_is_away_has_no_byte_on_the_device_and_what_is_needed_has_all(moving: Run) -> None:
    params = 4 * sum(tensor.numel() for tensor in moving.worker.model_state().values())
    kv = moving.engine.kv_bytes
    moving.step(0)
    held = moving.step(1)["held"]
    whole = {
        names.ACTOR_PARAMETERS: params,
        names.OPTIMIZER_STATE: 2 * params,
        names.REFERENCE_PARAMETERS: params,
        names.ROLLOUT_PARAMETERS: params // 2,
        names.KV_CACHE: kv,
    }
    for phase, sizes in held.items():
        away, needed = EVERYTHING_MOVES.away(phase), EVERYTHING_MOVES.needs(phase)
        assert away
        assert {name: sizes[name] for name in away} == dict.fromkeys(away, 0)
        assert {name: sizes[name] for name in needed} == {name: whole[name] for name in needed}
        assert 3 * params <= sizes[names.HOST_ARENA] <= 3 * params * 1.01 + 64 * 1024
        assert sizes[names.ACTOR_GRADIENTS] == 0


def test_nothing_is_kept_on_the_host_before_something_has_to_go(moving: Run) -> None:
    before = host_buffer_bytes()
    assert names.HOST_ARENA not in moving.sizes()
    moving.step(0)
    moving.step(1)
    arena = moving.sizes()[names.HOST_ARENA]
    assert 0 < arena <= host_buffer_bytes() - before < arena + 2 * 4096  # whole pages for each of the two


def test_a_state_that_is_loaded_replaces_what_was_moved(folder: Path, tmp_path: Path, moving: Run) -> None:
    moving.step(0)
    with moving.memory.enter(Phase.SAVE):
        written = write_state(moving.worker, tmp_path / "state")
    counters = moving.worker.counters()
    other = Run(folder, EVERYTHING_MOVES, tmp_path / "other.jsonl")
    other.step(5)
    with other.memory.enter(Phase.SAVE):
        load_state(other.worker, written, counters)
        assert names.HOST_ARENA not in other.sizes()
    assert moving.step(1)["stats"] == other.step(1)["stats"]
    assert equal(moving.state(), other.state())
    with other.memory.enter(Phase.REFERENCE), pytest.raises(AssertionError, match="while the old one was away"):
        load_state(other.worker, written, counters)
    other.close()


def test_parameters_do_not_leave_with_gradients_alive(moving: Run) -> None:
    moving.step(0)
    with moving.memory.enter(Phase.SYNC):
        sync(moving.worker, moving.weights, moving.engine)
    for parameter in moving.worker.lm.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(AssertionError, match="have gradients"), moving.memory.enter(Phase.ROLLOUT):
        pytest.fail("it was entered")


def test_gathered_parameters_are_freed_before_the_shards_leave(moving: Run) -> None:
    moving.step(0)
    with moving.memory.enter(Phase.SYNC):
        sync(moving.worker, moving.weights, moving.engine)
        shards = {id(parameter) for parameter in moving.worker.policy.parameters()}
        moving.worker.policy.unshard()  # pyright: ignore[reportCallIssue]
        moving.worker.lm.get_decoder().layers[1].unshard()
        assert {id(parameter) for parameter in moving.worker.policy.parameters()} != shards
    with moving.memory.enter(Phase.ROLLOUT):
        assert {id(parameter) for parameter in moving.worker.policy.parameters()} == shards


def moments_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


class Held:
    """A writer that begins when it is told to, as on a disk that is busy."""

    def __init__(self, writer: ShardWriter, begin: threading.Event) -> None:
        self._writer, self._begin = writer, begin
        self.tensors_read, self.plan = writer.tensors_read, writer.plan
        self.stop, self.check = writer.stop, writer.check

    def run(self) -> None:
        assert self._begin.wait(20)
        self._writer.run()


def test_an_eviction_waits_for_the_save_that_still_reads_what_would_leave(moving: Run, tmp_path: Path) -> None:
    moving.step(0)
    expected = moving.state()
    store = CheckpointStore(tmp_path / "checkpoints", keep=None)
    moving.saver, begin = TrainingSaver(store), threading.Event()

    def prepare(partial: Path) -> Held:
        folders = StateFolders(model=partial / MODEL, optimizer=partial / OPTIMIZER, tokenizer=tmp_path)
        return Held(moving.worker.state_writer(folders, budget_bytes=1 << 20), begin)

    with moving.memory.enter(Phase.SAVE):
        moving.saver.save(training_state(step=1), prepare, background=True)
    threading.Timer(0.2, begin.set).start()
    assert not begin.is_set()
    with moving.memory.enter(Phase.REFERENCE):  # moments and parameters leave
        assert begin.is_set()
        assert moving.sizes()[names.ACTOR_PARAMETERS] == 0
    path = moving.saver.finish()
    assert path is not None
    stored = {**load_file(path / MODEL / "model.safetensors"), **moments_of(path / OPTIMIZER)}
    assert equal(stored, expected)


# ── the mover itself ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_mover_follows_tensors_that_come_later_and_others_that_take_their_place() -> None:
    held: list[Tensor] = []
    mover = HostMover("moments", lambda: held, CPU)
    assert mover.evict() == 0  # there are none yet
    assert not mover.present
    assert mover.admit() == 0
    assert mover.host_bytes == 0
    for tensors in ([torch.randn(100)], [torch.randn(100), torch.randn(50)], [torch.randn(7)]):
        held[:] = tensors
        kept = [tensor.clone() for tensor in held]
        size = sum(tensor.nbytes for tensor in kept)
        assert mover.evict() == size
        assert mover.evict() == 0
        assert [tensor.untyped_storage().nbytes() for tensor in held] == [0] * len(held)
        assert size <= mover.host_bytes < size + 64 * len(kept)
        assert mover.admit() == size
        assert mover.admit() == 0
        assert all(torch.equal(a, b) for a, b in zip(held, kept, strict=True))
    mover.close()
    assert mover.host_bytes == 0
    assert mover.evict() == held[0].nbytes == mover.admit()


def test_without_room_on_the_host_nothing_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(100)
    kept = tensor.clone()
    mover = HostMover("actor", lambda: [tensor], CPU)

    def no_room(*_: Any, **__: Any) -> Any:
        raise RunError("no host memory")

    monkeypatch.setattr(movers, "HostArena", no_room)
    with pytest.raises(RunError, match="no host memory"):
        mover.evict()
    assert mover.present
    assert torch.equal(tensor, kept)
    monkeypatch.undo()
    assert mover.evict() == tensor.numel() * 4
