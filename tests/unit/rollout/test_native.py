"""The engine against transformers itself: the same tokens, the same log-probabilities, whatever the schedule."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from plimsoll.errors import RunError
from plimsoll.rollout.native import NativeEngine
from plimsoll.types import Completion, FinishReason, Request, SampleId
from tests import tiny
from tests.unit.rollout.requests import drain, request, sample_id

Build = Callable[..., PreTrainedModel]
families = pytest.mark.parametrize("build", tiny.FAMILIES.values(), ids=tiny.FAMILIES.keys())


def _prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]


def _engine(model: PreTrainedModel, num_slots: int = 3, slot_tokens: int = 48, prefill: int = 32) -> NativeEngine:
    return NativeEngine(model, num_slots=num_slots, slot_tokens=slot_tokens, prefill_tokens=prefill)


def _check_logprobs(model: PreTrainedModel, asked: Request, done: Completion, *, atol: float = 1e-5) -> None:
    """Against one plain forward pass over the whole sequence, with transformers' own attention."""
    ids = torch.tensor([[*asked.token_ids, *done.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(asked.token_ids) - 1 : -1].float()
    expected = (logits / asked.params.temperature).log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])
    torch.testing.assert_close(torch.tensor(done.logprobs), expected[:, 0], atol=atol, rtol=0)


