"""What the page shows → one HTML file that needs no network: data, script and chart library are all inside."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import util
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from plimsoll import __version__
from plimsoll.errors import RefusedError
from plimsoll.observe.report.data import RunReport
from plimsoll.observe.report.read import read_run

SCRIPTS = ("base.js", "charts.js", "curves.js", "times.js", "ledger.js", "tables.js", "rollouts.js", "page.js")


def write_report(runs: Sequence[Path], out: Path, *, ended: bool = False) -> list[RunReport]:
    """Read the run folders and replace `out` by their page in one step.

    Raises RunFolderError for a folder that cannot be shown and RefusedError when `out` cannot be written.
    """
    reports = [read_run(path, num_runs=len(runs), ended=ended) for path in runs]
    page = render(reports, written_at=time.time())
    temporary = temporary_of(out, os.getpid())
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RefusedError(
            f"the report cannot be written to {out} ({error.strerror}): choose another file with --out"
        ) from error
    return reports


def default_out(runs: Sequence[Path]) -> Path:
    """The page of one run is in its folder, that of several in the current one."""
    return runs[0] / "report.html" if len(runs) == 1 else Path("report.html")


def temporary_of(out: Path, pid: int) -> Path:
    """Where process `pid` writes the page first: a name of its own, for a run and a person may write at one time."""
    return out.with_name(f".{out.name}.{pid}.tmp")


def render(reports: Sequence[RunReport], *, written_at: float) -> str:
    """The page of one or several runs; `written_at` in seconds since 1970."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    data = {"runs": [asdict(report) for report in reports], "written_at": written_at, "version": __version__}
    return environment.from_string(_resource("template.html.j2")).render(
        title=", ".join(report.name for report in reports),
        css=Markup(_resource("page.css")),
        plotly=Markup(inline_script(_plotly())),
        script=Markup(inline_script("\n".join(_resource(name) for name in SCRIPTS))),
        data=Markup(inline_json(data)),
    )


def inline_json(value: object) -> str:
    """JSON for the inside of a script element: without `<`, nothing in a response can end it or open a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def inline_script(text: str) -> str:
    """Script for the inside of a script element; `<\\/` is the same as `</` in every string of JavaScript."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _resource(name: str) -> str:
    return (files("plimsoll.observe.report") / name).read_text(encoding="utf-8")


def _plotly() -> str:
    """The script in the plotly package, found without importing it: its Python side takes a second and is not used."""
    spec = util.find_spec("plotly")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        script = Path(folder) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script.read_text(encoding="utf-8")
    raise RefusedError("the report needs the plotly package, which is not installed: pip install plotly")
