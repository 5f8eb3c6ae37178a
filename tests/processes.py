"""Processes that a test could have left behind."""

from contextlib import suppress

import psutil


def children_left() -> list[psutil.Process]:
    """All below this one but multiprocessing's tracker, which some tests start and which lives as long as we do."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        words = ""
        with suppress(psutil.Error):  # a zombie has no command line, and counts
            words = " ".join(process.cmdline())
        if "resource_tracker" not in words:
            found.append(process)
    return found
