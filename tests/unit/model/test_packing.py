"""Packed rows give every sequence what it gets alone, and the probe notices when they do not."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from plimsoll.errors import RefusedError
from plimsoll.model import attention
from plimsoll.model.policy import PackedPolicy
from plimsoll.model.probe import ProbeReport, probe
from plimsoll.model.rows import PackedRows, pack_rows
from plimsoll.model.spec import decoder_layers, model_spec
from tests import tiny

CPU = torch.device("cpu")


def policy_of(lm: PreTrainedModel, packing: str = "padded") -> PackedPolicy:
    return PackedPolicy(lm, model_spec(lm), packing=packing, chunk=4)


def rows_of(ids: list[Tensor]) -> PackedRows:
    return pack_rows(ids, [torch.arange(len(row)) > 0 for row in ids], CPU)


def run_probe(policy: PackedPolicy, requested: str = "auto") -> ProbeReport:
    return probe(policy, requested=requested, vocab=64, dtype=torch.float32, device=CPU, temperature=0.8)


def test_the_worked_example_of_packed_rows() -> None:
    sampled = [torch.tensor([False, True, True]), torch.tensor([False, True])]
    rows = pack_rows([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], sampled, CPU)
    assert rows.token_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert rows.predicted.tolist() == [1, 2, 4]
    assert rows.sources.tolist() == [0, 1, 3]
    assert rows.sequence_index.tolist() == [0, 0, 1]
    assert rows.cu_seqlens.tolist() == [0, 3, 5]
    assert rows.gather is not None
    assert rows.gather.tolist() == [0, 1, 2, 3, 4, 4]
    assert rows.scatter is not None
    assert rows.scatter.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_packed_log_probs_equal_those_of_right_padded_rows(family: str) -> None:
    """Absolute positions (gpt2) and windows shorter than the rows (gemma3) included."""
    torch.manual_seed(3)
    lm = tiny.FAMILIES[family](seed=2)
    ids = [torch.randint(3, 64, (length,)) for length in (20, 4, 11)]
    padded, mask = torch.zeros(3, 20, dtype=torch.int64), torch.zeros(3, 20, dtype=torch.int64)
    for i, row in enumerate(ids):
        padded[i, : len(row)], mask[i, : len(row)] = row, 1
    with torch.no_grad():
        logp = lm(padded, attention_mask=mask).logits.log_softmax(-1)
        got, _ = policy_of(lm)(rows_of(ids), temperature=1.0)
    want = torch.cat([logp[i, : len(row) - 1].gather(1, row[1:, None]).squeeze(1) for i, row in enumerate(ids)])
    assert (got - want).abs().max() < 1e-6


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_probe_accepts_every_family(family: str) -> None:
    report = run_probe(policy_of(tiny.FAMILIES[family](seed=2)))
    assert report.packing == "padded"
    assert report.leak == 0.0
    assert report.head_difference < 1e-5


def leaking(real: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that lets the second sequence see the first one, as recurrent layers do over packed rows."""

    def attend(module: Any, query: Tensor, *args: Any, packed: PackedRows, **kwargs: Any) -> Any:
        out, none = real(module, query, *args, packed=packed, **kwargs)
        first = packed.lengths[0]
        carried = out[:, :first].mean(1, keepdim=True)
        return torch.cat([out[:, :first], out[:, first:] + carried], dim=1), none

    return attend


def forgetful(real: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that treats each token as a sequence of its own: no leak, and still wrong."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2), None

    return attend


@pytest.fixture
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    table = attention.AttentionInterface._global_mapping
    monkeypatch.setitem(table, attention.PADDED, request.param(attention.padded_attention))


@pytest.mark.parametrize(
    ("broken", "reason"), [(leaking, "neighbour"), (forgetful, "between packed and alone")], indirect=["broken"]
)
@pytest.mark.usefixtures("broken")
def test_packing_that_goes_wrong_falls_back_when_automatic_and_is_refused_when_asked_for(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = policy_of(tiny.qwen2(seed=2))
    with caplog.at_level(logging.WARNING):
        report = run_probe(policy)
    assert report.packing == policy.packing == "single"
    assert [reason in record.message for record in caplog.records] == [True]
    with pytest.raises(RefusedError, match=rf"model\.packing=padded.*{reason}"):
        run_probe(policy_of(tiny.qwen2(seed=2)), requested="padded")


def test_a_head_that_changes_its_logits_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.qwen2(seed=2)
    plain = lm.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    monkeypatch.setattr(lm, "forward", scaled)
    with pytest.raises(RefusedError, match="Qwen2ForCausalLM"):
        run_probe(policy_of(lm))


def test_a_soft_cap_on_the_logits_is_reproduced() -> None:
    lm = tiny.gemma3(seed=2)
    lm.config.final_logit_softcapping = 0.05
    assert run_probe(policy_of(lm)).head_difference < 1e-5
    lm.config.final_logit_softcapping = None
    uncapped = policy_of(lm)(rows_of([torch.arange(9)]), temperature=1.0)[0]
    lm.config.final_logit_softcapping = 0.05
    capped = policy_of(lm)(rows_of([torch.arange(9)]), temperature=1.0)[0]
    assert (uncapped - capped).abs().max() > 1e-3


def test_recurrent_layers_are_named_as_unpackable() -> None:
    lm = tiny.qwen2()
    lm.config.layer_types = ["full_attention", "linear_attention"]
    assert model_spec(lm).unpackable == ("linear_attention",)


def test_scores_that_the_kernel_does_not_apply_are_refused() -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RefusedError, match=r"softcap.*model\.packing=single"):
        attention.padded_attention(
            torch.nn.Identity(), states, states, states, None, packed=rows_of([torch.arange(3)]), softcap=30.0
        )


def test_layers_are_found_in_every_family() -> None:
    assert {len(decoder_layers(make())) for make in tiny.FAMILIES.values()} == {2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 4])
def test_the_variable_length_kernel_equals_padding_inside_attention(window: int | None) -> None:
    torch.manual_seed(0)
    rows = pack_rows(
        [torch.arange(n) for n in (9, 3, 6)], [torch.arange(n) > 0 for n in (9, 3, 6)], torch.device("cuda")
    )
    query = torch.randn(1, 4, 18, 16, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(1, 2, 18, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ours, _ = attention.varlen_attention(
        torch.nn.Identity(), query, key, value, None, packed=rows, sliding_window=window
    )
    padded, _ = attention.padded_attention(
        torch.nn.Identity(), query, key, value, None, packed=rows, sliding_window=window
    )
    torch.testing.assert_close(ours, padded, atol=2e-2, rtol=0)
