"""The report page holds what the files of the run hold, says what it leaves out, and runs nothing of a response."""

import fcntl
import json
import re
import stat
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli import main
from plimsoll.errors import RefusedError, RunFolderError
from plimsoll.jsonl import read_jsonl
from plimsoll.observe.report.page import write_report
from plimsoll.observe.report.read import read_run
from tests.unit.observe.report_runs import metrics_rows, sample_row, small_run, torn, write_lines

HOSTILE = "</script><img src=x onerror=\"document.documentElement.dataset.broken='yes'\"><!-- <script> \u2028 &lt; é"


def page_data(page: Path) -> dict[str, Any]:
    """The JSON inside the page, found as a browser finds it: up to the first `</script`."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', text, flags=re.DOTALL)
    assert found
    return json.loads(found[1])


class Elements(HTMLParser):
    """Every element of a page with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return small_run(tmp_path / "small", ranks=2, device=True, responses=(HOSTILE,))


@pytest.fixture
def page(run: Path) -> Path:
    write_report([run], run / "report.html")
    return run / "report.html"


def test_every_number_of_metrics_is_in_the_page_as_it_is_in_the_file(run: Path, page: Path) -> None:
    (shown,) = page_data(page)["runs"]
    curves = {curve["key"]: dict(zip(curve["steps"], curve["values"], strict=True)) for curve in shown["curves"]}
    rows = read_jsonl(run / "metrics.jsonl")
    for row in rows:
        for key in row.keys() - {"step"}:
            assert curves[key].pop(row["step"]) == row[key]
    assert {key: rest for key, rest in curves.items() if rest} == {}  # and nothing else
    times = shown["times"]
    for at, step in enumerate(times["steps"]):
        of_step = {f"time/{name}": values[at] for name, values in times["columns"].items() if values[at] is not None}
        assert of_step == {key: value for key, value in rows[step].items() if key.startswith("time/")}
    assert times["steps"] == [row["step"] for row in rows]


def test_every_number_of_the_ledger_is_in_the_page_as_it_is_in_the_file(run: Path, page: Path) -> None:
    (shown,) = page_data(page)["runs"]
    rows = read_jsonl(run / "memory.jsonl")
    assert [track["rank"] for track in shown["ledger"]] == [0, 1]
    for track in shown["ledger"]:
        mine = [row for row in rows if row["rank"] == track["rank"]]
        assert track["steps"] == [row["step"] for row in mine]
        assert track["phases"] == [row["phase"] for row in mine]
        assert track["seconds"] == [row["seconds"] for row in mine]
        assert len(track["values"]) > 10
        for key, values in track["values"].items():
            assert values == [row[key] for row in mine]
        for kind in ("residents", "predicted"):
            assert {name: values[-1] for name, values in track[kind].items()} == mine[-1][kind]
        assert track["on_host"] == ["moments"]
        for summary in track["summary"]:
            of_phase = [row for row in mine if row["phase"] == summary["phase"]]
            assert summary["rows"] == len(of_phase)
            highest = max(of_phase, key=lambda row: row["device_allocated_peak"])
            assert summary["highest"]["device_allocated_peak"] == {
                "value": highest["device_allocated_peak"],
                "step": highest["step"],
            }


def test_every_rollout_is_in_the_page_as_it_is_in_the_files(run: Path, page: Path) -> None:
    (shown,) = page_data(page)["runs"]
    rows = [row for path in sorted((run / "rollouts").iterdir()) for row in read_jsonl(path)]
    assert shown["rollouts"] == rows
    assert rows[-1]["response"] == HOSTILE


def test_the_page_needs_no_network_and_text_of_a_run_ends_no_element_of_it(page: Path) -> None:
    elements = Elements(page.read_text(encoding="utf-8")).found
    assert [value for _, values in elements for name, value in values.items() if name in ("src", "srcset")] == []
    links = [values.get("href", "") or "" for _, values in elements]
    assert [link for link in links if link and not link.startswith(("#", "data:"))] == []
    assert [tag for tag, _ in elements if tag in ("img", "iframe", "object")] == []
    assert [tag for tag, _ in elements].count("script") == 4
    policies = [values["content"] for tag, values in elements if values.get("http-equiv") == "Content-Security-Policy"]
    assert [(policy or "").split(";")[0] for policy in policies] == ["default-src 'none'"]
    assert "@import" not in page.read_text(encoding="utf-8").partition("</style>")[0]


