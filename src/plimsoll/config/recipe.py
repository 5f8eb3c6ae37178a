"""The whole recipe: one frozen object for all processes."""

from pydantic import Field

from plimsoll.config.algorithm import AlgorithmConfig
from plimsoll.config.base import Section
from plimsoll.config.checkpoint import CheckpointConfig
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import DataConfig
from plimsoll.config.memory import MemoryConfig
from plimsoll.config.model import ModelConfig
from plimsoll.config.observe import ObserveConfig
from plimsoll.config.parallel import ParallelConfig
from plimsoll.config.reward import RewardConfig
from plimsoll.config.rollout import RolloutConfig
from plimsoll.config.train import TrainConfig


class Recipe(Section):
    """One run."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its folder is RUN_ROOT/NAME."""
    seed: int = Field(default=0, ge=0)
    """Seed of weights, order, noise and generators."""
    run_root: str = "runs"
    """Folder of run folders."""
    model: ModelConfig
    """What is trained."""
    data: DataConfig
    """Prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""
    algorithm: AlgorithmConfig
    """Preset and leaves."""
    train: TrainConfig = TrainConfig()
    """The update."""
    parallel: ParallelConfig = ParallelConfig()
    """Mesh."""
    memory: MemoryConfig = MemoryConfig()
    """Capacities."""
    cluster: ClusterConfig = ClusterConfig()
    """Workers."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    observe: ObserveConfig = ObserveConfig()
    """Watching."""
