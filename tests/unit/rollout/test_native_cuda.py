"""The engine on a GPU: the same samples as on the CPU, and one wait for the device a step."""

import warnings

import pytest
import torch

from plimsoll.rollout.native import NativeEngine
from plimsoll.types import Request
from tests import tiny
from tests.unit.rollout.requests import drain, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _asked(count: int = 12, max_tokens: int = 12) -> list[Request]:
    return [
        request(i, range(3, 4 + (5 * i) % 17), index=k, max_tokens=max_tokens) for i in range(count) for k in range(3)
    ]


def _engine(family: str, device: str, dtype: torch.dtype = torch.float32, num_slots: int = 7) -> NativeEngine:
    model = tiny.FAMILIES[family](dtype=dtype).to(device)  # pyright: ignore[reportArgumentType]
    return NativeEngine(model, num_slots=num_slots, slot_tokens=48, prefill_tokens=64)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_samples_equal_those_of_the_cpu(family: str):
    here, there = drain(_engine(family, "cuda"), _asked()), drain(_engine(family, "cpu"), _asked())
    assert {name: done.token_ids for name, done in here.items()} == {n: d.token_ids for n, d in there.items()}
    for name, done in here.items():
        assert done.logprobs == pytest.approx(there[name].logprobs, abs=1e-4)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bf16_logprobs_are_near_those_of_a_plain_forward(family: str):
    finished = drain(_engine(family, "cuda", torch.bfloat16), _asked())
    model = tiny.FAMILIES[family](dtype=torch.bfloat16).to("cuda")  # pyright: ignore[reportArgumentType]
    for each in _asked():
        done = finished[each.sample_id]
        ids = torch.tensor([[*each.token_ids, *done.token_ids]], device="cuda")
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(each.token_ids) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids, device="cuda")[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), chosen.cpu(), atol=0.03, rtol=0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_wait_for_the_device_a_step(family: str):
    engine = _engine(family, "cuda", num_slots=12)
    engine.add(_asked(4, max_tokens=8))
    engine.step()  # admission and warm-up
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")  # switching the mode on warns too: it is a prototype
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(5):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in seen if "synchronizing CUDA operation" in str(w.message)]
    assert len(waits) == 5
