"""What an engine holds on the trainer's device, and how it leaves and comes back."""

from collections.abc import Sequence
from typing import Protocol

from plimsoll.memory import names
from plimsoll.memory.resident import Place, Resident, Survival
from plimsoll.types import EnginePart


class Sleeper(Protocol):
    """Of an engine, what moving its parts takes; `types.ColocatedEngine` and the native engine have it."""

    def awake(self, part: EnginePart) -> bool:
        """Whether a part is on the device."""
        ...

    def sleep(self, parts: Sequence[EnginePart]) -> None:
        """Drop parts that are awake. The engine must be idle."""
        ...

    def wake(self, parts: Sequence[EnginePart]) -> None:
        """Memory for parts that sleep, without contents."""
        ...


class EngineMover:
    """A `Mover` of one part of an engine: dropped, and made again. Nothing is copied either way.

    What the memory then holds is for others to say: the weights are of no version until a sync, and the KV cache is
    filled by the next rollout.
    """

    def __init__(self, engine: Sleeper, part: EnginePart) -> None:
        self._engine = engine
        self._part: EnginePart = part

    @property
    def present(self) -> bool:
        """Whether the part is awake. An engine may put other parts to sleep than those that it was asked to."""
        return self._engine.awake(self._part)

    def evict(self) -> int:
        """Sleep."""
        if self.present:
            self._engine.sleep((self._part,))
        return 0

    def admit(self) -> int:
        """Wake."""
        if not self.present:
            self._engine.wake((self._part,))
        return 0


class KvHolder(Sleeper, Protocol):
    """An engine with a KV cache on the trainer's device."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Device bytes of the KV cache now."""
        ...


class WeightHolder(KvHolder, Protocol):
    """An engine that has weights of its own there too."""

    @property
    def weights_bytes(self) -> int:
        """Device bytes of the weights now."""
        ...


def kv_resident(engine: KvHolder, predicted_bytes: int | None, place: Place = Place.DEVICE) -> Resident:
    """The KV cache, computed with the weights in use. `place` ENGINE: it lies in the engine's own pool."""
    return Resident(
        name=names.KV_CACHE,
        survival=Survival.REBUILD,
        predicted_bytes=predicted_bytes,
        measured=lambda: engine.kv_bytes,
        place=place,
        mover=EngineMover(engine, "kv_cache"),
        version=lambda: engine.version,
    )


def weights_resident(engine: WeightHolder, predicted_bytes: int | None, place: Place = Place.ENGINE) -> Resident:
    """Weights that the engine has of its own."""
    return Resident(
        name=names.ROLLOUT_PARAMETERS,
        survival=Survival.REBUILD,
        predicted_bytes=predicted_bytes,
        measured=lambda: engine.weights_bytes,
        place=place,
        mover=EngineMover(engine, "weights"),
        version=lambda: engine.version,
    )
