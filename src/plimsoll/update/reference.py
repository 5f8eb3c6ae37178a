"""The frozen reference: admitted for its pass of log-probs, and in one of four places between passes.

    device       stays
    page_cache   nowhere of ours: admitted from a map of its files that is registered meanwhile only
    ring         nowhere: admitted from its files through a ring of fixed buffers that lives meanwhile only
    arena        a copy of this rank's shard in host memory

Between passes the parameters keep their names, shapes and places in the model; only their storages are empty.
"""

import logging
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Literal, Protocol

import torch
from torch import Tensor

from plimsoll.memory.resident import storage_bytes
from plimsoll.model.policy import PackedPolicy
from plimsoll.update.construct import Builder, BuiltModel, own_tensors
from plimsoll.update.movers import reshard
from plimsoll.weights.arena import HostArena
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.mapped import RegistrationRefusedError
from plimsoll.weights.names import checkpoint_tables
from plimsoll.weights.offload import Offloader, storage_sizes, storages_of
from plimsoll.weights.pieces import ParameterTable
from plimsoll.weights.read import Source, read_parameters

logger = logging.getLogger(__name__)

Placement = Literal["device", "page_cache", "ring", "arena"]


class Store(Protocol):
    """Where the values are between passes."""

    host_bytes: int
    """Host memory of its own, held between passes."""

    def fill(self) -> None:
        """Take device memory for the parameters and put the values there."""
        ...

    def vacate(self) -> None:
        """Give the device memory back; also after a `fill` that failed half-way."""
        ...

    def close(self) -> None:
        """Give up what is held between passes. May be called again."""
        ...


class KeptOnDevice:
    """Nothing to do."""

    host_bytes = 0

    def fill(self) -> None:
        """They are there."""

    def vacate(self) -> None:
        """They stay."""

    def close(self) -> None:
        """They go with the model."""


class KeptInFiles:
    """Nothing is kept: the checkpoint's files are read again, as they were when they were opened."""

    host_bytes = 0

    def __init__(
        self, parameters: Mapping[str, Tensor], files: WeightFiles, tables: Mapping[str, ParameterTable], source: Source
    ) -> None:
        self._parameters = parameters
        self._files = files
        self._tables = tables
        self._source: Source = source
        self._storages = storages_of(parameters.values())
        self._sizes = storage_sizes(parameters.values())

    def fill(self) -> None:
        """CheckpointError when a file is not the one that was opened, before or after it was read."""
        self._files.check_unchanged()
        for storage, num_bytes in zip(self._storages, self._sizes, strict=True):
            storage.resize_(num_bytes)
        try:
            self._read()
        except RegistrationRefusedError as error:
            logger.warning("model.reference_placement: ring from now on instead of page_cache: %s", error)
            self._source = "ring"
            self._read()
        self._files.check_unchanged()  # what was read meanwhile may be half of each

    def vacate(self) -> None:
        """Free the storages."""
        for storage in self._storages:
            storage.resize_(0)

    def close(self) -> None:
        """Whoever opened the files closes them."""

    @torch.no_grad()
    def _read(self) -> None:
        read_parameters(self._files, self._tables, self._parameters, source=self._source)


class KeptInArena:
    """A copy of the shard in host memory."""

    def __init__(self, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        self._arena = HostArena({"reference": storage_sizes(parameters.values())}, device=device)
        self._offloader = Offloader(self._arena, "reference", parameters.values())
        self._offloader.offload()
        self.host_bytes = self._arena.num_bytes

    def fill(self) -> None:
        """Copy from the arena."""
        self._offloader.onload()

    def vacate(self) -> None:
        """Free the device memory. Nobody trains a reference: the arena still has its values."""
        self._offloader.drop()

    def close(self) -> None:
        """Give the arena back."""
        self._offloader.close()
        self._arena.close()


class FrozenReference:
    """The reference model and its mover: its parameters have values between `admit` and `evict` only."""

    def __init__(
        self,
        policy: PackedPolicy,
        placement: Placement,
        store: Store,
        control: ControlGroup,
        files: WeightFiles | None = None,
    ) -> None:
        """`policy`: sharded, with its weights, which go to `store` now. `files`: what `store` reads."""
        self.policy = policy
        self.placement = placement
        self.files = files
        self.parameters = tuple(reference_parameters(policy).values())
        """This rank's shards."""
        self._store = store
        self._control = control
        self._store.vacate()
        self._present = placement == "device"

    @property
    def present(self) -> bool:
        """Whether the parameters have values."""
        return self._present

    def admit(self) -> int:
        """Bring the weights to the device; returns this rank's bytes.

        Collective. CheckpointError on every rank when one cannot have its part, and then no rank has any: files that
        are read for each pass may have changed.
        """
        if self._present:
            return 0
        try:
            self._control.together(self._store.fill)
        except BaseException:
            self._store.vacate()
            raise
        self._present = True
        return storage_bytes(self.parameters)

    def evict(self) -> int:
        """Free the device memory; nothing is copied, as nobody trains a reference. On the device it stays."""
        if self.placement != "device":
            reshard(self.policy)
            self._store.vacate()
            self._present = False
        return 0

    @contextmanager
    def scoring(self) -> Generator[PackedPolicy]:
        """The model, for one pass. What the pass gathers is freed; after an error the weights are away too."""
        assert self._present, "the reference is not on the device: its phase admits it"
        try:
            yield self.policy
        except BaseException:
            self.evict()
            raise
        finally:
            reshard(self.policy)

    def host_bytes(self) -> int:
        """Held on the host between passes."""
        return self._store.host_bytes

    def close(self) -> None:
        """Give up files and host memory; there is no pass after this. May be called again."""
        self._store.close()
        if self.files is not None:
            self.files.close()


def build_reference(builder: Builder, built: BuiltModel) -> FrozenReference:
    """The reference of the policy `built`, which has had no update yet, in its placement.

    Its files stay open where each pass reads them, else they are closed; those of the policy are only closed with a
    reference that reads them.
    """
    reference = builder.reference(built)
    parameters = reference_parameters(reference.policy)
    wanted = builder.recipe.model.reference_placement
    placement = builder.plan.reference_placement if wanted == "auto" else wanted

    def make_store() -> Store:
        if placement in ("page_cache", "ring"):
            assert reference.files is not None, "checked with the recipe"
            tables = checkpoint_tables(reference.policy.lm, reference.files.tensors).tables
            return KeptInFiles(parameters, reference.files, tables, "map" if placement == "page_cache" else "ring")
        return KeptInArena(parameters, builder.device) if placement == "arena" else KeptOnDevice()

    with ExitStack() as unless_done:
        if reference.files is not None and reference.files is not built.files:
            unless_done.callback(reference.files.close)
        # One rank may have no room for an arena.
        store = builder.control.together(make_store)
        if isinstance(store, KeptInFiles):
            unless_done.pop_all()
    files = reference.files if isinstance(store, KeptInFiles) else None
    return FrozenReference(reference.policy, placement, store, builder.control, files)


def reference_parameters(policy: PackedPolicy) -> dict[str, Tensor]:
    """What is freed between passes. Buffers stay: they are small, and most are in no file."""
    return {name: tensor for name, tensor in own_tensors(policy.lm).items() if isinstance(tensor, torch.nn.Parameter)}
