"""`data`: where prompts come from and in which order."""

from typing import Literal

from pydantic import Field

from plimsoll.config.base import Options, Section


class DataConfig(Section):
    """Sources, tokenisation and order."""

    train: str
    """A .jsonl or .parquet file (our rows or verl's), `task:NAME` for a built-in generator, or `gym:NAME` for a
    generator of reasoning-gym (extra `tasks`)."""
    eval: str | None = None
    """Held-out rows, like `data.train`. A task's held-out problems never occur among its training problems."""
    task: Options = Field(default_factory=dict)
    """Options of the generator named by `task:NAME` or `gym:NAME` (for example `length`, `train_size`, `eval_size`)."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string or a list of messages."""
    answer_key: str = "answer"
    """Column of the expected answer, given to the reward function."""
    response_key: str = "response"
    """Column of the target text (SFT). A row without it uses its answer."""
    system_prompt: str | None = None
    """System message put before prompts that have none."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longest prompt in tokens, chat template included."""
    overlong: Literal["drop", "truncate_left", "error"] = "drop"
    """Longer prompts: dropped and counted, cut to their last tokens, or refused with their row numbers."""
    bad_rows: Literal["error", "drop"] = "error"
    """Malformed rows: refuse all at once with reasons, or drop and count them."""
    max_bad_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """With `bad_rows: drop`, the share of malformed rows above which the data is refused."""
    bad_text: Literal["replace", "drop", "error"] = "replace"
    """Text that is not valid Unicode (a lone surrogate): replace by U+FFFD, drop the row, or refuse."""
    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts (groups) in one step. For SFT: rows in one step."""
    shuffle: bool = True
    """A new order each epoch, from `seed` and the epoch number."""
    drop_last: bool = True
    """Leave out the last, smaller batch of an epoch. False: it is a step of its own."""
    max_eval_rows: int | None = Field(default=None, ge=1)
    """Evaluate on the first so many rows of `data.eval`. Default: all."""
