"""One model folder for all small runs, and a fresh folder to run in."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.e2e.small import Small, save_model


@pytest.fixture(scope="package", autouse=True)
def _cpu() -> Generator[None]:
    """These runs are compared bit for bit and by host memory: on the CPU, also where there is a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights."""
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def small(tmp_path: Path, model: Path) -> Small:
    """A recipe and a reward function in a folder of their own."""
    return Small(tmp_path, model)
