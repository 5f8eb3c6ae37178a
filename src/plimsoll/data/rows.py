"""Raw row → what we need of it, or the reason why not. Pure; knows both row schemas.

Ours:   {"prompt": text or messages, "answer": anything but null, "response": text (SFT), …extra}
verl's: {"prompt": messages, "data_source": text, "reward_model": {"ground_truth": …}, "extra_info": …, …}

The column names of prompt, answer and response are settings. A row without the answer column that has
`reward_model.ground_truth` is verl's. Messages keep `role`, `content` and further text fields (`name`, `tool_call_id`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from plimsoll.config.data import DataConfig

Need = Literal["answer", "response", "prompt"]

ROLES = ("system", "developer", "user", "assistant", "tool")

RESERVED = ("prompt", "response", "answer")
"""Arguments of a reward function: a further column of such a name cannot be handed to it."""

SURROGATE = re.compile("[\ud800-\udfff]")


class RowError(Exception):
    """One row cannot be used."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason  # the same words for every row of this kind: rows are counted by it
        self.detail = detail  # what is particular to this row


@dataclass(slots=True, kw_only=True, frozen=True)
class ParsedRow:
    """A row that is complete except for its tokens."""

    row: int
    where: str
    messages: tuple[Mapping[str, str], ...]
    text: str
    plain: bool  # the prompt was a string
    answer: Any
    response: str | None
    data_source: str
    extra: Mapping[str, Any]


def parse_row(row: int, where: str, columns: Mapping[str, Any], config: DataConfig, need: Need) -> ParsedRow:
    """Raises RowError with the first thing that is wrong with the row."""
    messages = _messages(columns, config)
    answer, is_verl = _answer(columns, config)
    response = None
    if need == "response":
        response = _response(columns, config, answer)
    elif answer is None and need == "answer":
        raise RowError(f"{config.answer_key} is null" if config.answer_key in columns else f"no {config.answer_key}")
    source = columns.get("data_source")
    used = {config.prompt_key, config.answer_key, config.response_key, "data_source", *RESERVED}
    if is_verl:
        used.add("reward_model")
    return ParsedRow(
        row=row,
        where=where,
        messages=messages,
        text=next((m["content"] for m in reversed(messages) if m["role"] == "user"), messages[-1]["content"]),
        plain=isinstance(columns[config.prompt_key], str),
        answer=answer,
        response=response,
        data_source="" if source is None else str(source),
        extra={name: value for name, value in columns.items() if name not in used},
    )


def withheld_columns(columns: Mapping[str, Any], config: DataConfig) -> list[str]:
    """Columns that a reward function cannot be given, because one of its arguments has that name."""
    keys = (config.prompt_key, config.answer_key, config.response_key)
    return [name for name in RESERVED if name in columns and name not in keys]


def has_bad_text(value: Any) -> bool:
    """Whether any string in `value`, names included, holds a lone surrogate: no tokenizer and no file takes it."""
    if isinstance(value, str):
        return not value.isascii() and SURROGATE.search(value) is not None
    if isinstance(value, Mapping):
        return any(has_bad_text(k) or has_bad_text(v) for k, v in cast(Mapping[Any, Any], value).items())
    if isinstance(value, list | tuple):
        return any(has_bad_text(item) for item in cast(Sequence[Any], value))
    return False


def replace_bad_text(value: Any) -> Any:
    """The same value with U+FFFD for each lone surrogate."""
    if isinstance(value, str):
        return SURROGATE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return {replace_bad_text(k): replace_bad_text(v) for k, v in items}
    if isinstance(value, list | tuple):
        return [replace_bad_text(item) for item in cast(Sequence[Any], value)]
    return value


def _messages(columns: Mapping[str, Any], config: DataConfig) -> tuple[Mapping[str, str], ...]:
    key = config.prompt_key
    value = columns.get(key)
    if value is None:
        raise RowError(f"{key} is null" if key in columns else f"no {key}")
    if isinstance(value, str):
        messages: list[Mapping[str, str]] = [{"role": "user", "content": value}]
        if not value:
            raise RowError(f"{key} is empty")
    elif isinstance(value, list):
        messages = [_message(f"{key}[{i}]", message) for i, message in enumerate(cast(list[Any], value))]
        if not messages:
            raise RowError(f"{key} is an empty list")
    else:
        raise RowError(f"{key} is neither text nor a list of messages", f"it is {_kind(value)}")
    if messages[-1]["role"] == "assistant":
        raise RowError(f"{key} ends with an assistant message", "a prompt ends where the model begins")
    if config.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return tuple(messages)


def _message(path: str, message: Any) -> Mapping[str, str]:
    if not isinstance(message, Mapping):
        raise RowError("message is not an object", f"{path} is {_kind(message)}")
    # Columns of a parquet struct exist in every message; null says that this one has none.
    fields = {name: value for name, value in cast(Mapping[str, Any], message).items() if value is not None}
    for name in ("role", "content"):
        if name not in fields:
            raise RowError(f"message without {name}", path)
    if fields["role"] not in ROLES:
        raise RowError(
            "message with an unknown role", f"{path}.role is {fields['role']!r}, not one of {', '.join(ROLES)}"
        )
    fields["content"] = _content(f"{path}.content", fields["content"])
    for name, value in fields.items():
        if not isinstance(value, str):
            raise RowError(f"message with {name} that is not text", f"{path}.{name} is {_kind(value)}")
    return fields


def _content(path: str, content: Any) -> str:
    """A list of text parts is joined as it is; other parts (images) are refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("message content is not text", f"{path} is {_kind(content)}")
    texts: list[str] = []
    for index, part in enumerate(cast(list[Any], content)):
        fields: Mapping[str, Any] = cast(Mapping[str, Any], part) if isinstance(part, Mapping) else {}
        text: Any = fields.get("text")
        if fields.get("type") != "text" or not isinstance(text, str):
            kind: Any = fields.get("type", _kind(part))
            raise RowError("message content has a part that is not text", f"{path}[{index}] is {kind!r}")
        texts.append(text)
    return "".join(texts)


def _answer(columns: Mapping[str, Any], config: DataConfig) -> tuple[Any, bool]:
    """(answer or None, whether it came from verl's column)."""
    if config.answer_key in columns:
        answer = columns[config.answer_key]
        return (None if _is_nan(answer) else answer), False
    model = columns.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return cast(Mapping[str, Any], model)["ground_truth"], True
    return None, False


def _response(columns: Mapping[str, Any], config: DataConfig, answer: Any) -> str:
    key = config.response_key
    value = columns.get(key)
    if value is None:
        key, value = config.answer_key, answer
    if value is None:
        raise RowError(f"neither {config.response_key} nor {config.answer_key}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"{key} is not text", f"it is {_kind(value)}")
    return str(value)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value  # what pandas writes for a missing value


def _kind(value: Any) -> str:
    """`the int 5`, `a list`: enough to find it, never long."""
    name = type(value).__name__
    return f"the {name} {value!r}" if isinstance(value, int | float) else f"of type {name}"
