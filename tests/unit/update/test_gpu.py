"""bf16 compute over fp32 master weights, variable-length kernel: near the fp32 truth on unpacked rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from plimsoll.plane.local import LocalPlane
from plimsoll.update.construct import own_tensors
from plimsoll.update.report import StepReport
from plimsoll.update.worker import PolicyWorker
from tests import tiny
from tests.unit.update import reference
from tests.unit.update.support import MAX_RESPONSE, make_batch, make_groups, make_plan, make_recipe, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("train", [{}, {"compile": True}], ids=["eager", "compiled"])
def test_bf16_packed_rows_on_a_gpu_give_nearly_the_plain_gradient(
    family: str, train: dict[str, Any], tmp_path: Path
) -> None:
    folder = save(tiny.FAMILIES[family](seed=1), tmp_path)
    model = {"dtype": "float32", "packing": "packed"}
    recipe = make_recipe(folder, model=model, train=train, algorithm={"kl_coefficient": 0.1})
    plan = make_plan(device="cuda", compute_dtype="bfloat16", packing="packed", activation_checkpointing="full")
    plane = LocalPlane()
    worker = PolicyWorker(recipe, plan, plane)
    assert worker.probe_report.packing == "packed"
    assert worker.probe_report.leak == 0.0
    batch = make_batch(make_groups(plane))
    worker.score(batch, old=True, reference=True)
    worker.advantages(batch)
    truth = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = reference.rows_of(plane, batch.samples())
    worker.accumulate(batch.mini_batches[0], StepReport())
    options: dict[str, Any] = {"temperature": recipe.rollout.temperature, "max_response": MAX_RESPONSE}
    reference.policy_loss(truth, truth, rows, recipe.algorithm, **options).backward()
    ours = {name: tensor.grad.full_tensor().cpu() for name, tensor in own_tensors(worker.lm).items()}  # type: ignore[union-attr]
    theirs = {name: parameter.grad for name, parameter in truth.named_parameters()}
    dot, norm_a, norm_b = (
        sum(float((a[name] * b[name]).double().sum()) for name in ours)
        for a, b in ((ours, theirs), (ours, ours), (theirs, theirs))
    )
    assert dot / (norm_a * norm_b) ** 0.5 > 0.99
    values = worker.update(batch).values
    assert worker.version == 1
    assert values["actor/ratio_max"] < 1.1
