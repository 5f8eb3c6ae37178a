"""vLLM itself in this process, over a tiny random model: needs a GPU and the extra."""

import logging
import os
import random
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from plimsoll.cluster.engine_environment import engine_environment
from plimsoll.config.extras import installed
from plimsoll.errors import RunError
from plimsoll.memory.allocator import AllocatorPolicy, TorchAllocator
from plimsoll.parallel.mesh import ensure_process_group
from plimsoll.rollout.vllm_engine import VllmEngine
from plimsoll.rollout.vllm_settings import VllmSettings
from plimsoll.sync.buckets import WeightBuckets
from plimsoll.sync.engine import send
from tests.unit.rollout.requests import drain, request, sample_id

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not installed("vllm"), reason="not installed: plimsoll-rl[vllm]"),
    pytest.mark.timeout(600),
    # Warnings of vLLM and of what it imports are not ours to mend.
    pytest.mark.filterwarnings("default"),
]

VOCAB, KV_BYTES, MIB = 500, 256 * 2**20, 2**20  # vLLM rounds the vocabulary up to 512
PROMPTS = [[3 + (7 * row + 5 * i) % 490 for i in range(20 + 9 * row)] for row in range(4)]


def policy(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 64
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,  # far apart, so that rounding does not choose the greedy token
        eos_token_id=2,
    )
    return Qwen2ForCausalLM(config).to("cuda", torch.float32).eval()


@dataclass
class Rig:
    engine: VllmEngine
    model: PreTrainedModel
    buckets: WeightBuckets
    states: tuple[object, ...]
    before: tuple[object, ...]

    def sync(self, version: int) -> int:
        return send(self.buckets, version, self.engine)

    def change(self, seed: int) -> None:
        self.model.load_state_dict(policy(seed).state_dict())


def globals_now() -> tuple[object, ...]:
    return (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        torch.cuda.get_rng_state().tolist(),
        torch.get_float32_matmul_precision(),
        torch.cuda.current_stream().cuda_stream,
    )


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "graphs"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """One engine a process: vLLM's pool is a singleton, so the second kind runs in a session of its own."""
    wanted = os.environ.get("PLIMSOLL_TEST_GRAPHS") == "1"
    if request.param is not wanted:
        pytest.skip("PLIMSOLL_TEST_GRAPHS=1 chooses the engine with CUDA graphs, otherwise it is the eager one")
    os.environ.update(engine_environment("vllm"))
    from plimsoll.rollout.vllm import build_vllm_engine

    ensure_process_group(torch.device("cuda"))
    model = policy(0)
    settings = VllmSettings(
        config=model.config.to_diff_dict(),
        architecture="Qwen2ForCausalLM",
        dtype="bfloat16",
        kv_bytes=KV_BYTES,
        slot_tokens=128,
        num_sequences=8,
        prefill_tokens=512,
        cuda_graphs=request.param,
        seed=1,
    )
    before = globals_now()
    guard = AllocatorPolicy(TorchAllocator()).guard_engine
    engine = build_vllm_engine(settings, tmp_path_factory.mktemp("engine"), guard=guard)
    return Rig(engine, model, WeightBuckets(model, torch.bfloat16, 64 * 1024), globals_now(), before)


def greedy(rig: Rig, version: int) -> list[tuple[int, ...]]:
    asked = [request(row, prompt, max_tokens=12, temperature=0.0) for row, prompt in enumerate(PROMPTS)]
    done = drain(rig.engine, asked)
    assert {completion.version for completion in done.values()} == {version}
    return [done[sample_id(row)].token_ids for row in range(len(PROMPTS))]


def logprobs_of(model: PreTrainedModel, prompt: list[int], answer: tuple[int, ...]) -> torch.Tensor:
    """[answer tokens, V], by transformers in bf16."""
    ids = torch.tensor([[*prompt, *answer]], device="cuda")
    with torch.no_grad():
        logits = model.to(torch.bfloat16)(ids).logits.float()
    model.float()
    return logits.log_softmax(-1)[0, len(prompt) - 1 : -1].cpu()


def check_greedy(rig: Rig, version: int) -> list[tuple[int, ...]]:
    """Each token is the best of transformers' too, or as good as it within bf16."""
    answers = greedy(rig, version)
    copy = policy(0)
    copy.load_state_dict(rig.model.state_dict())
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logprobs = logprobs_of(copy, prompt, answer)
        chosen = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (logprobs.max(-1).values - chosen).max() < 0.25
    return answers


def test_building_leaves_the_trainer_s_generators_precision_and_stream_alone(rig: Rig):
    assert rig.states == rig.before


