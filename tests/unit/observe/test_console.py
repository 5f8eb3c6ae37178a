"""The console: plain lines, a live display that leaves the terminal as it was, and logging through both."""

import io
import logging
import sys
import warnings

import pytest

from plimsoll.observe.console import Console, duration, logging_to

VALUES = {"reward": 0.4312, "len": 6.93, "entropy": 0.521, "kl": 0.0, "grad": 0.834, "tok/s": 1234.4}


def test_plain_mode_says_one_line_a_step() -> None:
    out = io.StringIO()
    with Console("plain", stream=out) as console:
        console.start(200, "quickstart")
        console.phase("rollout")
        console.step(12, VALUES)
    title, line = out.getvalue().splitlines()
    assert title == "quickstart: 200 steps"
    assert line.startswith("step  12/200  reward 0.431  len 6.9  entropy 0.52  kl 0.0e0  grad 0.83  1234 tok/s  eta ")


def test_auto_is_plain_where_there_is_no_terminal() -> None:
    assert Console("auto", stream=io.StringIO()).mode == "plain"


def test_values_that_are_no_numbers_or_unknown_do_not_end_the_run() -> None:
    out = io.StringIO()
    with Console("plain", stream=out) as console:
        console.start(2, "t")
        console.step(2, {"reward": None, "kl": float("nan"), "grad": float("inf"), "mismatch": 0.012345, "lr": 3e-6})
    assert out.getvalue().splitlines()[1] == "step 2/2  reward -  kl nan  grad inf  mismatch 0.0123  lr 3.0e-6"


def test_the_time_to_go_leaves_out_the_evaluation_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("plimsoll.observe.console.time.monotonic", lambda: now)
    out = io.StringIO()
    console = Console("plain", stream=out)
    console.start(10, "t")
    now = 1000.0
    console.step(0, {"accuracy": 0.5})
    for step in (1, 2):
        now += 3.0
        console.step(step, {"reward": 1.0})
    assert [line.partition("  eta ")[2] for line in out.getvalue().splitlines()[1:]] == ["", "27s", "24s"]


def test_a_resumed_run_says_what_is_behind_it() -> None:
    out = io.StringIO()
    with Console("plain", stream=out) as console:
        console.start(200, "quickstart", first_step=40)
    assert out.getvalue() == "quickstart: 200 steps, 40 done\n"


@pytest.mark.parametrize("mode", ["plain", "rich", "off"])
def test_a_note_is_said_once_in_every_mode(mode: str) -> None:
    out = io.StringIO()
    with Console(mode, stream=out) as console:  # pyright: ignore[reportArgumentType]
        console.start(3, "t")
        for _ in range(3):
            console.note("checkpoint.every is longer than the run: only the end is saved")
    assert out.getvalue().count("only the end is saved") == 1


def test_off_shows_no_progress() -> None:
    out = io.StringIO()
    with Console("off", stream=out) as console:
        console.start(3, "t")
        console.phase("rollout")
        console.step(1, VALUES)
    assert out.getvalue() == ""


def test_the_display_restores_the_terminal_when_the_block_fails() -> None:
    out = io.StringIO()
    stdout, stderr = sys.stdout, sys.stderr

    def run() -> None:
        with Console("rich", stream=out) as console:
            console.start(3, "t")
            console.step(1, VALUES)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    text = out.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0  # the cursor was hidden, then shown
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    assert "step 1/3  reward 0.431" in text[text.rfind("\x1b[?25h") :]  # the last step stays


def test_the_display_shows_phase_progress_and_the_last_evaluation() -> None:
    out = io.StringIO()
    with Console("rich", stream=out) as console:
        console.start(3, "quickstart")
        console.step(1, VALUES | {"accuracy": 0.25})
        console.step(2, VALUES)
        console.phase("rollout")
        picture = io.StringIO()
        from rich.console import Console as RichConsole

        RichConsole(file=picture, width=60).print(console._display)
    lines = picture.getvalue().splitlines()
    assert "quickstart" in lines[0]
    assert "2/3" in lines[0]
    assert "to go" in lines[0]
    assert lines[1].startswith("rollout 0s")
    assert "held-out 0.250" in lines[-1]
    assert all(len(line) <= 60 for line in lines)


def test_no_control_character_of_a_message_reaches_the_terminal() -> None:
    out = io.StringIO()
    Console("plain", stream=out).note("a\x1b[31mb\x07\x9b\x00 [bold]c[/bold] \ud83d 日本")
    assert out.getvalue() == "a\\x1b[31mb\\x07\\x9b\\x00 [bold]c[/bold] \\ud83d 日本\n"


def test_logging_goes_through_the_console_with_its_level() -> None:
    out = io.StringIO()
    console = Console("plain", stream=out)
    with logging_to(console):
        logging.getLogger("plimsoll.memory").info("After update_actor, %d", 3)
        logging.getLogger("plimsoll.memory").debug("hidden")
        logging.getLogger("plimsoll.train").warning("two\nlines")
        logging.getLogger("library").info("hidden")
        logging.getLogger("library").error("broken")
    out_of_it = len(out.getvalue())
    logging.getLogger("library").error("after the run")
    assert len(out.getvalue()) == out_of_it
    assert out.getvalue().splitlines() == [
        "After update_actor, 3",
        "warning: two",
        "lines",
        "error: library: broken",
    ]


def test_warnings_of_libraries_go_through_the_console() -> None:
    out = io.StringIO()
    with warnings.catch_warnings(), logging_to(Console("plain", stream=out)):
        warnings.simplefilter("always")
        warnings.warn("old name", UserWarning, stacklevel=1)
    assert "UserWarning: old name" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (45.4, "45s"), (59.6, "1m00s"), (72, "1m12s"), (7500, "2h05m"), (86400 * 3 + 3600 * 4, "3d04h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
