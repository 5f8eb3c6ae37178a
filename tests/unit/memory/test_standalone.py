"""The ledger in a torch loop that knows nothing of plimsoll."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll.errors import RefusedError
from plimsoll.memory.device import FakeDevice
from plimsoll.memory.resident import Place
from plimsoll.memory.standalone import MemoryLedger
from plimsoll.observe.report.read import read_run
from tests.processes import open_files

GIB = 2**30


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(ledger: MemoryLedger, steps: int) -> torch.nn.Linear:
    model = torch.nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    ledger.track("parameters", model.parameters)
    ledger.track("moments", lambda: (s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")))
    for step in range(1, steps + 1):
        ledger.step(step)
        with ledger.phase("forward and backward"):
            model(torch.ones(4, 64)).sum().backward()
        with ledger.phase("update"):
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_a_loop_leaves_rows_with_what_it_tracks(tmp_path: Path) -> None:
    with MemoryLedger(tmp_path / "new" / "memory.jsonl", device="cpu") as ledger:
        train(ledger, 2)
        assert list(ledger.seconds()) == ["forward and backward", "update"]
    found = rows(tmp_path / "new" / "memory.jsonl")
    assert [(row["step"], row["phase"]) for row in found] == [
        (1, "forward and backward"),
        (1, "update"),
        (2, "forward and backward"),
        (2, "update"),
    ]
    size = 64 * 32 * 4
    assert [row["residents"] for row in found] == [
        {"parameters": size, "moments": 0},
        *[{"parameters": size, "moments": 2 * size}] * 3,
    ]
    assert all(row["device"] == "cpu" and row["device_used"] is None for row in found)
    assert all(row["host_anonymous"] > 0 and row["host_anonymous_peak"] >= row["host_anonymous"] for row in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_counters_of_the_device_are_there(tmp_path: Path) -> None:
    with MemoryLedger(tmp_path) as ledger:
        kept = torch.ones(64 * 2**20, dtype=torch.uint8, device="cuda")
        ledger.track("kept", lambda: [kept, torch.ones(3)])
        with ledger.phase("work"):
            torch.ones(128 * 2**20, dtype=torch.uint8, device="cuda")
    (row,) = rows(tmp_path / "memory.jsonl")
    assert row["residents"] == {"kept": 64 * 2**20}
    assert row["device_allocated_peak"] - row["device_allocated"] == 128 * 2**20
    assert row["device_used"] >= row["device_reserved"]


def test_phases_do_not_nest_and_the_outer_one_goes_on(tmp_path: Path) -> None:
    with MemoryLedger(tmp_path, device="cpu") as ledger:
        with (
            ledger.phase("outer"),
            pytest.raises(RefusedError, match="'inner' begins inside phase 'outer'"),
            ledger.phase("inner"),
        ):
            pass
        with ledger.phase("next"):
            pass
    assert [(row["phase"], row["failed"]) for row in rows(tmp_path / "memory.jsonl")] == [
        ("outer", False),
        ("next", False),
    ]


def test_an_out_of_memory_leaves_the_table(tmp_path: Path) -> None:
    device = FakeDevice(total=10 * GIB)
    with MemoryLedger(tmp_path, device=device) as ledger:
        device.allocate(8 * GIB)
        ledger.track_bytes("weights", lambda: 8 * GIB)
        ledger.track_bytes("copy", lambda: 80 * GIB, place=Place.HOST)
        with pytest.raises(torch.OutOfMemoryError) as caught, ledger.phase("work"):
            device.allocate(3 * GIB)
    (text,) = caught.value.__notes__
    assert "in the work phase" in text
    assert "The largest is weights, 8.0 GiB. What to change: hold less of it" in text
    (row,) = rows(tmp_path / "memory.jsonl")
    assert (row["unattributed"], row["on_host"], row["failed"]) == (0, ["copy"], True)


def test_closing_again_is_allowed_and_leaves_nothing_open(tmp_path: Path) -> None:
    ledger = MemoryLedger(tmp_path, device="cpu")
    assert open_files(tmp_path)
    ledger.close()
    ledger.close()
    assert open_files(tmp_path) == []


def test_tracking_again_replaces(tmp_path: Path) -> None:
    with MemoryLedger(tmp_path, device="cpu") as ledger:
        ledger.track("weights", lambda: [torch.ones(3)])
        ledger.track("weights", lambda: [torch.ones(5)])
        with ledger.phase("work"):
            pass
    assert rows(tmp_path / "memory.jsonl")[0]["residents"] == {"weights": 20}


def test_the_report_reads_the_folder(tmp_path: Path) -> None:
    with MemoryLedger(tmp_path, device="cpu") as ledger:
        train(ledger, 2)
        ledger.describe("mine", model="a linear layer")
        ledger.describe("another", model="does not replace it")
    report = read_run(tmp_path)
    assert report.name == "mine"
    assert len(report.ledger) == 1


def test_describing_keeps_the_recipe_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text('{"name": "run"}')
    with MemoryLedger(tmp_path, device="cpu") as ledger:
        ledger.describe("mine")
    assert json.loads((tmp_path / "recipe.json").read_text()) == {"name": "run"}


def blocks_of_the_page() -> list[str]:
    page = (Path(__file__).parents[3] / "docs" / "memory-library.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)


def test_the_loop_on_the_page_about_the_library_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        net = torch.nn.Linear(64, 32, bias=False)
        return net, torch.optim.AdamW(net.parameters())

    def generate(net: torch.nn.Linear) -> torch.Tensor:
        return torch.ones(4, net.in_features)

    def update(net: torch.nn.Linear, optimizer: torch.optim.AdamW, batch: torch.Tensor) -> None:
        net(batch).sum().backward()
        optimizer.step()

    monkeypatch.chdir(tmp_path)
    mine: dict[str, Any] = {"build": build, "generate": generate, "train": update}
    exec(compile(blocks_of_the_page()[0], "memory-library.md", "exec"), mine)
    found = rows(tmp_path / "runs" / "mine" / "memory.jsonl")
    assert [(row["step"], row["phase"]) for row in found[-2:]] == [(100, "generate"), (100, "update")]
    size = 64 * 32 * 4
    assert [row["residents"] for row in found[-2:]] == [{"parameters": size, "gradients": size}] * 2
    assert read_run(tmp_path / "runs" / "mine").recipe["name"] == '"mine"'  # as JSON


@pytest.mark.parametrize("block", blocks_of_the_page(), ids=lambda block: block.split("\n")[0])
def test_what_the_page_about_the_library_imports_exists(block: str) -> None:
    compile(block, "memory-library.md", "exec")
    exec("\n".join(line for line in block.splitlines() if line.startswith(("from ", "import "))), {})
