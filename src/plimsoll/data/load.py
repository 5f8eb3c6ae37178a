"""A source named in the recipe → Dataset. Every row read is kept, or dropped under a reason, or stops the run.

raw rows ──text rule──▶ ──row rules──▶ ParsedRow ──chat template──▶ ids ──length rule──▶ Prompt
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plimsoll.config.data import DataConfig
from plimsoll.data.chat import ChatFormat, Refusal, chat_format, prompt_token_ids
from plimsoll.data.dataset import DataReport, Dataset, by_reason
from plimsoll.data.gym import gym_rows
from plimsoll.data.order import check_fills_batch
from plimsoll.data.rows import Need, ParsedRow, RowError, has_bad_text, parse_row, replace_bad_text, withheld_columns
from plimsoll.data.sources import RawRow, read_rows
from plimsoll.data.tasks.generate import generate
from plimsoll.errors import DataError
from plimsoll.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASK_PREFIX = "task:"
GYM_PREFIX = "gym:"

ENCODE_BATCH = 1024
"""Conversations tokenised at a time."""

SHOWN_CAUSES = 100
"""Bad rows spelled out in one error; the rest is a count."""

BAD_TEXT = "text is not valid Unicode"


def load_dataset(
    source: str,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    split: Literal["train", "eval"],
    seed: int,
    need: Need,
) -> Dataset:
    """Read, check and tokenise `source`.

    Args:
        source: a .jsonl or .parquet file, `task:NAME` or `gym:NAME`; `data.train` or `data.eval` of the recipe.
        split: `train` must fill a batch of `data.prompts_per_step` unless `data.drop_last` is off; `eval` reads at most
            `data.max_eval_rows` rows and need not fill anything.
        seed: of a generator's training problems; files and held-out problems do not depend on it.
        need: `answer` for rewards, `response` for SFT (a row without it uses its answer), `prompt` when a row may do
            without either.

    Raises:
        DataError: naming rows and reasons, or counts and the key to change.
        RecipeError: an unknown task or task option.
    """
    intake = Intake(source, config, split=split, need=need)
    raw_rows = _raw_rows(source, config, key=intake.key, split=split, seed=seed)
    chat = chat_format(tokenizer)
    if config.system_prompt is not None and not chat.has_template:
        raise DataError("data.system_prompt is set, but the tokenizer has no chat template to put it into: unset it")
    limit = config.max_eval_rows if split == "eval" else None
    parsed = intake.parse(itertools.islice(raw_rows, limit))
    prompts = intake.encode(parsed, tokenizer, chat)
    intake.check(prompts)
    dataset = Dataset(
        prompts=tuple(prompts),
        report=intake.report(prompts, chat),
        fingerprint=fingerprint(prompts, by_messages=chat.reads_clock),
    )
    if split == "train":
        check_fills_batch(dataset, batch_size=config.prompts_per_step, drop_last=config.drop_last)
    return dataset


def _raw_rows(
    source: str, config: DataConfig, *, key: str, split: Literal["train", "eval"], seed: int
) -> Iterator[RawRow]:
    if source.startswith(TASK_PREFIX):
        return generate(source.removeprefix(TASK_PREFIX), config.task, split=split, seed=seed)
    if source.startswith(GYM_PREFIX):
        return gym_rows(source.removeprefix(GYM_PREFIX), config.task, split=split, seed=seed)
    return read_rows(Path(source), key=key)


def fingerprint(prompts: Iterable[Prompt], *, by_messages: bool) -> str:
    """SHA-256 over row number, prompt, answer, response and data source of each prompt, in order.

    `by_messages`: take the messages instead of the ids, where a template prints the date, so that a run can be resumed
    on another day.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        tokens = [dict(message) for message in prompt.messages] if by_messages else prompt.token_ids
        fields = [prompt.row, tokens, prompt.answer, prompt.response, prompt.data_source]
        digest.update(json.dumps(fields, default=repr, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


class Intake:
    """Applies the rules to rows and counts what they do."""

    def __init__(self, source: str, config: DataConfig, *, split: str, need: Need) -> None:
        self.key = f"data.{split}"
        self._source = source
        self._config = config
        self._need: Need = need
        self._num_read = 0
        self._dropped: Counter[str] = Counter()
        self._bad: list[str] = []  # malformed rows, a line each
        self._bad_text: list[str] = []
        self._overlong: list[str] = []
        self._replaced: list[int] = []
        self._truncated: list[int] = []
        self._withheld: dict[str, None] = {}  # column names, in the order seen

    def parse(self, rows: Iterable[RawRow]) -> Iterator[ParsedRow]:
        """Rows that pass the text and row rules."""
        for raw in rows:
            self._num_read += 1
            if raw.problem:
                self._malformed(raw.where, RowError(raw.problem, raw.detail))
                continue
            columns = raw.columns
            if has_bad_text(columns):
                if self._config.bad_text != "replace":
                    self._bad_text.append(f"{raw.where}: {BAD_TEXT}")
                    self._dropped[BAD_TEXT] += 1
                    continue
                columns = replace_bad_text(columns)
                self._replaced.append(raw.row)
            self._withheld.update(dict.fromkeys(withheld_columns(columns, self._config)))
            try:
                yield parse_row(raw.row, raw.where, columns, self._config, self._need)
            except RowError as error:
                self._malformed(raw.where, error)

    def encode(self, rows: Iterator[ParsedRow], tokenizer: "PreTrainedTokenizerBase", chat: ChatFormat) -> list[Prompt]:
        """Prompts of the rows that the template takes and that are short enough."""
        prompts: list[Prompt] = []
        while batch := list(itertools.islice(rows, ENCODE_BATCH)):
            encoded = prompt_token_ids(tokenizer, [row.messages for row in batch], chat)
            for row, ids in zip(batch, encoded, strict=True):
                if isinstance(ids, Refusal):
                    self._malformed(row.where, RowError(ids.reason))
                elif (fitting := self._fit(row, ids)) is not None:
                    prompts.append(_prompt(row, fitting))
        return prompts

    def check(self, prompts: list[Prompt]) -> None:
        """Raises DataError with everything that the settings do not allow."""
        config = self._config
        causes: list[str] = []
        if config.bad_rows == "error":
            causes += _listed(self._bad, f"{self.key}: malformed rows; correct them or set data.bad_rows=drop")
        if config.bad_text == "error":
            causes += _listed(self._bad_text, f"{self.key}: correct the text or set data.bad_text=replace (or drop)")
        if config.overlong == "error":
            causes += _listed(
                self._overlong, f"{self.key}: raise data.max_prompt_tokens or set data.overlong=drop (or truncate_left)"
            )
        if causes:
            raise DataError(causes)
        counts = f"{self.key}={self._source}: {self._num_read} rows read, {self._num_read - len(prompts)} dropped"
        counts += f" ({by_reason(self._dropped)})" if self._dropped else ""
        if len(self._bad) > config.max_bad_share * self._num_read:
            raise DataError(
                f"{counts}: {len(self._bad)} of {self._num_read} rows are malformed, more than "
                f"data.max_bad_share={config.max_bad_share} allows; first: {self._bad[0]}"
            )
        if not prompts:
            raise DataError(f"{counts}; nothing is left: {self._advice()}")

    def report(self, prompts: list[Prompt], chat: ChatFormat) -> DataReport:
        """What happened; call it after `check`."""
        withheld = [
            f"column {name!r} is not handed to the reward function, whose own argument has that name"
            for name in self._withheld
        ]
        return DataReport(
            source=self._source,
            key=self.key,
            num_read=self._num_read,
            num_kept=len(prompts),
            dropped=dict(self._dropped),
            replaced_rows=tuple(self._replaced),
            truncated_rows=tuple(self._truncated),
            longest_prompt=max((len(prompt.token_ids) for prompt in prompts), default=0),
            notes=(*chat.notes, *withheld),
        )

    def _malformed(self, where: str, error: RowError) -> None:
        self._bad.append(f"{where}: {error.reason}" + (f" ({error.detail})" if error.detail else ""))
        self._dropped[error.reason] += 1

    def _fit(self, row: ParsedRow, ids: tuple[int, ...]) -> tuple[int, ...] | None:
        limit = self._config.max_prompt_tokens
        if len(ids) <= limit:
            return ids
        if self._config.overlong == "truncate_left":
            self._truncated.append(row.row)
            return ids[-limit:]
        self._overlong.append(f"{row.where}: {len(ids)} tokens, more than data.max_prompt_tokens={limit}")
        self._dropped[f"longer than data.max_prompt_tokens={limit}"] += 1
        return None

    def _advice(self) -> str:
        """The key behind the most frequent reason."""
        if self._num_read == 0:
            return f"set {self.key} to a source that has rows"
        if self._overlong and len(self._overlong) >= max(len(self._bad), len(self._bad_text)):
            return "raise data.max_prompt_tokens or set data.overlong=truncate_left"
        if len(self._bad_text) > len(self._bad):
            return "set data.bad_text=replace"
        return "set data.prompt_key and data.answer_key to the names of its columns, or correct the rows"


def _prompt(row: ParsedRow, token_ids: tuple[int, ...]) -> Prompt:
    return Prompt(
        row=row.row,
        token_ids=token_ids,
        text=row.text,
        messages=row.messages,
        answer=row.answer,
        data_source=row.data_source,
        extra=row.extra,
        response=row.response,
        plain=row.plain,
    )


def _listed(lines: list[str], advice: str) -> list[str]:
    """The lines under a heading that counts them and says what to do; [] without lines."""
    if not lines:
        return []
    more = [f"… and {len(lines) - SHOWN_CAUSES} more"] if len(lines) > SHOWN_CAUSES else []
    return [f"{advice} ({len(lines)}):", *lines[:SHOWN_CAUSES], *more]
