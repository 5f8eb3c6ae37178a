"""One thread and no network, for every test; set before torch and transformers are imported. Tests of extras."""

import importlib.util
import os
from collections.abc import Generator

import pytest

from tests.extras import EXTRAS

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """A home of its own: what runs remember there would decide what the next ones plan with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--extra NAME`: only the tests that belong to this extra of the distribution."""
    parser.addoption("--extra", choices=sorted(EXTRAS), help="only tests that need this extra")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests of extras that are not installed; with `--extra`, keep that extra's tests only."""
    chosen = config.getoption("--extra")
    for item in tuple(items):
        names = {mark.args[0] for mark in item.iter_markers("extra")}
        if chosen is not None and chosen not in names:
            items.remove(item)
            continue
        missing = sorted(name for name in names if importlib.util.find_spec(EXTRAS[name]) is None)
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"not installed: plimsoll-rl[{', '.join(missing)}]"))
