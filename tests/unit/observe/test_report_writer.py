"""The page is written beside the run: the run does not wait, does not fail, and leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from plimsoll.observe.report.writer import ReportWriter
from tests.processes import children_left
from tests.unit.observe.report_runs import metrics_rows, small_run, write_lines


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return small_run(tmp_path / "run")


def steps_in(page: Path) -> int:
    text = page.read_text(encoding="utf-8")
    return json.loads(text.partition('id="data">')[2].partition("</script")[0])["runs"][0]["steps_done"]


def test_the_first_poke_writes_the_page_and_the_next_ones_wait_for_the_interval(run: Path) -> None:
    said: list[str] = []
    writer = ReportWriter(run, 3600.0, said.append)
    writer.poke()
    wait_until((run / "report.html").is_file)
    first = (run / "report.html").stat().st_mtime_ns
    wait_until(lambda: not [child for child in children_left() if child.status() != psutil.STATUS_ZOMBIE])
    for _ in range(3):
        writer.poke()
    assert children_left() == []  # the one that ended was taken off, and no other was started
    assert (run / "report.html").stat().st_mtime_ns == first
    write_lines(run / "metrics.jsonl", metrics_rows(14)[13:])
    writer.close()
    assert steps_in(run / "report.html") == 14
    assert (children_left(), said) == ([], [])
    writer.close()
    writer.poke()
    assert children_left() == []


def test_two_writings_are_never_going_on_at_once(run: Path) -> None:
    writer = ReportWriter(run, 0.001, lambda text: None)
    writer.poke()
    time.sleep(0.01)
    writer.poke()
    writer.poke()
    assert len(children_left()) <= 1
    writer.close()
    assert children_left() == []


def test_a_page_that_cannot_be_written_is_said_once_with_the_reason(tmp_path: Path) -> None:
    said: list[str] = []
    writer = ReportWriter(tmp_path, 0.001, said.append)
    writer.poke()
    writer.close()
    assert len(said) == 1
    assert "no recipe.json" in said[0]
    assert "observe.report=false" in said[0]


def test_a_run_that_ended_before_its_first_step_has_no_complaint_about_its_page(tmp_path: Path) -> None:
    said: list[str] = []
    ReportWriter(tmp_path, 60.0, said.append).close()
    assert said == []
    assert children_left() == []


def test_a_page_that_was_moved_away_does_not_reach_the_run(run: Path) -> None:
    writer = ReportWriter(run, 3600.0, lambda text: None)
    writer.poke()
    wait_until(lambda: not [child for child in children_left() if child.status() != psutil.STATUS_ZOMBIE])
    (run / "report.html").unlink()
    writer.poke()
    writer.close()
    assert (run / "report.html").is_file()


def test_a_process_that_cannot_be_started_is_said_and_not_raised(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(run / "no-such-python"))
    said: list[str] = []
    writer = ReportWriter(run, 0.001, said.append)
    writer.poke()
    writer.poke()
    writer.close()
    assert len(said) == 1
    assert "could be started" in said[0]


def test_a_writing_that_hangs_is_ended_at_the_limit(run: Path) -> None:
    said: list[str] = []
    writer = ReportWriter(run, 3600.0, said.append, wait_running=0.2, wait_last=30.0)
    writer.poke()
    (child,) = children_left()
    child.send_signal(signal.SIGSTOP)
    (run / f".report.html.{child.pid}.tmp").write_text("half a page", encoding="utf-8")
    writer.close()
    assert children_left() == []
    assert len(said) == 1
    assert "took longer" in said[0]
    assert steps_in(run / "report.html") == 12  # the last writing took place all the same
    assert list(run.glob(".report*")) == []


def test_an_interrupt_of_the_terminal_does_not_reach_the_writing(run: Path) -> None:
    program = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from plimsoll.observe.report.writer import ReportWriter\n"
        "writer = ReportWriter(Path(sys.argv[1]), 60.0, lambda text: print(text, flush=True))\n"
        "writer.poke()\n"
        "try:\n"
        "    os.killpg(0, signal.SIGINT)\n"
        "    time.sleep(5)\n"
        "except KeyboardInterrupt:\n"
        "    writer.close()\n"
        "    print('closed', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.stdout == "closed\n", done.stderr
    assert steps_in(run / "report.html") == 12
