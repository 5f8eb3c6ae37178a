"""The ledger for any torch loop: who holds what in each of its phases, trends, and the table when memory runs out.

    from plimsoll.memory.standalone import MemoryLedger

    with MemoryLedger("runs/mine/memory.jsonl", device="cuda") as ledger:
        ledger.track("parameters", model.parameters)
        for step in range(1, 101):
            ledger.step(step)
            with ledger.phase("update"):
                ...

One process, one ledger. Ranks may share the file: each row is one write.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from plimsoll.errors import RefusedError
from plimsoll.jsonl import write_json
from plimsoll.memory.device import DeviceReader, device_reader
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.resident import Place, Resident, Survival, storage_bytes


class MemoryLedger:
    """Writes one row a phase to a file like RUN/memory.jsonl of a run; the log (`plimsoll.memory`) has the rest.

    Build it before anything large is loaded: growth of host memory is counted from here.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: torch.device | str | DeviceReader | None = None,
        rank: int = 0,
        process: str = "trainer",
        interval: float = 0.02,
        host_start: int | None = None,
    ) -> None:
        """Open the file for appending; its folder is made.

        Args:
            path: of the file; a folder gets a `memory.jsonl`.
            device: whose memory is recorded; by default the current CUDA device, or the CPU where there is none.
            rank: which the rows name.
            process: its role, which the rows name.
            interval: seconds between two readings of host memory inside a phase.
            host_start: anonymous host memory in bytes to count growth from; by default that of now.
        """
        path = Path(path)
        if path.suffix != ".jsonl":
            path /= "memory.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if isinstance(device, str):
            device = torch.device(device)
        self._type = device.type if isinstance(device, torch.device) else "cpu"
        self._residents: dict[str, Resident] = {}
        self._phase: str | None = None
        self._closed = False
        self.recorder = Recorder(
            path,
            rank=rank,
            device=device_reader(device) if isinstance(device, torch.device) else device,
            residents=lambda: list(self._residents.values()),
            interval=interval,
            process=process,
            host_start=host_start,
        )

    def track(self, name: str, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Name tensors: `tensors` is called at the end of every phase and may then give others than before.

        Counted are the distinct storages on the ledger's device; of a DTensor this rank's shard. Tracking a name again
        replaces what it stood for.
        """
        kind = self._type

        def measured() -> int:
            return storage_bytes(tensor for tensor in tensors() if tensor.device.type == kind)

        self.track_bytes(name, measured)

    def track_bytes(self, name: str, measured: Callable[[], int], *, place: Place = Place.DEVICE) -> None:
        """Name bytes that are no tensors here, or that lie elsewhere (`Place.HOST`)."""
        self._residents[name] = Resident(name=name, survival=Survival.KEEP, measured=measured, place=place)

    def step(self, number: int) -> None:
        """Rows from here on belong to this step."""
        self.recorder.begin_step(number)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Record what happens inside, under any name. Exceptions are recorded and go on their way.

        RefusedError when a phase goes on already: its peaks could not be told from those of the inner one.
        """
        if self._phase is not None:
            raise RefusedError(
                f"phase {name!r} begins inside phase {self._phase!r}: phases do not nest, since a device has only one "
                "pair of peaks. End the outer one first."
            )
        self._phase = name
        try:
            with self.recorder.phase(name):
                yield
        finally:
            self._phase = None

    def seconds(self) -> dict[str, float]:
        """Wall seconds of each phase since `step`."""
        return self.recorder.seconds_by_phase()

    def describe(self, name: str, *, model: str = "", algorithm: str = "") -> None:
        """Write a recipe.json beside the file, unless there is one: `plimsoll report FOLDER` then shows the folder."""
        path = self.path.parent / "recipe.json"
        if not path.exists():
            write_json(path, {"name": name, "model": {"path": model}, "algorithm": {"name": algorithm}})

    def close(self) -> None:
        """End the thread that samples, and close the file. May be called again."""
        if not self._closed:
            self._closed = True
            self.recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
