"""The shapes that we ship for published models are theirs."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from plimsoll.model.build import read_config

MODELS = Path(__file__).parents[3] / "recipes" / "models"


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("SmolLM2-135M-Instruct", 134_515_008),
        ("Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-32B", 32_762_123_264),
        ("Qwen3-Next-80B-A3B-Instruct", 79_674_391_296),
    ],
)
def test_a_shipped_config_has_as_many_parameters_as_the_published_model(name: str, num_parameters: int) -> None:
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(read_config(MODELS / name))
    assert sum(parameter.numel() for parameter in lm.parameters()) == num_parameters
