"""The page in a real browser: every chart is drawn, from the numbers of the files, without an error."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plimsoll.jsonl import read_jsonl
from plimsoll.memory.ledger import GIB
from plimsoll.observe.report.page import write_report
from tests.unit.observe.report_runs import small_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += " --disable-component-update --disable-sync --virtual-time-budget=20000 --window-size=1400,1000"
HOSTILE = "</script><img src=x onerror=\"document.documentElement.dataset.broken='yes'\"><!-- <script>"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on the PATH to open the page in")


class Page:
    """The document after its scripts have run, and what they read back from the charts."""

    def __init__(self, path: Path, profile: Path, query: str = "?check=1") -> None:
        command = [str(BROWSER), *QUIET.split(), f"--user-data-dir={profile}", "--dump-dom", f"file://{path}{query}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        self.dom = done.stdout
        self.root = dict(re.findall(r'data-([a-z]+)="([^"]*)"', self.dom.partition("<head>")[0]))
        self.charts: list[dict[str, Any]] = json.loads(html.unescape(self.root.get("check", "[]")))
        self.body = self.dom.partition('id="data"')[0]  # what a reader sees; the embedded data comes after it

    def chart(self, name: str) -> dict[str, Any]:
        return next(chart for chart in self.charts if chart["id"] == name)


def test_a_run_on_devices_is_drawn_from_the_numbers_of_its_files(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", ranks=2, device=True, responses=(HOSTILE,))
    write_report([run], run / "report.html")
    page = Page(run / "report.html", tmp_path / "profile")
    assert page.root["ready"] == "yes"
    assert "errors" not in page.root
    assert "broken" not in page.root
    assert "<img" not in page.body
    assert html.escape("</script><img", quote=False) in page.body  # the response, as text
    expected = (
        "reward accuracy length truncated entropy kl grad lr loss clipped mismatch mismatch-kl perplexity weights"
    )
    expected += " parts signal speed tokens times device host"
    assert [chart["id"] for chart in page.charts] == expected.split()
    assert [chart["id"] for chart in page.charts if chart["svg"] < 1] == []
    rows = read_jsonl(run / "metrics.jsonl")
    num_checked = 0
    for chart in page.charts:
        for trace in (trace for trace in chart["traces"] if "run" in trace.get("meta", {})):
            with_key = [row for row in rows if trace["meta"]["key"] in row]
            if chart["id"] == "times":
                drawn = [(x, y) for x, y in zip(trace["x"], trace["y"], strict=True) if y is not None]
            else:
                drawn = list(zip(trace["x"], trace["y"], strict=True))
            assert drawn == [(row["step"], row[trace["meta"]["key"]]) for row in with_key]
            num_checked += len(drawn)
    assert num_checked > 12 * 20
    _compare_ledger(page, [row for row in read_jsonl(run / "memory.jsonl") if row["rank"] == 0])


def _compare_ledger(page: Page, rows: list[dict[str, Any]]) -> None:
    drawn = {trace["name"]: trace["y"][1:-1] for trace in page.chart("device")["traces"]}  # without the two ends
    for name, key in (
        ("unattributed", "unattributed"),
        ("allocator cache", "fragmentation"),
        ("outside torch", "device_non_torch"),
        ("capacity", "device_total"),
    ):
        assert drawn[name] == [row[key] / GIB for row in rows]
    for name, key in (("highest", "device_allocated_peak"), ("highest with cache", "device_reserved_peak")):
        assert drawn[name] == [(row[key] + row["device_non_torch"]) / GIB for row in rows]
    for name in ("actor_parameters", "kv_cache", "new_thing"):
        assert drawn[name] == [row["residents"][name] / GIB for row in rows]
    assert drawn["predicted"] == [5_000_000 / GIB] * len(rows)
    # What is in host memory though the run is on a device is drawn there.
    on_host = {trace["name"]: trace["y"][1:-1] for trace in page.chart("host")["traces"]}
    assert "moments" not in drawn
    assert on_host["moments"] == [row["residents"]["moments"] / GIB for row in rows]
    assert on_host["other anonymous"] == [(row["host_anonymous"] - 6_000_000) / GIB for row in rows]
    assert not {"actor_parameters", "kv_cache", "new_thing"} & on_host.keys()
    strip = {trace["meta"]["phase"] for trace in page.chart("device")["traces"] if "phase" in trace.get("meta", {})}
    assert strip == {"load", "eval", "rollout", "logprob", "update", "sync"}


@pytest.mark.slow
def test_several_runs_lie_over_one_another_and_what_differs_is_told(tmp_path: Path) -> None:
    first = small_run(tmp_path / "one")
    second = small_run(tmp_path / "another", num_steps=5, seed=3)
    write_report([first, second], tmp_path / "report.html")
    page = Page(tmp_path / "report.html", tmp_path / "profile", "?check=1&theme=dark")
    assert page.root["ready"] == "yes"
    assert "errors" not in page.root
    assert page.root["theme"] == "dark"
    one, another = page.chart("reward")["traces"]
    assert (one["name"], len(one["x"])) == ("one", 12)
    assert (another["name"], len(another["x"])) == ("another", 5)
    table = page.body.partition("Recipe keys that differ")[2].partition("</table>")[0]
    assert re.findall(r"<tr><td>([^<]+)", table) == ["seed"]


ACTIONS = """<script>
const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const type = (node, text) => { node.value = text; node.dispatchEvent(new Event("input")); };
(async () => {
  while (!ready) await wait(20);
  const told = document.documentElement.dataset;
  type(document.querySelector("#rollouts input[type=search]"), "needle");
  type(document.querySelector("#curves input[type=range]"), "0.5");
  const more = document.querySelector("#curves .tools select");
  more.value = "*";
  more.dispatchEvent(new Event("change"));
  await wait(600);
  told.samples = document.querySelectorAll(".sample").length;
  told.marked = [...document.querySelectorAll("mark")].map((node) => node.textContent).join();
  const reward = charts.find((made) => made.id === "reward");
  const smooth = reward.plot.data.filter((trace) => trace.meta.smoothed);
  told.smooth = JSON.stringify(smooth.map((trace) => [...trace.y]));
  told.more = charts.filter((made) => made.id.startsWith("more-") && made.drawn).map((made) => made.id).join();
  pointAt(reward, 5);
  const line = charts.find((made) => made.id === "loss").line;
  told.readout = JSON.stringify([...line.children].map((node) => node.textContent));
  document.querySelector("#theme").click();
  await wait(300);
  told.done = "yes";
})();
</script></body>"""


@pytest.mark.slow
def test_searching_smoothing_further_metrics_and_pointing_at_a_step(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", responses=("a Needle in here", "<b>needle</b>"))
    write_report([run], run / "report.html")
    text = (run / "report.html").read_text(encoding="utf-8")
    (run / "acted.html").write_text(text.replace("</body>", ACTIONS), encoding="utf-8")
    page = Page(run / "acted.html", tmp_path / "profile", "?theme=light")
    assert page.root["done"] == "yes"
    assert "errors" not in page.root
    assert page.root["theme"] == "dark"
    assert page.root["samples"] == "2"
    assert sorted(page.root["marked"].split(",")) == ["Needle", "needle"]
    rows = read_jsonl(run / "metrics.jsonl")[1:]
    (smooth,) = json.loads(html.unescape(page.root["smooth"]))
    mean, weight = 0.0, 0.0
    for row, shown in zip(rows, smooth, strict=True):
        mean, weight = 0.5 * mean + 0.5 * row["reward/mean"], 0.5 * weight + 0.5
        assert shown == pytest.approx(mean / weight)
    assert page.root["more"].split(",") == ["more-eval-n", "more-something-else"]
    step, loss = json.loads(html.unescape(page.root["readout"]))
    assert step == "step 5"
    assert float(loss.removeprefix("loss")) == pytest.approx(rows[4]["loss"], rel=1e-3)


def test_a_run_with_little_to_show_is_shown(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", num_steps=1)
    for name in ("memory.jsonl", "plan.json", "rollouts/step_000001.jsonl"):
        (run / name).unlink()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n', encoding="utf-8")
    write_report([run], run / "report.html")
    page = Page(run / "report.html", tmp_path / "profile")
    assert page.root["ready"] == "yes"
    assert "errors" not in page.root
    assert page.charts == []
    assert "memory.jsonl is missing" in page.body