def test_a_sync_does_not_warn_of_tables_and_tied_heads(rig: Rig):
    from vllm.model_executor.model_loader.reload import layerwise  # pyright: ignore[reportMissingImports]

    assert not layerwise.logger.isEnabledFor(logging.WARNING)
    assert layerwise.logger.isEnabledFor(logging.ERROR)


def test_a_whole_life(rig: Rig):
    engine = rig.engine
    engine.sleep(("kv_cache", "weights"))
    assert (engine.version, engine.weights_bytes, engine.kv_bytes) == (-1, 0, 0)
    asleep = torch.cuda.mem_get_info()[0]
    engine.wake(("weights",))
    sent = rig.sync(0)
    assert sent == sum(p.numel() * 2 for p in rig.model.parameters())
    engine.wake(("kv_cache",))
    assert engine.kv_bytes >= KV_BYTES * 0.9
    assert engine.memory()[1] == engine.weights_bytes + engine.kv_bytes
    first = check_greedy(rig, 0)

    for version in (1, 2, 3):
        engine.sleep(("kv_cache",))
        engine.sleep(("weights",))
        torch.cuda.empty_cache()
        assert abs(torch.cuda.mem_get_info()[0] - asleep) < 100 * MIB
        engine.wake(("weights",))
        rig.sync(version)
        engine.wake(("kv_cache",))
        assert check_greedy(rig, version) == first

    rig.change(seed=9)
    rig.sync(4)  # awake all through: the prefixes of the old weights must not be read
    assert check_greedy(rig, 4) != first


def test_log_probs_are_of_the_distribution_that_was_sampled_from(rig: Rig):
    rig.sync(5)
    done = drain(rig.engine, [request(0, PROMPTS[0], max_tokens=40, temperature=0.7)])[sample_id(0)]
    copy = policy(0)
    copy.load_state_dict(rig.model.state_dict())
    ids = torch.tensor([[*PROMPTS[0], *done.token_ids]], device="cuda")
    with torch.no_grad():
        logits = copy.to(torch.bfloat16)(ids).logits.float() / 0.7
    expected = logits.log_softmax(-1)[0, len(PROMPTS[0]) - 1 : -1].cpu()
    chosen = expected.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    assert (chosen - torch.tensor(done.logprobs)).abs().mean() < 0.1


def test_a_stop_id_ends_a_response_and_stays_in_it(rig: Rig):
    rig.sync(6)
    (greedy_ids, *_) = greedy(rig, 6)
    stop = greedy_ids[5]
    asked = request(0, PROMPTS[0], max_tokens=12, temperature=0.0, stop=(stop,))
    done = drain(rig.engine, [asked])[sample_id(0)]
    assert done.finish_reason == "stop"
    assert done.token_ids == greedy_ids[: greedy_ids.index(stop) + 1]
    assert done.logprobs == (0.0,) * len(done.token_ids)


def test_what_is_taken_back_comes_with_what_it_has_and_the_engine_can_sleep_at_once(rig: Rig):
    rig.sync(7)
    rig.engine.add([request(row, PROMPTS[0], max_tokens=60, index=1) for row in range(6)])
    for _ in range(10):
        rig.engine.step()
    (one,) = rig.engine.abort([sample_id(3, 1)])
    assert one.finish_reason == "abort"
    assert 0 < len(one.token_ids) == len(one.logprobs) < 60
    assert len(rig.engine.abort()) == 5
    assert rig.engine.idle
    rig.engine.sleep(("kv_cache",))
    rig.engine.wake(("kv_cache",))


def test_requests_run_from_another_thread(rig: Rig):
    rig.sync(8)
    expected = greedy(rig, 8)
    found: list[list[tuple[int, ...]]] = []
    stream = torch.cuda.current_stream().cuda_stream
    rig.sync(8)  # a prompt found in the cache is computed in other shapes
    thread = threading.Thread(target=lambda: found.append(greedy(rig, 8)))
    thread.start()
    thread.join()
    assert found == [expected]
    assert torch.cuda.current_stream().cuda_stream == stream


def test_an_unknown_and_a_missing_weight_are_errors(rig: Rig):
    rig.engine.begin(9)
    with pytest.raises(RunError, match="no place for a weight"):
        rig.engine.bucket([("model.layers.0.adapter.weight", torch.ones(2, device="cuda"))])
    for tensors, _ in rig.buckets():
        rig.engine.bucket([pair for pair in tensors if not pair[0].endswith("layers.1.self_attn.k_proj.weight")])
    with pytest.raises(RunError, match=r"has filled: .*layers\.1\.self_attn\.qkv_proj"):
        rig.engine.commit(9)
    assert rig.engine.version == -1
