"""The shipped tiny tokenizer, read once."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from plimsoll.data.tokenizer import load_tokenizer

TINY = Path(__file__).parents[3] / "recipes" / "models" / "tiny"


@pytest.fixture(scope="session")
def tiny() -> PreTrainedTokenizerBase:
    return load_tokenizer(TINY)