def test_names_of_a_run_are_text_too(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", name="<b>bold</b>")
    write_report([run], tmp_path / "page.html")
    head = (tmp_path / "page.html").read_text(encoding="utf-8").partition("</head>")[0]
    assert "<title>&lt;b&gt;bold" in head


def test_a_torn_last_row_is_left_out_and_said(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(torn(metrics_rows(20)[13]))
    report = read_run(run)
    assert report.steps_done == 12
    assert [note for note in report.notes if "metrics.jsonl: the last row is not complete" in note]


def test_a_damaged_row_in_the_middle_is_left_out_and_said_with_its_line(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[3] = b'{"step": 3, "loss"\n'
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    report = read_run(run)
    assert 3 not in next(curve.steps for curve in report.curves if curve.key == "loss")
    assert "metrics.jsonl: line 4 cannot be read as a row and is left out." in report.notes


def test_a_null_stays_a_null(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    write_lines(run / "metrics.jsonl", [{"step": 13, "loss": float("nan")}])
    write_report([run], run / "report.html")
    (shown,) = page_data(run / "report.html")["runs"]
    (loss,) = [curve for curve in shown["curves"] if curve["key"] == "loss"]
    assert (loss["steps"][-1], loss["values"][-1]) == (13, None)


def test_metrics_without_a_ledger_are_shown_and_the_lack_is_said(run: Path) -> None:
    (run / "memory.jsonl").unlink()
    report = read_run(run)
    assert report.curves
    assert [note for note in report.notes if "memory.jsonl is missing" in note]


def test_a_ledger_without_metrics_is_shown_and_the_lack_is_said(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    report = read_run(run)
    assert report.ledger
    assert [note for note in report.notes if "no step yet" in note]


def test_what_is_no_run_or_has_nothing_to_show_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match=r"no recipe\.json"):
        read_run(tmp_path)
    (tmp_path / "recipe.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RunFolderError, match="not readable as a recipe"):
        read_run(tmp_path)
    (tmp_path / "recipe.json").write_text('{"name": "x"}', encoding="utf-8")
    with pytest.raises(RunFolderError, match="no rows; no run got as far"):
        read_run(tmp_path)


def test_the_state_is_running_while_a_process_holds_the_folder(run: Path) -> None:
    (run / "plan.json").write_text('{"steps": 100}', encoding="utf-8")
    assert read_run(run).state == "stopped"
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(run).state == "running"
        assert read_run(run, ended=True).state == "stopped"
    assert read_run(run).state == "stopped"
    (run / "plan.json").write_text('{"steps": 12}', encoding="utf-8")
    assert read_run(run).state == "finished"


def test_a_page_that_cannot_be_written_leaves_the_old_one_and_no_other_file(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="--out"):
        write_report([run], tmp_path / "no-such-folder" / "page.html")
    (tmp_path / "taken").mkdir()
    with pytest.raises(RefusedError, match="--out"):
        write_report([run], tmp_path / "taken")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small", "taken"]


def test_the_command_writes_into_the_run_and_says_what_it_wrote(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["report"] == str(run / "report.html")
    assert said["runs"] == [{"name": "small", "path": str(run), "state": "finished", "steps": 12, "planned": 12}]
    assert stat.S_IMODE((run / "report.html").stat().st_mode) & 0o044
    assert [path.name for path in run.iterdir() if path.name.endswith(".tmp")] == []


def test_several_runs_are_in_one_page_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = small_run(tmp_path / "one"), small_run(tmp_path / "another", num_steps=5, seed=3)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(first), str(second)]) == 0
    assert "report.html" in capsys.readouterr().out
    shown = page_data(tmp_path / "report.html")["runs"]
    assert [run["name"] for run in shown] == ["one", "another"]
    assert [run["recipe"]["seed"] for run in shown] == ["0", "3"]
    assert not (first / "report.html").exists()


def test_the_command_refuses_with_2_and_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 2
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_rows_of_older_versions_without_some_keys_are_shown(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    row = sample_row(12, 9)
    del row["score_parts"], row["version"]
    write_lines(run / "rollouts" / "step_000013.jsonl", [row])
    assert read_run(run).rollouts[-1].score_parts == {}
