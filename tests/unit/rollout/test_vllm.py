"""The engine over a fake of vLLM's: what it is asked, and what becomes of its answers."""

import math
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plimsoll.errors import RefusedError, RunError
from plimsoll.memory.plan.constants import DECODED_ROWS
from plimsoll.rollout.vllm_engine import VllmEngine, VllmParts
from plimsoll.rollout.vllm_memory import SleepPool
from plimsoll.rollout.vllm_settings import (
    MAX_SEQUENCES,
    VllmSettings,
    engine_arguments,
    request_seed,
    sampling_arguments,
    write_model_folder,
)
from plimsoll.types import ColocatedEngine, FinishReason
from tests.unit.rollout.requests import drain, request, sample_id
from tests.unit.rollout.test_vllm_memory import Memory


class Flat:
    """vLLM's FlatLogprobs: positions with a range of entries each."""

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.logprobs: list[float] = []

    def append(self, value: float) -> None:
        self.start_indices.append(len(self.logprobs))
        self.logprobs.append(value)


class FakeLlm:
    """LLMEngine: says 10, 11, 12, … for every request, two batches under way as with async scheduling."""

    def __init__(self) -> None:
        self.core = SimpleNamespace(batch_queue=deque())
        self.output_processor = SimpleNamespace(request_states={})
        self.requests: dict[str, Any] = {}
        self.prefix_resets = 0
        self.resettable = True
        self.aborted: list[str] = []
        self.nan = False

    def add_request(self, name: str, prompt: Any, params: Any) -> str:
        internal = f"{name}-x{len(self.requests)}"
        state = SimpleNamespace(
            detokenizer=SimpleNamespace(output_token_ids=[]), logprobs_processor=SimpleNamespace(logprobs=Flat())
        )
        self.output_processor.request_states[internal] = state
        self.requests[internal] = (name, prompt, params)
        return internal

    def step(self) -> list[Any]:
        if self.core.batch_queue:
            self.core.batch_queue.pop()
        states = self.output_processor.request_states
        if states:
            self.core.batch_queue.append("a batch ahead")
        finished: list[Any] = []
        for internal, state in list(states.items()):
            name, _, params = self.requests[internal]
            tokens = state.detokenizer.output_token_ids
            tokens.append(10 + len(tokens))
            state.logprobs_processor.logprobs.append(math.nan if self.nan else -0.5 * len(tokens))
            stopped = tokens[-1] in params["stop_token_ids"]
            if stopped or len(tokens) == params["max_tokens"]:
                del states[internal]
                answer = SimpleNamespace(
                    token_ids=tokens,
                    logprobs=state.logprobs_processor.logprobs,
                    finish_reason="stop" if stopped else "length",
                )
                finished.append(SimpleNamespace(request_id=name, finished=True, outputs=[answer]))
        return finished

    def abort_request(self, names: Sequence[str], internal: bool = False) -> None:
        assert internal
        for name in names:
            del self.output_processor.request_states[name]
        self.aborted += names

    def reset_prefix_cache(self) -> bool:
        self.prefix_resets += 1
        return self.resettable and not self.core.batch_queue


