"""The memory part of the page: measured against the plan, rows of older versions, and a ledger without a run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli import main
from plimsoll.errors import RunFolderError
from plimsoll.jsonl import read_jsonl
from plimsoll.memory.ledger import GIB, MIB
from plimsoll.memory.standalone import MemoryLedger
from plimsoll.observe.report.page import write_report
from plimsoll.observe.report.read import read_run
from tests.unit.observe.memory_runs import as_older_version, plan, planned_run, write_ledger
from tests.unit.observe.report_runs import write_lines
from tests.unit.observe.test_report_browser import BROWSER, Page
from tests.unit.observe.test_report_page import page_data

in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on the PATH to open the page in")

NEW_KEYS = {"planned_device", "planned_host", "device_engine", "evicted", "admitted", "non_torch_growth"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return planned_run(tmp_path / "run", num_steps=5)


def rows_of_rank(path: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(path) if row["rank"] == rank]


def needed(row: dict[str, Any]) -> int:
    """What a plan's figure for the device is held against."""
    return row["device_allocated_peak"] + (row.get("device_engine") or 0) + row["device_non_torch"]


def test_the_highest_of_each_phase_is_held_against_the_plan_of_the_same_row(run: Path) -> None:
    rows = rows_of_rank(run / "memory.jsonl")
    for row in rows:  # a calibration lowers the plan's figure on the way
        row["planned_device"] = row["planned_device"] and row["planned_device"] - row["step"] * MIB
    (run / "memory.jsonl").unlink()
    (track,) = read_run_of(run, rows)
    assert {found.phase for found in track.summary} == {row["phase"] for row in rows}
    for found in track.summary:
        mine = [row for row in rows if row["phase"] == found.phase]
        most = max(mine, key=needed)
        assert found.device is not None
        assert (found.device.value, found.device.step) == (needed(most), most["step"])
        assert found.device.planned == most["planned_device"]
        grown = max(mine, key=lambda row: row["host_growth_peak"])
        assert found.host is not None
        assert (found.host.value, found.host.step) == (grown["host_growth_peak"], grown["step"])
        assert found.host.planned == grown["planned_host"]
        assert found.host_left is not None
        assert found.host_left.value == min(row["host_available"] for row in mine)


def read_run_of(run: Path, rows: list[dict[str, Any]]) -> Any:
    write_lines(run / "memory.jsonl", rows)
    return read_run(run).ledger


def test_lines_of_the_timeline_are_sums_of_the_row(run: Path) -> None:
    rows = rows_of_rank(run / "memory.jsonl", 1)
    track = read_run(run).ledger[1]
    assert track.levels["device_peak"] == [needed(row) for row in rows]
    beside = [row["device_engine"] + row["device_non_torch"] for row in rows]
    assert track.levels["device_highest"] == [
        max(row["device_used"], row["device_reserved_peak"] + more) for row, more in zip(rows, beside, strict=True)
    ]
    starts = [row["host_anonymous"] - row["host_growth"] for row in rows]
    assert track.levels["host_planned"] == [
        None if row["planned_host"] is None else start + row["planned_host"]
        for row, start in zip(rows, starts, strict=True)
    ]
    assert track.in_engine == ["rollout_parameters", "kv_cache", "engine_buffers"]
    assert set(track.on_host) == {"optimizer_state", "staging_ring"}


def test_the_plan_is_in_the_page_as_it_is_in_its_file(run: Path) -> None:
    write_report([run], run / "report.html")
    (shown,) = page_data(run / "report.html")["runs"]
    assert shown["plan"] == json.loads((run / "plan.json").read_bytes())["memory"]
    assert len(shown["plan"]["phases"]) == len(plan().phases)


def test_a_plan_of_another_version_is_left_out_and_said(run: Path) -> None:
    found = json.loads((run / "plan.json").read_bytes())
    del found["memory"]["choices"]["token_budget"]
    (run / "plan.json").write_text(json.dumps(found), encoding="utf-8")
    report = read_run(run)
    assert report.plan is None
    assert report.steps_planned == 5
    assert [note for note in report.notes if "cannot be read (at choices.token_budget)" in note]


