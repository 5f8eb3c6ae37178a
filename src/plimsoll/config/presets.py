"""What each algorithm name stands for. This table is the only place of these defaults.

Sources: GRPO, arXiv:2402.03300; DAPO, arXiv:2503.14476.
"""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        "normalize_std": True,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "sequence_mean",
        "kl_coefficient": 0.001,
        "kl_estimator": "k3",
        "kl_in": "loss",
        "dynamic_sampling": False,
        "overlong_filter": False,
        "overlong_buffer": 0,
    },
    "dapo": {
        "normalize_std": True,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token_mean",
        "kl_coefficient": 0.0,
        "kl_estimator": "k3",
        "kl_in": "loss",
        "dynamic_sampling": True,
        "overlong_filter": False,
        "overlong_buffer": 0,
    },
}
"""Names that the schema knows and this table does not are refused with "not in this version"."""
