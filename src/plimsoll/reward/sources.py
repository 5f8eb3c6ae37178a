"""Which built-in rule scores the rows of a well-known data source: what `by_source` falls back to."""

from collections.abc import Mapping
from typing import TypeVar

Found = TypeVar("Found")

BUILT_IN_SOURCES: Mapping[str, str] = {
    "openai/gsm8k": "number",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "math",
    "math_dapo": "math",
    "math_dapo_reasoning": "math",
    "aime*": "math",
    "numina_aops_forum": "math",
    "numina_synthetic_math": "math",
    "numina_amc_aime": "math",
    "numina_synthetic_amc": "math",
    "numina_cn_k12": "math",
    "numina_olympiads": "math",
    "BytedTsinghua-SIA/DAPO*": "math",
    "BytedTsinghua-SIA/AIME*": "math",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "gym:*": "reasoning_gym",
    "task:*": "exact_match",
}
"""`data_source` as verl's preparation scripts write it, and of our own generators → name of a built-in rule."""


def find_source(table: Mapping[str, Found], data_source: str) -> Found | None:
    """The entry of exactly that name, else the one with the longest beginning (`aime*`) that fits."""
    if data_source in table:
        return table[data_source]
    fitting = [key for key in table if key.endswith("*") and data_source.startswith(key[:-1])]
    return table[max(fitting, key=len)] if fitting else None
