"""Weights from files to devices and back, each rank its own part: see docs/weights.md.

Names are imported when they are first used: a part of this package that needs no transformers does not load it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plimsoll.weights.arena import HostArena
    from plimsoll.weights.buffers import rebuild_buffers
    from plimsoll.weights.control import ControlGroup
    from plimsoll.weights.export import ExportReport, export_sharded
    from plimsoll.weights.files import WeightFiles
    from plimsoll.weights.layout import local_boxes
    from plimsoll.weights.load import LoadReport, load_sharded
    from plimsoll.weights.offload import Offloader, storage_sizes
    from plimsoll.weights.read import read_parameters
    from plimsoll.weights.ring import StagingRing
    from plimsoll.weights.ties import untie

__all__ = [
    "ControlGroup",
    "ExportReport",
    "HostArena",
    "LoadReport",
    "Offloader",
    "StagingRing",
    "WeightFiles",
    "export_sharded",
    "load_sharded",
    "local_boxes",
    "read_parameters",
    "rebuild_buffers",
    "storage_sizes",
    "untie",
]

_MODULE_OF = {
    "ControlGroup": "control",
    "ExportReport": "export",
    "HostArena": "arena",
    "LoadReport": "load",
    "Offloader": "offload",
    "StagingRing": "ring",
    "WeightFiles": "files",
    "export_sharded": "export",
    "load_sharded": "load",
    "local_boxes": "layout",
    "read_parameters": "read",
    "rebuild_buffers": "buffers",
    "storage_sizes": "offload",
    "untie": "ties",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{_MODULE_OF[name]}"))[name]
