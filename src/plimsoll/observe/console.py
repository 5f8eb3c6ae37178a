"""Progress on stderr: a live display on a terminal, one line a step elsewhere; and logging that goes well with it."""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Literal, TextIO

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Mode = Literal["auto", "rich", "plain", "off"]


class Console:
    """What a person sees of a run. A context manager: the terminal is restored however the block ends.

    `step` knows the keys `reward`, `len`, `entropy`, `kl`, `grad`, `loss`, `lr`, `accuracy` (held-out) and `tok/s`;
    any other key is shown under its own name. Everything goes to stderr: stdout is for results.
    """

    def __init__(self, mode: Mode, *, stream: TextIO | None = None) -> None:
        if stream is None:
            stream = sys.stderr
            assert stream is not None, "this process has no stderr"
        self._rich = RichConsole(file=stream, force_terminal=True if mode == "rich" else None, highlight=False)
        if mode == "auto":
            mode = "rich" if stream.isatty() and not self._rich.is_dumb_terminal else "plain"
        self.mode: Literal["rich", "plain", "off"] = mode
        self._stream = stream
        self._live: Live | None = None
        self._display = _Display(title="", total=0, first=0)
        self._said: set[str] = set()
        self._printed = False  # whether the last step has a line that stays

    def start(self, total_steps: int, title: str, *, first_step: int = 0) -> None:
        """Begin to show a run of `total_steps` that has `first_step` steps behind it (resume)."""
        self._end_live()
        self._display = _Display(title=title, total=total_steps, first=first_step)
        if self.mode == "rich":
            # Prints of the reward function or a library would tear the display, so they are led around it; stdout only
            # where it is the same terminal: a file or a pipe must get its lines.
            self._live = Live(
                self._display,
                console=self._rich,
                refresh_per_second=4,
                transient=True,
                redirect_stderr=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start()
        elif self.mode == "plain":
            self.print_line(f"{title}: {total_steps} steps" + (f", {first_step} done" if first_step else ""))

    def phase(self, name: str) -> None:
        """What is going on now."""
        self._display.begin_phase(name)

    def step(self, step: int, values: Mapping[str, float | None]) -> None:
        """Step `step` (counted from 1) is done. None as a value is shown as a dash."""
        self._display.finish_step(step, values)
        # The display forgets; a line stays. On a terminal that is worth it for an evaluation only.
        self._printed = self.mode == "plain" or (self.mode == "rich" and "accuracy" in values)
        if self._printed:
            self._print_step()

    def note(self, text: str) -> None:
        """Say something once, in every mode; the same text again is not repeated."""
        if text not in self._said:
            self._said.add(text)
            self.print_line(text)

    def print_line(self, text: str, style: str = "") -> None:
        """A line that stays, above the display where there is one."""
        if self.mode == "rich":
            self._rich.print(Text(_without_controls(text), style=style))
        else:
            self._stream.write(_without_controls(text) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Take the display away, leaving the line of the last step; calling it again does nothing."""
        if self._end_live() and self._display.done > self._display.first and not self._printed:
            self._print_step()

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _print_step(self) -> None:
        fields = self._display.fields()
        for line in _wrap(fields, self._rich.width) if self.mode == "rich" else ["  ".join(fields)]:
            self.print_line(line)

    def _end_live(self) -> bool:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        return live is not None


class _Display:
    """The state of a run and its live picture; rich asks for the picture again a few times a second."""

    def __init__(self, *, title: str, total: int, first: int) -> None:
        self.title = title
        self.total = total
        self.first = first
        self.done = first
        self._values: Mapping[str, float | None] = {}
        self._accuracy: float | None = None
        self._phase = ""
        self._started = self._phase_started = time.monotonic()
        # (step, its end) of the last steps: the time still to go follows the speed of now, not that of the first steps.
        self._ends: deque[tuple[int, float]] = deque([(first, self._started)], maxlen=50)

    def begin_phase(self, name: str) -> None:
        self._phase = name
        self._phase_started = time.monotonic()

    def finish_step(self, step: int, values: Mapping[str, float | None]) -> None:
        self.done = step
        self._values = dict(values)
        self._accuracy = values.get("accuracy", self._accuracy)
        if step <= self._ends[-1][0]:  # the evaluation before the first step is no step: its time is no step's time
            self._ends.clear()
        self._ends.append((step, time.monotonic()))

    def fields(self) -> list[str]:
        """What there is to say about the last step."""
        width = len(str(self.total))
        fields = [f"step {self.done:>{width}}/{self.total}", *_fields(self._values)]
        if (eta := self._eta()) is not None and self.done < self.total:
            fields.append(f"eta {duration(eta)}")
        return fields

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        now = time.monotonic()
        eta = self._eta()
        clock = f"{duration(now - self._started)} elapsed"
        if eta is not None and self.done < self.total:
            clock += f", {duration(max(0.0, eta - (now - self._ends[-1][1])))} to go"
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True, overflow="ellipsis", max_width=max(8, options.max_width // 4))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        bar.add_row(
            Text(self.title, style="bold"),
            ProgressBar(total=max(1, self.total), completed=self.done),
            Text(f"{self.done}/{self.total}  {clock}"),
        )
        yield bar
        fields = _fields({key: value for key, value in self._values.items() if key != "accuracy"})
        if self._accuracy is not None:
            fields.append(_field("accuracy", self._accuracy))
        if self._phase:
            # Of fixed width, so that the fields behind it stand still when the phase changes.
            fields.insert(0, f"{self._phase} {duration(now - self._phase_started)}".ljust(11))
        for row in _wrap(fields, options.max_width):
            yield Text(row, style="dim", no_wrap=True, overflow="ellipsis")

    def _eta(self) -> float | None:
        """Seconds from the end of the last step to the end of the run; None: no step has ended yet."""
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        return None if first == last else (end - start) / (last - first) * (self.total - last)


@contextmanager
def logging_to(console: Console) -> Generator[None]:
    """Lead the logging of this process, warnings included, to the console: ours from INFO on, others' warnings.

    Taken back at the end: a handler left behind would write to a stream that its owner may have closed since.
    """
    root, ours, handler = logging.getLogger(), logging.getLogger("plimsoll"), _ConsoleHandler(console)
    levels = root.level, ours.level
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.WARNING if console.mode == "off" else logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(levels[0])
        ours.setLevel(levels[1])


class _ConsoleHandler(logging.Handler):
    _STYLES: Mapping[int, str] = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if not record.name.startswith(("plimsoll", "py.warnings")):
                text = f"{record.name}: {text}"
            if record.levelno >= logging.WARNING:
                text = f"{record.levelname.lower()}: {text}"
            for line in text.rstrip("\n").split("\n"):
                self._console.print_line(line, self._STYLES.get(record.levelno, ""))
        except Exception:  # the contract of logging: a handler reports its own failure and does not end the program
            self.handleError(record)


def duration(seconds: float) -> str:
    """45s, 1m12s, 2h05m, 3d04h."""
    whole = round(seconds)
    for large, small, size, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size}{large}{whole % size // part:02d}{small}"
    return f"{whole}s"


def _scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa  # nan and inf have none


def _rate(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 9999.5 else f"{value:.0f}"


_FORMATS: dict[str, tuple[str, Callable[[float], str]]] = {
    "reward": ("reward {}", "{:.3f}".format),
    "len": ("len {}", "{:.1f}".format),
    "entropy": ("entropy {}", "{:.2f}".format),
    "kl": ("kl {}", _scientific),
    "grad": ("grad {}", "{:.2f}".format),
    "loss": ("loss {}", "{:.4f}".format),
    "lr": ("lr {}", _scientific),
    "accuracy": ("held-out {}", "{:.3f}".format),
    "tok/s": ("{} tok/s", _rate),
}


def _field(key: str, value: float | None) -> str:
    pattern, show = _FORMATS.get(key, (f"{key} {{}}", "{:.3g}".format))
    return pattern.format("-" if value is None else show(value))


def _fields(values: Mapping[str, float | None]) -> list[str]:
    return [_field(key, value) for key, value in values.items()]


def _wrap(fields: list[str], width: int) -> list[str]:
    """Fields in lines of at most `width`, never broken inside a field."""
    rows: list[str] = []
    for field in fields:
        if rows and len(rows[-1]) + 2 + len(field) <= width:
            rows[-1] += f"  {field}"
        else:
            rows.append(field)
    return rows


# Text of models and data ends up here by way of messages; a terminal would obey what it finds in it.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def _without_controls(text: str) -> str:
    return text.translate(_CONTROLS).encode("utf-8", "backslashreplace").decode("utf-8")
