"""The border on a GPU: what leaves is really given back to the driver, and comes back as it was."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from plimsoll.memory import names
from plimsoll.memory.device import CudaDevice
from plimsoll.memory.enter import Memory
from plimsoll.memory.phases import Phase
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.release import release_device_cache
from plimsoll.memory.resident import Resident
from plimsoll.memory.schedule import Schedule
from plimsoll.parallel.mesh import close_process_group
from plimsoll.plane.local import LocalPlane
from plimsoll.rollout.movers import kv_resident
from plimsoll.rollout.native import NativeEngine
from plimsoll.sync.inprocess import RolloutWeights, sync
from plimsoll.update.worker import PolicyWorker
from plimsoll.weights.registered import registered_bytes
from tests.unit.update.support import full_moments, make_batch, make_groups, make_plan, make_recipe, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
MIB = 1024**2
SLACK = 128 * MIB
"""Segments of the allocator that something small still lies in."""

TRAINER = frozenset({names.ACTOR_PARAMETERS, names.OPTIMIZER_STATE})
ENGINE = frozenset({names.ROLLOUT_PARAMETERS, names.KV_CACHE})
REFERENCE = frozenset({names.REFERENCE_PARAMETERS})
MOVES = Schedule(
    evicted={
        Phase.ROLLOUT: TRAINER | REFERENCE,
        Phase.REFERENCE: ENGINE | TRAINER,
        Phase.UPDATE: ENGINE | REFERENCE,
        Phase.SYNC: frozenset({names.KV_CACHE, names.OPTIMIZER_STATE}) | REFERENCE,
        Phase.EXPORT: ENGINE | REFERENCE | {names.OPTIMIZER_STATE},
        Phase.SAVE: ENGINE | REFERENCE,
    }
)


@pytest.fixture(autouse=True, scope="module")
def _group() -> Any:
    yield
    close_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """113 M parameters: 430 MiB in float32."""
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=14,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return save(Qwen2ForCausalLM(config), tmp_path_factory.mktemp("model"))


class Run:
    """Trainer, reference and native engine on one GPU."""

    def __init__(self, folder: Path, schedule: Schedule, log: Path, placement: str) -> None:
        self.plane, self.log = LocalPlane(), log
        recipe = make_recipe(
            folder,
            model={"dtype": "float32", "reference_placement": placement},
            algorithm={"kl_coefficient": 0.1},
            train={"learning_rate": 1e-4},
        )
        plan = make_plan(device="cuda", compute_dtype="bfloat16", packing="padded")
        self.worker = PolicyWorker(recipe, plan, self.plane)
        self.weights = RolloutWeights(self.worker, torch.bfloat16)
        self.engine = NativeEngine(self.weights.model, num_slots=64, slot_tokens=512, prefill_tokens=64)
        self.device = CudaDevice(CUDA)
        self.memory = Memory(
            Recorder(log, rank=0, device=self.device, residents=self.residents, interval=1.0),
            residents=self.residents,
            schedule=schedule,
            policy_version=lambda: self.worker.version,
            release=lambda: release_device_cache(CUDA),
        )

    def residents(self) -> list[Resident]:
        return [*self.worker.residents(), *self.weights.residents(), kv_resident(self.engine, None)]

    def sizes(self) -> dict[str, int]:
        return {each.name: each.measured() for each in self.residents()}

    def step(self, seed: int) -> dict[str, float]:
        batch = make_batch(make_groups(self.plane, seed=seed))
        with self.memory.enter(Phase.SYNC):
            sync(self.worker, self.weights, self.engine)
        with self.memory.enter(Phase.ROLLOUT):
            pass
        with self.memory.enter(Phase.REFERENCE):
            self.worker.score(batch, old=False, reference=True)
        self.worker.advantages(batch)
        with self.memory.enter(Phase.UPDATE):
            return dict(self.worker.update(batch).values)

    def state(self) -> dict[str, Tensor]:
        with self.memory.enter(Phase.SAVE):
            model = {name: tensor.clone() for name, tensor in self.worker.model_state().items()}
            return {**model, **full_moments(self.worker)}

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def close(self) -> None:
        self.memory.close()
        self.worker.close()


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(schedule: Schedule, placement: str) -> Run:
        made.append(Run(folder, schedule, tmp_path / f"{len(made)}.jsonl", placement))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_the_driver_gets_back_the_bytes_of_everything_that_leaves(run: Callable[..., Run]) -> None:
    registered = registered_bytes()
    moving = run(MOVES, "arena")
    moving.step(0)
    params = 4 * sum(parameter.numel() for parameter in moving.worker.lm.parameters())
    assert params > 400 * MIB
    with moving.memory.enter(Phase.SAVE):
        with_both, held = moving.device.read(), moving.sizes()
    assert held[names.ACTOR_PARAMETERS] == params
    assert held[names.OPTIMIZER_STATE] == 2 * params
    with moving.memory.enter(Phase.EXPORT):  # the moments leave
        without_moments = moving.device.read()
    assert with_both.used - without_moments.used >= 2 * params - SLACK
    with moving.memory.enter(Phase.SAVE):
        again = moving.device.read()
    assert again.used - without_moments.used >= 2 * params - SLACK
    with moving.memory.enter(Phase.SYNC):
        sync(moving.worker, moving.weights, moving.engine)
    with moving.memory.enter(Phase.ROLLOUT):  # the whole trainer is away; the engine is there
        rollout, sizes = moving.device.read(), moving.sizes()
        assert all(sizes[name] == 0 for name in TRAINER | REFERENCE)
        engine = sizes[names.ROLLOUT_PARAMETERS] + sizes[names.KV_CACHE]
        assert rollout.allocated <= engine + SLACK
        assert rollout.reserved <= engine + 2 * SLACK
    exact = 3 * params + sizes["reference_arena"]
    assert exact <= registered_bytes() - registered <= 1.01 * exact + MIB


@pytest.mark.parametrize("placement", ["device", "arena", "page_cache", "ring"])
def test_what_comes_back_is_bitwise_what_left(run: Callable[..., Run], placement: str) -> None:
    moving = run(MOVES, placement)
    moving.step(0)
    batch = make_batch(make_groups(moving.plane, seed=9))
    states: list[dict[str, Tensor]] = []
    scores: list[Tensor] = []
    for _ in range(3):
        states.append(moving.state())
        with moving.memory.enter(Phase.SYNC):
            sync(moving.worker, moving.weights, moving.engine)
        with moving.memory.enter(Phase.ROLLOUT):
            full = torch.full((256 * MIB,), 7.0, device=CUDA)  # into the memory that was freed
            del full
        with moving.memory.enter(Phase.REFERENCE):
            moving.worker.score(batch, old=False, reference=True)
        scores.append(torch.cat([moving.plane.get(sample.ref, "ref_logprobs") for sample in batch.samples()]).clone())
    assert len(states[0]) == 4 * len(moving.worker.model_state())
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in states[0])
    assert all(torch.equal(score, scores[0]) for score in scores)
    before = states[0]
    moving.step(1)  # and training goes on with it
    assert any(not torch.equal(tensor, before[name]) for name, tensor in moving.state().items())


def test_later_cycles_leave_nothing_behind(run: Callable[..., Run]) -> None:
    moving = run(MOVES, "ring")
    used: list[int] = []
    for seed in range(5):
        moving.step(seed)
        used.append(next(row["device_used"] for row in reversed(moving.rows()) if row["phase"] == "rollout"))
    assert max(used[1:]) - min(used[1:]) <= SLACK
    borders = [row for row in moving.rows() if row["phase"] == "rollout"]
    assert all(row["evicted"] > 0 for row in borders)
