"""Names that are still read, each under the name it has now."""

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "train.lr": "train.learning_rate",
    "train.max_steps": "train.steps",
}
"""Other name → key. The other name alone works and is said on stderr; both together are refused."""
