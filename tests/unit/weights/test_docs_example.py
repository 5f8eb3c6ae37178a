"""The lines of docs/weights.md for other trainers, run as they stand there."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from plimsoll.parallel.mesh import build_mesh, close_process_group, ensure_process_group
from tests.tiny import qwen2

PAGE = Path(__file__).parents[3] / "docs" / "weights.md"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_gloo_rank() -> Iterator[None]:
    ensure_process_group(CPU)
    yield
    close_process_group()


def example() -> str:
    """The page's only Python block."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 1
    return blocks[0]


def read(folder: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return dict(model.named_parameters())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_lines_load_offload_and_export_a_model(tmp_path: Path, tied: bool) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    qwen2(tied=tied, dtype=torch.bfloat16).save_pretrained(folder)
    before = read(folder)

    names: dict[str, Any] = {"folder": folder, "out": out, "device": CPU, "mesh": build_mesh(CPU, None)}
    exec(compile(example(), str(PAGE), "exec"), names)

    lm: PreTrainedModel = names["lm"]
    held = dict(lm.named_parameters())
    assert held.keys() == before.keys()
    assert ("lm_head.weight" in held) is not tied
    for name, parameter in held.items():
        assert isinstance(parameter, DTensor)
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter.full_tensor().bfloat16(), before[name]), name
    after = read(out)
    assert after.keys() == before.keys()
    assert all(after[name].dtype == torch.bfloat16 and torch.equal(after[name], before[name]) for name in before)
