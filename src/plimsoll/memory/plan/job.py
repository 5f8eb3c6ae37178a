"""What the plan is a function of. Nothing here imports torch: `plimsoll plan` answers within a second."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from plimsoll.config.recipe import Recipe
from plimsoll.model.sizes import ModelSizes

MIB = 2**20
GIB = 2**30

SLOT = "all"
"""The one slot of a run whose trainer and engine share their devices."""

ITEMSIZE: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(slots=True, kw_only=True, frozen=True)
class Machine:
    """Capacities, all devices and all nodes alike."""

    device: Literal["cpu", "cuda"]
    device_bytes: int
    """Of one rank's device. Without a GPU: the rank's share of the node's memory."""
    host_bytes: int
    """Of one node."""
    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.ranks // self.ranks_per_node)


@dataclass(slots=True, kw_only=True, frozen=True)
class Job:
    """The work."""

    recipe: Recipe
    sizes: ModelSizes
    reference: ModelSizes | None
    """Of the frozen reference; None: no KL coefficient, or SFT."""
    objective: Literal["policy", "supervised"]
    generates: bool
    """False: SFT without evaluation, so there is no engine."""
    longest_prompt: int
    """Tokens, training and held-out rows."""
    longest_sequence: int
    """Tokens of the longest row that is trained on, prompt and response."""
    num_sequences: int
    """Sequences that one rank's engine could have in flight at once: a step's samples or an evaluation's."""
    measured: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bytes that take the place of a formula: workspace by the name of its phase (`logprob`, `update/gradients`), fixed
    residents by theirs (`cuda_context`, `engine_buffers`, …)."""
    calibrates: bool = True
    """Where `memory.calibration` asks for it, a micro-batch is measured at the end of the load; False: what it would
    find is remembered from another run, or the run does no load of its own."""

    @property
    def shard(self) -> int:
        """Ranks of a shard group."""
        return self.recipe.parallel.shard or self.recipe.cluster.ranks

    @property
    def trains_entropy(self) -> bool:
        """Whether the loss has the entropy in it, whose gradient takes room of its own."""
        return self.objective == "policy" and self.recipe.algorithm.entropy_coefficient != 0

    def calibration_wanted(self, device: Literal["cpu", "cuda"]) -> bool:
        """`memory.calibration`, and what its `auto` means."""
        setting = self.recipe.memory.calibration
        if setting != "auto":
            return setting == "on"
        return device == "cuda" or self.is_large

    @property
    def is_large(self) -> bool:
        """Whether parameters, gradients and moments take 1 GiB or more: below, memory on a CPU is no question."""
        return 4 * self.sizes.num_parameters * ITEMSIZE[self.recipe.model.dtype] >= GIB

    @property
    def replicas(self) -> int:
        """Shard groups (hybrid sharding)."""
        return max(self.recipe.cluster.ranks // self.shard, 1)
