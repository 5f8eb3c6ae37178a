"""What a test could have left behind: processes, and what this process holds."""

import gc
import os
from contextlib import suppress
from pathlib import Path

import psutil


def children_left() -> list[psutil.Process]:
    """All below this one but multiprocessing's tracker and fork server: some tests start them, and they live as long
    as we do."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        words = ""
        with suppress(psutil.Error):  # a zombie has no command line, and counts
            words = " ".join(process.cmdline())
        if "multiprocessing.resource_tracker" not in words and "multiprocessing.forkserver" not in words:
            found.append(process)
    return found


def open_files(folder: Path) -> list[str]:
    """Files in `folder` that this process has open. Needs /proc."""
    links = (os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return [link for link in links if link.startswith(str(folder))]


def host_buffer_bytes() -> int:
    """Bytes of the maps that children do not inherit: the host buffers of plimsoll.weights. Needs /proc."""
    gc.collect()
    lines = [line.split() for line in Path("/proc/self/smaps").read_text().splitlines()]
    sizes = [1024 * int(words[1]) for words in lines if words[0] == "Size:"]
    flags = [words[1:] for words in lines if words[0] == "VmFlags:"]
    return sum(size for size, found in zip(sizes, flags, strict=True) if "dc" in found)