def test_rows_of_older_versions_have_no_columns_of_a_plan(run: Path) -> None:
    as_older_version(run / "memory.jsonl")
    rows = rows_of_rank(run / "memory.jsonl")
    assert not NEW_KEYS & rows[0].keys()
    track = read_run(run).ledger[0]
    assert not NEW_KEYS & track.values.keys()
    assert "host_planned" not in track.levels
    assert track.levels["device_peak"] == [needed(row) for row in rows]
    assert [found.device.planned for found in track.summary if found.device] == [None] * len(track.summary)
    assert track.in_engine == []


def test_a_ledger_alone_is_shown_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "ledger"
    folder.mkdir()
    write_ledger(folder / "memory.jsonl", num_steps=3, ranks=1)
    assert main(["report", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["runs"] == [{"name": "ledger", "path": str(folder), "state": "stopped", "steps": 3, "planned": None}]
    (shown,) = page_data(folder / "report.html")["runs"]
    assert (shown["kind"], shown["device"], shown["notes"]) == ("ledger", "cuda", [])
    assert len(shown["ledger"][0]["steps"]) == len(rows_of_rank(folder / "memory.jsonl"))


def test_an_empty_ledger_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "memory.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(RunFolderError, match="no rows; no run got as far"):
        read_run(tmp_path)


def test_a_ledger_that_says_what_it_is_of_is_a_ledger_alone_too(tmp_path: Path) -> None:
    ledger = MemoryLedger(tmp_path, device="cpu")
    ledger.describe("mine", model="some/model")
    ledger.step(4)
    with ledger.phase("forward"):
        pass
    ledger.close()
    report = read_run(tmp_path)
    assert (report.kind, report.name, report.model, report.device) == ("ledger", "mine", "some/model", "cpu")
    assert (report.steps_done, report.notes) == (4, [])
    assert report.ledger[0].phases == ["forward"]
    write_lines(tmp_path / "metrics.jsonl", [{"step": 4, "loss": 1.0}])  # a callback of a Trainer writes these
    assert read_run(tmp_path).kind == "run"
    (tmp_path / "recipe.json").unlink()
    assert [curve.key for curve in read_run(tmp_path).curves] == ["loss"]


def cells(page: Page, title: str) -> dict[str, list[tuple[str, str]]]:
    """First cell of each row of the table in the card → (class, text) of the others."""
    card = page.body.partition(f"<h3>{title}</h3>")[2].partition("</table>")[0]
    found: dict[str, list[tuple[str, str]]] = {}
    for row in re.findall(r"<tr[^>]*>(.*?)</tr>", card.partition("<tbody>")[2], flags=re.DOTALL):
        texts = [(kind, re.sub(r"<[^>]+>", "", text)) for kind, text in re.findall(r"<td([^>]*)>(.*?)</td>", row)]
        found[texts[0][1]] = [("".join(re.findall(r'class="(\w+)"', kind)), text) for kind, text in texts[1:]]
    return found


@in_a_browser
def test_the_timeline_stacks_residents_and_the_tables_compare_with_the_plan(run: Path, tmp_path: Path) -> None:
    write_report([run], run / "report.html")
    page = Page(run / "report.html", tmp_path / "profile")
    assert page.root["ready"] == "yes"
    assert "errors" not in page.root
    rows = rows_of_rank(run / "memory.jsonl")
    traces = page.chart("device")["traces"]
    drawn = {trace["name"]: trace["y"][1:-1] for trace in traces}
    stack = ["actor_parameters", "unattributed", "rollout_parameters", "kv_cache", "engine_buffers"]
    stack += ["other in the engine", "outside torch", "allocator cache"]
    assert [trace["name"] for trace in traces if trace["name"] in stack] == stack
    for at, row in enumerate(rows):  # the stack is what the driver says: nothing twice, nothing left out
        assert sum(drawn[name][at] for name in stack) == pytest.approx(row["device_used"] / GIB)
    assert drawn["plan"] == [row["planned_device"] and row["planned_device"] / GIB for row in rows]
    assert drawn["capacity"] == [row["device_total"] / GIB for row in rows]
    host = {trace["name"]: trace["y"][1:-1] for trace in page.chart("host")["traces"]}
    for at, row in enumerate(rows):
        anonymous = sum(host[name][at] or 0 for name in ("optimizer_state", "staging_ring", "other anonymous"))
        assert anonymous == pytest.approx(row["host_anonymous"] / GIB)
    device = cells(page, "Device: highest of each phase, and the plan")
    assert set(device) == {row["phase"] for row in rows}
    most = max((row for row in rows if row["phase"] == "reference"), key=needed)
    off = 100 * (needed(most) / most["planned_device"] - 1)
    assert off < -15
    assert device["reference"][3] == ("under", f"−{-off:.1f} %")
    assert device["rollout"][3][0] == ""
    assert device["load"][3] == ("none", "–")
    planned = cells(page, "The plan")
    assert planned["kv_cache"][:2] == [("", "72.00 GiB"), ("away", "away")]
    assert [text for _, text in planned["highest"]] == [f"{row.device_bytes / GIB:.2f} GiB" for row in plan().phases]


@in_a_browser
def test_a_ledger_alone_has_a_page_of_memory_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    write_ledger(tmp_path / "ledger" / "memory.jsonl", num_steps=3, ranks=1, failed_at=3)
    write_report([tmp_path / "ledger"], tmp_path / "page.html")
    page = Page(tmp_path / "page.html", tmp_path / "profile")
    assert page.root["ready"] == "yes"
    assert "errors" not in page.root
    assert [chart["id"] for chart in page.charts] == ["device", "host"]
    assert re.findall(r'<section id="(\w+)"', page.body) == ["overview", "memory"]
    assert re.findall(r'<a href="#(\w+)"', page.body) == ["overview", "memory"]


@pytest.mark.slow
@in_a_browser
def test_rows_of_older_versions_are_drawn(run: Path, tmp_path: Path) -> None:
    as_older_version(run / "memory.jsonl")
    (run / "plan.json").unlink()
    write_report([run], run / "report.html")
    page = Page(run / "report.html", tmp_path / "profile")
    assert page.root["ready"] == "yes"
    assert "errors" not in page.root
    assert "plan" not in {trace["name"] for trace in page.chart("device")["traces"]}
    device = cells(page, "Device: highest of each phase")
    assert {len(found) for found in device.values()} == {6}


CHOOSE_UPDATE = """<script>
(async () => {
  while (!ready) await new Promise((resolve) => setTimeout(resolve, 20));
  const pickers = [...document.querySelectorAll("#memory select")];
  const picker = pickers.find((node) => [...node.options].some((option) => option.value === "update"));
  picker.value = "update";
  picker.dispatchEvent(new Event("change"));
  selfCheck();
})();
</script></body>"""


@pytest.mark.slow
@in_a_browser
def test_one_phase_can_be_looked_at_over_the_steps(run: Path, tmp_path: Path) -> None:
    write_report([run], run / "report.html")
    text = (run / "report.html").read_text(encoding="utf-8")
    (run / "acted.html").write_text(text.replace("</body>", CHOOSE_UPDATE), encoding="utf-8")
    page = Page(run / "acted.html", tmp_path / "profile", "?theme=light")
    assert "errors" not in page.root
    updates = [row for row in rows_of_rank(run / "memory.jsonl") if row["phase"] == "update"]
    drawn = {trace["name"]: trace["y"][1:-1] for trace in page.chart("device")["traces"]}
    assert drawn["highest"] == [needed(row) / GIB for row in updates]
    assert drawn["plan"] == [row["planned_device"] / GIB for row in updates]
    assert "phase sync" not in drawn