@families
def test_greedy_equals_generate(build: Build):
    prompts, reference = _prompts(1, 5, 12, 7, 20), build()
    engine = _engine(build())
    finished = drain(engine, [request(i, p, temperature=0.0, max_tokens=16) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = reference.generate(  # pyright: ignore[reportCallIssue]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(finished[sample_id(i)].token_ids) == expected[0, len(prompt) :].tolist()
        assert finished[sample_id(i)].finish_reason is FinishReason.LENGTH


@families
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_full_forward(build: Build, temperature: float):
    asked = [
        request(i, p, index=k, temperature=temperature, max_tokens=12)
        for i, p in enumerate(_prompts(1, 13, 6))
        for k in range(3)
    ]
    finished, reference = drain(_engine(build(), num_slots=4), asked), build()
    for each in asked:
        _check_logprobs(reference, each, finished[each.sample_id])
    assert len({done.token_ids for done in finished.values()}) == len(asked)


def test_sample_does_not_depend_on_order_slots_or_company():
    asked = [request(i, p, index=k, max_tokens=10 + i) for i, p in enumerate(_prompts(4, 9, 9, 15)) for k in range(4)]
    everything = drain(_engine(tiny.qwen2(), num_slots=5), asked)
    half = list(reversed(asked[1::2]))
    again = drain(_engine(tiny.qwen2(), num_slots=3, slot_tokens=40, prefill=1), half)
    assert len(again) == 8
    for name, done in again.items():
        assert done.token_ids == everything[name].token_ids
        torch.testing.assert_close(
            torch.tensor(done.logprobs), torch.tensor(everything[name].logprobs), atol=1e-5, rtol=0
        )


def test_the_same_work_again_is_bit_equal():
    engine = _engine(tiny.qwen2(), num_slots=5)
    asked = [request(i, p, index=k) for i, p in enumerate(_prompts(4, 9)) for k in range(4)]
    assert drain(engine, asked) == drain(engine, asked) == drain(_engine(tiny.qwen2(), num_slots=5), asked)


def test_late_requests_join_and_idle_rows_between_do_no_harm():
    limits = (1, 14, 9)
    short, long, late = (request(i, p, max_tokens=limits[i]) for i, p in enumerate(_prompts(5, 6, 7)))
    alone = drain(_engine(tiny.gemma3()), [short, long, late])
    engine, finished = _engine(tiny.gemma3()), dict[SampleId, Completion]()
    engine.add([short, long])
    for _ in range(4):
        finished |= {done.sample_id: done for done in engine.step()}
    finished |= drain(engine, [late])
    assert {name: done.token_ids for name, done in finished.items()} == {n: d.token_ids for n, d in alone.items()}


def test_a_tail_of_long_sequences_moves_to_low_slots_unchanged():
    asked = [request(i, p, max_tokens=2 if i < 6 else 20 + i) for i, p in enumerate(_prompts(*range(3, 11)))]
    engine = _engine(tiny.qwen2(), num_slots=8)
    finished = drain(engine, asked)
    alone = {each.sample_id: drain(_engine(tiny.qwen2(), num_slots=1), [each])[each.sample_id] for each in asked}
    assert {n: d.token_ids for n, d in finished.items()} == {n: d.token_ids for n, d in alone.items()}


def test_stop_tokens_end_a_response_and_are_part_of_it():
    free = drain(_engine(tiny.qwen2()), [request(0, [5, 6, 7], max_tokens=12)])[sample_id(0)]
    first, second = free.token_ids[3], free.token_ids[6]
    cut = min(free.token_ids.index(first), free.token_ids.index(second)) + 1
    asked = [
        request(0, [5, 6, 7], max_tokens=12, stop=(second, first)),
        request(1, [5, 6, 7], max_tokens=12),
        request(2, [5, 6, 7], max_tokens=12, stop=(61,)),
    ]
    finished = drain(_engine(tiny.qwen2()), asked)
    assert finished[sample_id(0)].token_ids == free.token_ids[:cut]
    assert finished[sample_id(0)].logprobs == pytest.approx(free.logprobs[:cut], abs=1e-5)
    assert finished[sample_id(0)].finish_reason is FinishReason.STOP
    assert len(finished[sample_id(1)].token_ids) == 12


def test_a_stop_token_as_the_last_allowed_token_is_a_stop():
    free = drain(_engine(tiny.qwen2()), [request(0, [5, 6, 7], max_tokens=1)])[sample_id(0)]
    assert (len(free.token_ids), free.finish_reason) == (1, FinishReason.LENGTH)
    done = drain(_engine(tiny.qwen2()), [request(0, [5, 6, 7], max_tokens=1, stop=free.token_ids)])[sample_id(0)]
    assert (done.token_ids, done.finish_reason) == (free.token_ids, FinishReason.STOP)


def test_evaluation_may_truncate_row_by_row():
    prompt = _prompts(6)[0]
    asked = [
        request(0, prompt, temperature=0.0),
        request(1, prompt, temperature=5.0, top_k=1),
        request(2, prompt, temperature=5.0, top_p=1e-6),
        request(3, prompt, temperature=5.0),
    ]
    finished = drain(_engine(tiny.qwen2(), num_slots=4), asked)
    greedy = finished[sample_id(0)]
    assert finished[sample_id(1)].token_ids == finished[sample_id(2)].token_ids == greedy.token_ids
    assert set(finished[sample_id(1)].logprobs) == set(greedy.logprobs) == {0.0}
    _check_logprobs(tiny.qwen2(), asked[3], finished[sample_id(3)])


def test_abort_returns_what_there_is_and_the_rest_goes_on():
    asked = [request(i, p, max_tokens=9) for i, p in enumerate(_prompts(4, 5, 6, 7))]
    whole = drain(_engine(tiny.qwen2()), asked)
    engine = _engine(tiny.qwen2())
    engine.add(asked)
    for _ in range(4):
        assert engine.step() == []
    taken = engine.abort([sample_id(3), sample_id(1), sample_id(99)])  # active in slot 1, queued, never heard of
    assert [(c.sample_id, len(c.token_ids), c.finish_reason) for c in taken] == [
        (sample_id(1), 4, FinishReason.ABORT),
        (sample_id(3), 0, FinishReason.ABORT),
    ]
    assert taken[0].token_ids == whole[sample_id(1)].token_ids[:4]
    finished = drain(engine, [asked[1]])
    assert {name: done.token_ids for name, done in finished.items()} == {
        sample_id(i): whole[sample_id(i)].token_ids for i in (0, 1, 2)
    }
    assert engine.abort() == []


def test_a_partial_output_goes_on_as_if_it_had_not_been_taken_back():
    asked = request(0, [9, 8, 7], max_tokens=10)
    whole = drain(_engine(tiny.qwen2()), [asked])[sample_id(0)]
    engine = _engine(tiny.qwen2())
    engine.add([asked])
    for _ in range(4):
        engine.step()
    (part,) = engine.abort()
    rest = drain(engine, [request(0, [9, 8, 7, *part.token_ids], max_tokens=6)])[sample_id(0)]
    assert part.token_ids + rest.token_ids == whole.token_ids


def test_new_weights_change_noise_and_forget_prompts_and_restart_what_is_unfinished():
    asked = [request(0, [4, 5, 6, 7], index=k, max_tokens=6) for k in range(3)]
    model = tiny.qwen2()
    engine = _engine(model, num_slots=2)
    before = drain(engine, asked[:1])
    engine.set_version(1)
    assert drain(engine, asked[:1])[sample_id(0)].token_ids != before[sample_id(0)].token_ids  # noise alone
    engine.add(asked)
    engine.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    engine.set_version(2)
    finished = drain(engine)
    other = tiny.qwen2()
    other.load_state_dict(model.state_dict())
    fresh = _engine(other)
    fresh.set_version(2)
    expected = drain(fresh, asked)
    assert {n: (d.token_ids, d.version) for n, d in finished.items()} == {
        n: (d.token_ids, 2) for n, d in expected.items()
    }
    for each in asked:
        reference = tiny.qwen2()
        reference.load_state_dict(model.state_dict())
        _check_logprobs(reference, each, finished[each.sample_id])


def test_samples_of_a_group_share_one_prefill(monkeypatch: pytest.MonkeyPatch):
    model, seen = tiny.qwen2(), list[tuple[int, ...]]()
    engine = _engine(model, num_slots=2)
    forward = model.base_model.forward

    def watch(**kwargs: torch.Tensor):
        seen.append(tuple(kwargs["input_ids"].shape))
        return forward(**kwargs)

    monkeypatch.setattr(model.base_model, "forward", watch)
    asked = [request(0, [4, 5, 6, 7, 8], index=k, max_tokens=2 + k % 3) for k in range(6)]
    finished = drain(engine, asked)
    assert [shape for shape in seen if shape[1] > 1] == [(1, 4)]
    for each in asked:
        _check_logprobs(tiny.qwen2(), each, finished[each.sample_id])
    # An idle engine keeps nothing: what a resumed run computes must not depend on rounds that it has not seen.
    drain(engine, asked)
    assert [shape for shape in seen if shape[1] > 1] == [(1, 4)] * 2


def test_nothing_is_inherited_from_the_generation_config():
    model = tiny.qwen2(vocab=4, tied=False)
    assert model.generation_config is not None
    model.generation_config.top_k = 2
    model.generation_config.repetition_penalty = 1.05
    with torch.no_grad():  # logits [2, 1, 0, -1] everywhere: the final norm makes hidden states of known size
        model.lm_head.weight.zero_()  # pyright: ignore
        bias = torch.nn.Parameter(torch.tensor([2.0, 1.0, 0.0, -1.0]))
    model.lm_head.bias = bias  # pyright: ignore
    asked = [request(0, [0, 1], index=k, max_tokens=4) for k in range(200)]
    finished = drain(_engine(model, num_slots=200), asked)
    drawn = [(t, p) for done in finished.values() for t, p in zip(done.token_ids, done.logprobs, strict=True)]
    expected = {0: -0.44019, 1: -1.44019, 2: -2.44019, 3: -3.44019}
    assert {t for t, _ in drawn} == set(expected)
    for token, logprob in drawn:
        assert logprob == pytest.approx(expected[token], abs=1e-5)
    share = sum(t == 0 for t, _ in drawn) / len(drawn)
    assert share == pytest.approx(0.6439, abs=0.06)  # e^-0.44019; 3.5 standard deviations of 800 draws


def test_bf16_model_runs_and_agrees_with_its_own_forward():
    model = tiny.llama(dtype=torch.bfloat16)
    asked = [request(i, p, max_tokens=12) for i, p in enumerate(_prompts(3, 11))]
    engine = _engine(model)
    finished = drain(engine, asked)
    assert engine.kv_bytes == 3 * 48 * 2 * 2 * 2 * 8 * 2  # slots, tokens, layers, K and V, heads, head size, bytes
    for each in asked:
        _check_logprobs(tiny.llama(dtype=torch.bfloat16), each, finished[each.sample_id], atol=0.02)


def test_parameters_stay_trainable_after_generation():
    model = tiny.qwen2()
    drain(_engine(model), [request(0, [4, 5, 6])])
    twin = tiny.qwen2()
    for parameter, mine in zip(twin.parameters(), model.parameters(), strict=True):
        parameter.data = mine.data  # the same storage, as the sync stage gives it to the engine
    twin(input_ids=torch.tensor([[4, 5, 6]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())


def test_a_model_built_from_the_same_config_keeps_its_own_attention():
    engine_model = tiny.qwen2()
    policy = type(engine_model)(engine_model.config)
    policy.load_state_dict(engine_model.state_dict())
    before = policy.config._attn_implementation
    finished = drain(_engine(engine_model), [request(0, [4, 5, 6])])
    assert policy.config._attn_implementation == before
    _check_logprobs(policy, request(0, [4, 5, 6]), finished[sample_id(0)])


def test_broken_weights_are_reported_not_sampled():
    model = tiny.qwen2()
    engine = _engine(model)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    engine.add([request(4, [4, 5, 6])])
    with pytest.raises(RunError, match=r"sample 0:4:0: the model's logits are not finite at policy version 0"):
        engine.step()