class FakeReload:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def begin(self) -> None:
        self.events.append("begin")

    def bucket(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.events.append([name for name, _ in tensors])

    def commit(self) -> None:
        self.events.append("commit")


class World:
    """An engine and what it stands on."""

    def __init__(self, *, seeded: bool = True) -> None:
        self.llm, self.reload, self.memory = FakeLlm(), FakeReload(), Memory()
        self.parameter = self.memory.add("weights", "parameter", [1] * 6)
        self.cache = self.memory.add("kv_cache", "cache", [2] * 4)
        self.entered: list[str] = []
        self.events: list[str] = []
        parts = VllmParts(
            llm=self.llm,
            core=self.llm.core,
            sampling_params=lambda **values: values,
            prompt=lambda ids: {"prompt_token_ids": ids},
            reload=self.reload,
            pool=SleepPool(self.memory.calls()),
            dropped=lambda part: [self.parameter if part == "weights" else self.cache],
            after_wake=lambda part: self.events.append(f"after {part}"),
            synchronize=lambda: self.events.append("synchronize"),
        )
        self.engine = VllmEngine(
            parts,
            slot_tokens=16,
            seeded=seeded,
            guard=lambda: self._entering("guard"),
            calls=lambda: self._entering("calls"),
        )

    @contextmanager
    def _entering(self, name: str) -> Generator[None]:
        self.entered.append(name)
        yield
        self.entered.append(f"/{name}")

    def sync(self, version: int) -> None:
        self.engine.begin(version)
        self.engine.bucket([("w", torch.ones(1))])
        self.engine.commit(version)


def test_ids_go_in_and_come_out_with_the_stop_token_and_its_log_prob():
    world = World()
    world.sync(3)
    protocol: ColocatedEngine = world.engine
    asked = [request(0, [1, 2], stop=(12,)), request(0, [1, 2], index=1, max_tokens=2)]
    finished = drain(protocol, asked)
    first, second = finished[sample_id(0)], finished[sample_id(0, 1)]
    assert (first.token_ids, first.logprobs, first.finish_reason) == ((10, 11, 12), (-0.5, -1.0, -1.5), "stop")
    assert (second.token_ids, second.logprobs, second.finish_reason) == ((10, 11), (-0.5, -1.0), "length")
    assert first.version == second.version == 3
    assert world.engine.idle
    assert [prompt for _, prompt, _ in world.llm.requests.values()] == [{"prompt_token_ids": [1, 2]}] * 2
    assert world.entered == ["guard", "calls", "/calls", "/guard"] * (len(world.entered) // 4)


def test_parameters_are_complete_and_nothing_is_left_to_defaults():
    world = World()
    world.sync(0)
    world.engine.add([request(0, [1], temperature=0.7, top_p=0.9, top_k=5, stop=(2, 7), seed=4)])
    ((_, _, params),) = world.llm.requests.values()
    seed = params.pop("seed")
    assert params == {
        "n": 1,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": 8,
        "min_tokens": 0,
        "stop_token_ids": [2, 7],
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 0,
        "flat_logprobs": True,
    }
    assert seed == request_seed(request(0, [1], seed=4), 0)


def test_noise_belongs_to_seed_version_group_and_sample():
    asked = [(request(0, [1]), 0), (request(0, [1]), 1), (request(1, [1]), 0), (request(0, [1], index=1), 0)]
    seeds = [request_seed(*one) for one in [*asked, (request(0, [1], seed=1), 0)]]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(request(0, [9, 9]), 0) == seeds[0]  # not on the prompt's text


def test_without_seeded_rows_the_engine_s_own_generator_is_used():
    world = World(seeded=False)
    world.sync(0)
    world.engine.add([request(0, [1])])
    ((_, _, params),) = world.llm.requests.values()
    assert params["seed"] is None


def test_greedy_tokens_are_certain():
    world = World()
    world.sync(0)
    done = drain(world.engine, [request(0, [1], temperature=0.0, max_tokens=2)])
    assert done[sample_id(0)].logprobs == (0.0, 0.0)


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_a_temperature_that_vllm_would_change_is_refused(temperature: float):
    with pytest.raises(RefusedError, match=r"0\.01 to 2; set rollout\.temperature"):
        sampling_arguments(request(0, [1], temperature=temperature).params, None)


@pytest.mark.parametrize(("prompt", "room"), [([1] * 9, 8), ([], 8), ([1], 0)])
def test_requests_that_do_not_fit_are_refused_and_none_is_queued(prompt: list[int], room: int):
    world = World()
    world.sync(0)
    with pytest.raises(RefusedError, match="sample 0:0:1"):
        world.engine.add([request(0, [1]), request(0, prompt, index=1, max_tokens=room)])
    assert world.engine.idle


def test_what_is_taken_back_comes_with_what_it_has():
    world = World()
    world.sync(2)
    world.engine.add([request(row, [1]) for row in range(3)])
    world.engine.step()
    world.engine.step()
    (one,) = world.engine.abort([sample_id(1), sample_id(55)])
    assert (one.sample_id, one.token_ids, one.logprobs) == (sample_id(1), (10, 11), (-0.5, -1.0))
    assert (one.finish_reason, one.version) == (FinishReason.ABORT, 2)
    assert [done.sample_id for done in world.engine.abort()] == [sample_id(0), sample_id(2)]
    assert world.engine.idle
    assert world.engine.abort() == []
    assert not world.llm.core.batch_queue  # nothing under way for requests that are gone
    assert world.llm.aborted == ["0:1:0-x1", "0:0:0-x0", "0:2:0-x2"]


def test_log_probs_that_are_not_numbers_end_the_run():
    world = World()
    world.sync(0)
    world.llm.nan = True
    world.engine.add([request(0, [1], max_tokens=1, temperature=0.0)])
    with pytest.raises(RunError, match="1 tokens with 1 log-probs, 1 of which are not numbers"):
        world.engine.step()


def test_a_cycle_of_sleep_wake_and_sync():
    world = World()
    engine = world.engine
    assert engine.version == -1
    assert engine.memory() == (10, 10)
    world.sync(0)
    drain(engine, [request(0, [1], max_tokens=2)])
    engine.sleep(("kv_cache",))
    assert (engine.version, engine.weights_bytes, engine.kv_bytes) == (0, 6, 0)
    engine.sleep(("weights",))
    assert (engine.version, engine.weights_bytes, engine.memory()) == (-1, 0, (10, 0))
    assert world.events == ["synchronize"] * 2
    with pytest.raises(AssertionError, match="weights are asleep"):
        engine.begin(1)
    engine.wake(("weights",))
    resets = world.llm.prefix_resets
    world.sync(1)
    assert world.llm.prefix_resets == resets + 1
    engine.wake(("kv_cache",))
    assert world.events[2:] == ["after weights", "after kv_cache"]
    assert world.reload.events == ["begin", ["w"], "commit"] * 2
    assert drain(engine, [request(0, [1], max_tokens=2)])[sample_id(0)].version == 1


def test_an_engine_that_is_busy_asleep_or_without_weights_is_not_used():
    world = World()
    with pytest.raises(AssertionError, match="without weights"):
        drain(world.engine, [request(0, [1])])
    world.engine.abort()
    world.sync(0)
    world.engine.add([request(0, [1])])
    for use in (lambda: world.engine.sleep(("weights",)), lambda: world.engine.begin(1)):
        with pytest.raises(AssertionError, match="unfinished requests"):
            use()
    world.engine.abort()
    world.engine.sleep(("kv_cache",))
    with pytest.raises(AssertionError, match="that sleeps"):
        drain(world.engine, [request(0, [1])])


def test_prefixes_that_stay_are_an_error_and_leave_no_version():
    world = World()
    world.llm.resettable = False
    world.engine.begin(4)
    with pytest.raises(RunError, match="did not forget its cached prefixes"):
        world.engine.commit(4)
    assert world.engine.version == -1


SETTINGS = VllmSettings(
    config={"model_type": "qwen2", "_name_or_path": "/somewhere", "hidden_size": 8},
    architecture="Qwen2ForCausalLM",
    dtype="bfloat16",
    kv_bytes=1 << 20,
    slot_tokens=64,
    num_sequences=5000,
    prefill_tokens=512,
    cuda_graphs=False,
    seed=3,
)


def test_the_engine_is_built_from_a_config_alone(tmp_path: Path):
    write_model_folder(tmp_path / "engine", SETTINGS)
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["config.json"]
    text = (tmp_path / "engine" / "config.json").read_text()
    assert '"Qwen2ForCausalLM"' in text
    assert "/somewhere" not in text
    arguments = engine_arguments(SETTINGS, tmp_path / "engine")
    assert arguments["kv_cache_memory_bytes"] == 1 << 20
    assert arguments["max_num_batched_tokens"] == arguments["max_num_seqs"] == 1024
    assert arguments["load_format"] == "dummy"
    assert arguments["enforce_eager"] is True


def test_the_plan_counts_with_as_many_sequences_as_the_engine_takes():
    assert MAX_SEQUENCES == DECODED_ROWS
