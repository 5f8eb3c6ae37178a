"""The mode of torch's CUDA allocator: decided per process, before torch is imported, and read back for the ledger.

Trainers run with expandable segments: a segment grows instead of being cut up, so that reserved stays near allocated.
Processes of an engine run without: the pools that their sleep mode uses cannot hold expandable segments, and they
inherit the variables of whoever starts them. torch reads the mode from two variables, the older of which engines look
at; both are handled.

Where an engine runs in the trainer's own process the mode is switched around each of its calls (`AllocatorPolicy`). The
setter is private to torch and has been renamed once; no other file knows it.

The module imports no torch: the command line and the launchers call `environment` first.
"""

import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from plimsoll.errors import RefusedError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("plimsoll.memory")

CURRENT_NAME = "PYTORCH_ALLOC_CONF"
OLD_NAME = "PYTORCH_CUDA_ALLOC_CONF"
_OPTION = "expandable_segments"

Role = Literal["trainer", "rollout"]


def environment(role: Role, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables to set for a process of this role before it imports torch; `env` is left as it is.

    `env` is what the process would inherit (None: the environment of this process). A trainer gets expandable segments
    under both names, unless the user has switched them off (a platform may have none). A rollout process gets them
    switched off under each name that mentions them (set to False rather than removed, so that `os.environ.update` is
    enough), and nothing where none does. Other options are kept; where the two names disagree, a trainer gets what the
    current name says, as torch would.
    """
    inherited = os.environ if env is None else env
    if role == "trainer":
        merged = parse_options(inherited.get(OLD_NAME, "")) | parse_options(inherited.get(CURRENT_NAME, ""))
        text = _format_options(merged if _OPTION in merged else merged | {_OPTION: "True"})
        return {OLD_NAME: text, CURRENT_NAME: text}
    changed: dict[str, str] = {}
    for name in (OLD_NAME, CURRENT_NAME):
        options = parse_options(inherited.get(name, ""))
        if _OPTION in options:
            changed[name] = _format_options(options | {_OPTION: "False"})
    return changed


def parse_options(text: str) -> dict[str, str]:
    """`a:1,b:[256:1,512:2]` to {"a": "1", "b": "[256:1,512:2]"}; commas inside brackets do not separate."""
    options: dict[str, str] = {}
    depth = start = 0
    for index, char in enumerate(text + ","):
        if char == "," and depth == 0:
            key, _, value = text[start:index].partition(":")
            if key.strip():
                options[key.strip()] = value.strip()
            start = index + 1
        else:
            depth += (char == "[") - (char == "]")
    return options


def _format_options(options: Mapping[str, str]) -> str:
    return ",".join(f"{key}:{value}" if value else key for key, value in options.items())


AllocatorMode = Literal["none", "plain", "expandable", "mixed"]


class AllocatorError(RefusedError):
    """This torch does not let its allocator be switched."""


def allocator_mode(device_index: int | None) -> AllocatorMode:
    """The mode as found: by the segments that exist, else by the variables. "none" where there is no CUDA device.

    The segments are the truth: a library in this process may have switched the mode after the start. Segments of
    private pools do not count: an engine's sleep pool and CUDA graphs have plain ones whatever the mode is. "mixed" is
    what to expect with an engine in the process, whose other buffers are plain beside the trainer's.
    """
    if device_index is None:
        return "none"
    segments = [item for item in _segments() if item["device"] == device_index]
    found = {bool(item["is_expandable"]) for item in segments if tuple(item.get("segment_pool_id", (0, 0))) == (0, 0)}
    if not found:
        return "expandable" if inherited_options().get(_OPTION) == "True" else "plain"
    if len(found) == 2:
        return "mixed"
    return "expandable" if True in found else "plain"


def inherited_options() -> dict[str, str]:
    """The options that this process has started with."""
    return parse_options(os.environ.get(CURRENT_NAME) or os.environ.get(OLD_NAME, ""))


class AllocatorBackend(Protocol):
    """What the policy needs of an allocator."""

    def set_options(self, text: str) -> None:
        """Set options as the variables would; those that `text` leaves out may fall back to their defaults."""
        ...

    def options(self) -> str | None:
        """The text that was set last, by anybody; None: the allocator does not say."""
        ...

    def next_segment_is_expandable(self) -> bool:
        """Make a new segment and look at it."""
        ...

    def lies_in_expandable(self, tensor: "Tensor") -> bool:
        """Whether the memory of a tensor is part of an expandable segment."""
        ...


class TorchAllocator:
    """torch's caching allocator on the current CUDA device."""

    def set_options(self, text: str) -> None:
        """Set options. AllocatorError where this torch has neither name of the setter."""
        import torch

        # Asking for the old name where the new one exists would give a warning, which tests turn into an error.
        setter = vars(torch._C).get("_accelerator_setAllocatorSettings")  # pyright: ignore[reportPrivateUsage]
        if setter is None:
            setter = vars(torch.cuda.memory).get("_set_allocator_settings")
        if setter is None:
            raise AllocatorError(
                f"torch {torch.__version__} has no setter for its allocator under a name that plimsoll knows "
                "(torch._C._accelerator_setAllocatorSettings, torch.cuda.memory._set_allocator_settings). Memory that "
                "is shared with an engine cannot be kept out of expandable segments: use torch 2.11 to 2.13, or "
                "rollout.engine: native."
            )
        cast("Callable[[str], None]", setter)(text)

    def options(self) -> str | None:
        """The text that was set last, by anybody; None: this torch does not say."""
        import torch

        getter = vars(torch._C).get("_accelerator_getAllocatorSettings")  # pyright: ignore[reportPrivateUsage]
        return None if getter is None else str(getter())

    def next_segment_is_expandable(self) -> bool:
        """Make a new segment of 2 MiB and look at it.

        Blocks belong to the stream that allocated them: on a stream without blocks nothing comes out of a cache.
        """
        import torch

        taken = {int(segment["stream"]) for segment in _segments()}
        # torch hands out its streams in turn, 32 a device.
        streams = [torch.cuda.Stream() for _ in range(32)]
        free = [stream for stream in streams if stream.cuda_stream not in taken]
        if not free:
            torch.cuda.empty_cache()
            free = streams
        with torch.cuda.stream(free[0]):
            probe = torch.empty(2**19, dtype=torch.uint8, device="cuda")
        expandable = self.lies_in_expandable(probe)
        del probe
        torch.cuda.empty_cache()  # else a plain probe would stay, and the mode be found mixed for ever
        return expandable

    def lies_in_expandable(self, tensor: "Tensor") -> bool:
        """Whether the memory of a CUDA tensor is part of an expandable segment."""
        pointer = tensor.untyped_storage().data_ptr()
        for segment in _segments():
            if int(segment["address"]) <= pointer < int(segment["address"]) + int(segment["total_size"]):
                return bool(segment["is_expandable"])
        raise AssertionError("the tensor is in no segment of torch's allocator")


def _segments() -> Sequence[Mapping[str, Any]]:
    import torch

    return cast("Sequence[Mapping[str, Any]]", torch.cuda.memory_snapshot())


class AllocatorPolicy:
    """Which kind of segment this process makes, and for whom.

    The trainer's mode holds outside of the two context managers; inside them new segments are plain. A switch changes
    later segments only: what lies in the allocator's cache stays as it is, and is handed out again.
    """

    def __init__(
        self,
        backend: AllocatorBackend | None,
        *,
        expandable: bool | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """`backend` None: a CPU run, nothing happens. `expandable`: the trainer's mode, by default what the options
        say, and True where they do not. `options`: the other options, by default those of the environment."""
        self._backend = backend
        self._options = dict(inherited_options() if options is None else options)
        self._expandable = self._options.get(_OPTION) != "False" if expandable is None else expandable
        self._current: bool | None = None
        self._verified: set[bool] = set()
        self._noted = False

    def mode(self) -> AllocatorMode:
        """Of segments that are made from now on."""
        if self._backend is None:
            return "none"
        return "expandable" if (self._expandable if self._current is None else self._current) else "plain"

    def start(self) -> None:
        """Set the trainer's mode, and see that it works, both ways if it will be switched. Before there is an engine.

        AllocatorError when it does not work.
        """
        self.set_expandable(False)
        if self._expandable:
            self.set_expandable(True)

    def set_expandable(self, on: bool) -> None:
        """Switch later segments. The first switch each way is checked on a segment; AllocatorError when it failed."""
        if self._backend is None:
            return
        # torch takes options that a call leaves out back to their defaults (max_split_size_mb, rounding, garbage
        # collection), so each call carries all of them.
        self._backend.set_options(_format_options(self._options | {_OPTION: str(on)}))
        self._current = on
        if on not in self._verified:
            if self._backend.next_segment_is_expandable() is not on:
                raise AllocatorError(
                    f"torch's allocator was told to {'use' if on else 'leave'} expandable segments and did not. "
                    f"Where the platform has none (the driver, or a container that forbids them), start with "
                    f"{CURRENT_NAME}={_OPTION}:False."
                )
            self._verified.add(on)

    @contextmanager
    def plain_segments(self) -> Generator[None]:
        """New segments are plain inside; the mode that was found comes back, also after an exception."""
        before = self._expandable if self._current is None else self._current
        self.set_expandable(False)
        try:
            yield
        finally:
            self.set_expandable(before)

    def plain_buffer(self, make: "Callable[[], Tensor]") -> "Tensor":
        """A tensor that other processes may map (CUDA IPC): made by `make`, in a plain segment.

        A cached block of an expandable segment would be handed out in any mode, so blocks are taken, and held, until
        one lies in a plain segment; then the others go back to the cache.
        """
        if self._backend is None:
            return make()
        held: list[Tensor] = []
        with self.plain_segments():
            tensor = make()
            while self._backend.lies_in_expandable(tensor):
                held.append(tensor)
                tensor = make()
        return tensor

    @contextmanager
    def guard_engine(self) -> Generator[None]:
        """Around every call of an engine in this process: its segments are plain, and the mode is ours again after.

        An engine may set the mode, and other options, by itself: vLLM 0.25.1 sets expandable segments to True on
        leaving its pool, and drops what it does not mention when it limits the size of splits.
        """
        before = self._expandable if self._current is None else self._current
        self.set_expandable(False)
        inside = self._backend.options() if self._backend is not None else None
        try:
            yield
        finally:
            found = self._backend.options() if self._backend is not None else None
            if found != inside and not self._noted:
                self._noted = True
                logger.info("The engine has set the allocator's options to %r; ours are set again.", found)
            self.set_expandable(before)


class FakeAllocator:
    """An allocator for tests without a GPU: it makes segments as torch does, and hands out its cache first."""

    def __init__(self, *, obeys: bool = True) -> None:
        self.obeys = obeys
        self.expandable = False
        self.text = ""
        self.cached_expandable = 0  # blocks of expandable segments that lie in the cache
        self.history: list[str] = []
        self._places: dict[int, bool] = {}

    def set_options(self, text: str) -> None:
        """Keep the text; the mode changes if it speaks of it, and if this allocator obeys."""
        self.history.append(text)
        self.text = text
        value = parse_options(text).get(_OPTION)
        if value is not None and self.obeys:
            self.expandable = value == "True"

    def options(self) -> str | None:
        """The text that was set last."""
        return self.text

    def next_segment_is_expandable(self) -> bool:
        """The mode."""
        return self.expandable

    def allocate(self, num_bytes: int) -> "Tensor":
        """A tensor [num_bytes] uint8, from the cache where it has blocks."""
        import torch

        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        cached = self.cached_expandable > 0
        self.cached_expandable -= cached
        self._places[tensor.data_ptr()] = cached or self.expandable
        return tensor

    def lies_in_expandable(self, tensor: "Tensor") -> bool:
        """As it was allocated."""
        return self._places[tensor.data_ptr()]
